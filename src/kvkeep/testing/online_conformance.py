"""What `check_policy` tries on an online policy: caps, texts in chunks of any size, and what must not matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.policies.online import (
    Arrivals,
    Cells,
    Geometry,
    OnlinePolicy,
    State,
    StaticPolicy,
    WatchingPolicy,
    split_cap,
)
from kvkeep.testing.faults import Fault, generator_states, value_faults
from kvkeep.testing.observations import ordinary_rotary

_ROWS, _HEADS, _SIZE = 2, 2, 8
_CAPS = (1, 2, 3, 5, 8, 13, 16, 21, 34, 64, 100)
_BEHIND = 29  # tokens of a text beyond a full cell


@dataclass(frozen=True, eq=False)
class _Text:
    """Keys and values `[B, H_kv, S, D]` of a text, and attention `[B, H_kv, S, S]` of its queries."""

    keys: Tensor
    values: Tensor
    attention: Tensor

    @classmethod
    def random(cls, length: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> _Text:
        generator = torch.Generator().manual_seed(seed)
        keys, values = (torch.randn(_ROWS, _HEADS, length, _SIZE, generator=generator).to(dtype) for _ in range(2))
        scores = torch.randn(_ROWS, _HEADS, length, length, generator=generator)
        return cls(keys, values, scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1))

    def row(self, row: int) -> _Text:
        return _Text(*(tensor[row : row + 1] for tensor in (self.keys, self.values, self.attention)))


def _alike(one: Tensor, other: Tensor) -> bool:
    """The same but for float32 sums in another order."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def _cells(rows: int, dtype: torch.dtype, layer: int = 0) -> Cells:
    return Cells(rows, _HEADS, _SIZE, _SIZE, dtype, torch.device("cpu"), layer)


def _roomy_geometry(policy: OnlinePolicy, dtype: torch.dtype = torch.float32) -> Geometry:
    """That of the smallest usual cap which the policy can divide."""
    cap = 16
    while True:
        try:
            return split_cap(policy, cap, _cells(1, dtype))
        except BudgetError:
            if cap >= 2**16:
                raise
            cap *= 2


def _run(policy: OnlinePolicy, text: _Text, chunks: Sequence[int], layer: int = 0) -> tuple[Tensor, State]:
    """The priorities of a text that comes in chunks of these sizes, and the memory behind it."""
    if isinstance(policy, StaticPolicy):
        return _run_static(policy, text, chunks, layer)
    if isinstance(policy, WatchingPolicy):
        return _run_watching(policy, text, chunks), {}
    raise PolicyError(
        expected="a StaticPolicy or a WatchingPolicy",
        received=f"{type(policy).__name__}, which is neither",
        remedy="derive from one of them: priorities either never change, or follow the attention",
    )


def _run_static(policy: StaticPolicy, text: _Text, chunks: Sequence[int], layer: int) -> tuple[Tensor, State]:
    """Priorities `[B, H_kv, m]` of all that leave the window."""
    rows = len(text.keys)
    at = _roomy_geometry(policy, text.keys.dtype)
    state, found, seen = policy.begin(_cells(rows, text.keys.dtype, layer)), [], 0
    positions = torch.arange(text.keys.shape[2]).expand(rows, -1)
    for count in chunks:
        new = slice(seen, seen + count)
        gone = slice(max(at.sinks, seen - at.window), max(at.sinks, seen + count - at.window))
        arrivals = Arrivals(
            keys=text.keys[:, :, new],
            values=text.values[:, :, new],
            positions=positions[:, new],
            leaving_keys=text.keys[:, :, gone],
            leaving_values=text.values[:, :, gone],
            leaving_positions=positions[:, gone],
            layer=layer,
            rotary=ordinary_rotary(_SIZE) if policy.needs_rotary else None,
        )
        priorities, state = (policy.step if count == 1 else policy.priorities)(arrivals, state)
        wanted = (rows, _HEADS, gone.stop - gone.start)
        if tuple(priorities.shape) != wanted or priorities.dtype != torch.float32:
            raise PolicyError(
                expected=f"float32 priorities of shape {wanted}",
                received=f"{priorities.dtype} of shape {tuple(priorities.shape)}",
                remedy="one for each leaving entry of each KV head",
            )
        found.append(priorities)
        seen += count
    return torch.cat(found, dim=2), state


def _run_watching(policy: WatchingPolicy, text: _Text, chunks: Sequence[int]) -> Tensor:
    """Priorities `[B, H_kv, S]` of all entries, none of which is evicted."""
    priorities = torch.zeros(*text.keys.shape[:2], 0)
    for count in chunks:
        seen = priorities.shape[2] + count
        attention = text.attention[:, :, seen - count : seen, :seen]
        priorities = policy.observe(torch.nn.functional.pad(priorities, (0, count)), attention)
        if tuple(priorities.shape) != (*text.keys.shape[:2], seen) or priorities.dtype != torch.float32:
            raise PolicyError(
                expected=f"float32 priorities of shape {(*text.keys.shape[:2], seen)}",
                received=f"{priorities.dtype} of shape {tuple(priorities.shape)}",
                remedy="one for each held entry of each KV head",
            )
    return priorities


def _whole(policy: OnlinePolicy, **options: Any) -> tuple[_Text, list[int]]:
    """A text that is longer than a cell, to be read at once."""
    length = _roomy_geometry(policy).held + _BEHIND
    return _Text.random(length, **options), [length]


def _divisions(length: int) -> Iterator[list[int]]:
    """Ways to divide a text into chunks."""
    yield [1] * length
    yield [7] * (length // 7) + [length % 7] * (length % 7 > 0)
    yield [length - 5, 1, 1, 3]


# --- what is tried ----------------------------------------------------------------------------------------------------


def _check_cap(policy: OnlinePolicy) -> Iterator[Fault]:
    for dtype in (torch.float32, torch.bfloat16):
        cells = _cells(1, dtype)
        for cap in _CAPS:
            try:
                geometry = policy.geometry(cap, 0)
                if geometry.slots >= 1 and geometry.entries > cap:
                    yield "over the cap", f"{geometry} holds {geometry.entries} entries where {cap} are allowed"
                split_cap(policy, cap, cells)
            except BudgetError:
                continue
            except PolicyError as error:
                yield "wrong geometry", str(error)
    _roomy_geometry(policy)


def _check_priorities(policy: OnlinePolicy) -> Iterator[Fault]:
    texts = [_whole(policy, dtype=dtype)[0] for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    alike = replace(texts[0], keys=torch.ones_like(texts[0].keys), values=torch.ones_like(texts[0].values))
    zeros = replace(texts[0], keys=torch.zeros_like(texts[0].keys), values=torch.zeros_like(texts[0].values))
    large = torch.nn.functional.normalize(texts[1].keys.float(), dim=-1) * 60_000
    huge = replace(texts[1], keys=large.half(), values=large.half())
    for name, text in zip(("float32", "float16", "bfloat16"), texts, strict=True):
        yield from _finite(policy, text, name)
    yield from _finite(policy, alike, "entries that are all alike")
    yield from _finite(policy, zeros, "entries of nothing but zeros")
    yield from _finite(policy, huge, "float16 keys and values whose norms are near its largest number")


def _finite(policy: OnlinePolicy, text: _Text, name: str) -> Iterator[Fault]:
    length = text.keys.shape[2]
    for chunks in ([length], [1] * length):
        if not bool(_run(policy, text, chunks)[0].isfinite().all()):
            yield "priorities that are not finite", f"NaN or infinity ({name})"


def _check_chunks(policy: OnlinePolicy) -> Iterator[Fault]:
    text, whole = _whole(policy)
    expected, memory = _run(policy, text, whole)
    for chunks in _divisions(whole[0]):
        ours, state = _run(policy, text, chunks)
        if not _alike(ours, expected):
            yield "depends on how a text is divided", f"other priorities in chunks of {chunks[:4]}... than at once"
        if any(not _alike(state[name], memory[name]) for name in memory):
            yield "depends on how a text is divided", f"another memory after chunks of {chunks[:4]}... than at once"


def _check_memory(policy: OnlinePolicy) -> Iterator[Fault]:
    for dtype in (torch.float32, torch.bfloat16):
        text, whole = _whole(policy, dtype=dtype)
        before = policy.begin(_cells(_ROWS, dtype))
        wrong = [name for name, tensor in before.items() if tensor.shape[:1] != (_ROWS,)]
        if wrong:
            yield "wrong memory", f"{wrong} do not begin with the rows"
        _, after = _run(policy, text, whole)
        sizes = [{name: (tuple(t.shape), t.dtype) for name, t in state.items()} for state in (before, after)]
        if sizes[0] != sizes[1]:
            yield "over the cap", f"the memory changes its size: {sizes[0]} before a text, {sizes[1]} after it"


def _check_determinism(policy: OnlinePolicy) -> Iterator[Fault]:
    text, whole = _whole(policy)
    before = generator_states()
    first, second = (_run(policy, text, whole)[0] for _ in range(2))
    if before != generator_states():
        yield "uses a global random generator", "the state of torch's, numpy's or Python's generator has changed"
    if not torch.equal(first, second):
        yield "not deterministic", "two calls on the same input give different priorities"


def _check_input_unchanged(policy: OnlinePolicy) -> Iterator[Fault]:
    text, whole = _whole(policy)
    tensors = (text.keys, text.values, text.attention)
    before = [tensor.clone() for tensor in tensors]
    begun = policy.begin(_cells(_ROWS, torch.float32)) if isinstance(policy, StaticPolicy) else {}
    memory = {name: tensor.clone() for name, tensor in begun.items()}
    if isinstance(policy, StaticPolicy):
        none, at = text.keys[:, :, :0], torch.arange(3).expand(_ROWS, -1)
        rotary = ordinary_rotary(_SIZE) if policy.needs_rotary else None
        some = Arrivals(text.keys[:, :, :3], text.values[:, :, :3], at, none, none, at[:, :0], rotary=rotary)
        policy.priorities(some, begun)
    if isinstance(policy, WatchingPolicy):
        old = torch.zeros(_ROWS, _HEADS, whole[0])
        policy.observe(old, text.attention)
        if bool(old.any()):
            yield "changes its input", "the priorities that `observe` was given are not what they were"
    _run(policy, text, whole)
    if any(not torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True)):
        yield "changes its input", "keys, values or attention are not what they were before the call"
    if any(not torch.equal(begun[name], tensor) for name, tensor in memory.items()):
        yield "changes its input", "the memory that a call was given is not what it was; forks share it"


def _check_rows(policy: OnlinePolicy) -> Iterator[Fault]:
    text, whole = _whole(policy)
    both, _ = _run(policy, text, whole)
    for row in range(_ROWS):
        if not _alike(_run(policy, text.row(row), whole)[0], both[row : row + 1]):
            yield "rows see one another", f"row {row} of two has other priorities than when it is alone"


def _check_autograd(policy: OnlinePolicy) -> Iterator[Fault]:
    text, whole = _whole(policy)
    plain, _ = _run(policy, text, whole)
    modes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "under no_grad": torch.no_grad,
        "under inference_mode": torch.inference_mode,
    }
    for name, mode in modes.items():
        with mode():
            if not _alike(_run(policy, text, whole)[0], plain):
                yield "depends on the autograd mode", f"other priorities {name}"


ONLINE_CHECKS: tuple[Callable[[OnlinePolicy], Iterator[Fault]], ...] = (
    value_faults,
    _check_cap,
    _check_priorities,
    _check_chunks,
    _check_memory,
    _check_determinism,
    _check_input_unchanged,
    _check_rows,
    _check_autograd,
)
