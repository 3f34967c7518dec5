"""The second pass: the model repeats a text that it has just read, and each entry is judged by how it looks back.

The model runs once more over the text's own tokens, with a cache of its own that reads what a KeepCache holds and is
thrown away with everything that the repetition has added. The KeepCache is not written to: its lengths, tails, windows
and marks cannot change. What remains is one number for each entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from kvkeep.attention import attend
from kvkeep.budget import POSITION_BYTES, LayerShape
from kvkeep.errors import UnsupportedError
from kvkeep.hf.attention import HandingLayer
from kvkeep.hf.layers import KeepLayer
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.seen_tokens import SeenTokens
from kvkeep.hf.sliding import KeepSlidingLayer
from kvkeep.hf.support import CACHE_ARGUMENT, output_weight_of
from kvkeep.observation import Observation, SecondPass
from kvkeep.store import RaggedLayer
from kvkeep.store.memory import nbytes
from kvkeep.store.tail import grown_capacity


def check_second_passes(
    passes: Iterable[SecondPass], prompt: RepeatPrompt, lengths: Sequence[int], switch: int | None
) -> None:
    """Refuse a repetition that would change the model's rotary frequencies under the keys that are held.

    Args:
        passes: that will follow.
        prompt: asks for the repetition.
        lengths: logical length of each row at the end of the text.
        switch: the length at which the model changes its frequencies; see `rope_switch`.

    Raises:
        UnsupportedError: the text lies before the switch, and the end of its repetition behind it.
    """
    ends = [length + prompt.longest(length, each) for each in passes for length in lengths]
    if switch is not None and min(lengths) <= switch < max(ends, default=0):
        raise UnsupportedError(
            expected=f"a text that can be repeated below {switch} tokens, where this model changes its frequencies",
            received=f"{max(lengths)} tokens, which a second pass repeats up to position {max(ends)}",
            remedy="shorten the text, repeat less of it at once (chunk=...), or use a policy without a second pass",
        )


def repeat_text(
    decoder: nn.Module,
    layers: Sequence[Any],
    seen: SeenTokens,
    prompt: RepeatPrompt,
    passes: Iterable[SecondPass],
) -> dict[SecondPass, float]:
    """Make the model repeat what a cache holds, and leave in each layer's `repeated` what was looked at.

    Rows are repeated one by one, without their padding.

    Args:
        decoder: of the model that the cache belongs to.
        layers: all layers of the cache; a text has just been processed, and nothing of it is cut yet.
        seen: all tokens that the cache has seen.
        prompt: asks for the repetition.
        passes: ways to repeat.

    Returns:
        Seconds that each pass took; passes that one reading served each count all of it.
    """
    rows = seen.rows()
    longest = max(int((row >= 0).sum()) for row in rows)
    seconds: dict[SecondPass, float] = {}
    for alike in read_alike(passes):
        started = time.perf_counter()
        for layer in (layer for layer in layers if isinstance(layer, KeepLayer)):
            shape = len(rows), layer.store.kv_heads, longest
            for each in alike:
                layer.repeated[each] = torch.zeros(shape, dtype=torch.float32, device=_device(layer.store))
            layer.count_state()
        chunk = alike[0].chunk
        for index, row in enumerate(rows):
            real = row >= 0
            ids = row[real]
            for start in range(0, len(ids), chunk):
                end = min(start + chunk, len(ids))
                fed = prompt.question(ids, start, end)
                look = _Look(alike, index, len(ids), start, end, (len(ids) + torch.arange(len(fed)))[None])
                _look_back(decoder, layers, look, fed, real)
        seconds |= dict.fromkeys(alike, time.perf_counter() - started)
    return seconds


def read_alike(passes: Iterable[SecondPass]) -> Iterator[tuple[SecondPass, ...]]:
    """The passes, those together that read the same tokens of the same softmax and only weigh them otherwise."""
    ordered = sorted(passes, key=lambda each: (each.chunk, each.sinks, each.normalised))
    for _, alike in groupby(ordered, key=lambda each: (each.chunk, each.sinks)):
        yield tuple(alike)


def look_back_bytes(shape: LayerShape, length: int, prompt: RepeatPrompt, second_pass: SecondPass) -> int:
    """The most that a layer needs beside itself during a pass over a first text of one row, as `_Reader` counts it.

    Args:
        shape: what an entry of the layer costs.
        length: of the text.
        prompt: asks for the repetition.
        second_pass: way to repeat.
    """
    most = 0
    vectors = shape.kv_heads * shape.entry_bytes  # keys and values of one position
    for start in range(0, length, second_pass.chunk):
        end = min(start + second_pass.chunk, length)
        fed = len(prompt.question(torch.zeros(length, dtype=torch.long), start, end))
        judged = end - start + min(start, second_pass.sinks)
        tail = grown_capacity(length, length + fed) * (vectors + POSITION_BYTES)
        judged_bytes = judged * vectors // (1 if second_pass.normalised else 2)
        most = max(most, tail + (judged + fed) * vectors // 2 + judged_bytes)
    return most


def score_bytes(shape: LayerShape, length: int) -> int:
    """What a pass leaves of a row of `length` tokens in one layer, until the layer is judged."""
    return 4 * shape.kv_heads * length


@dataclass(frozen=True, eq=False)
class _Look:
    """One chunk's repetition.

    Attributes:
        passes: of which it is part; they read alike.
        row: that is repeated.
        length: of the row.
        start: first position of the chunk.
        end: the position behind it.
        positions: `[1, q]` of the tokens that are fed.
        norms: of the hidden states that each layer's queries are made of, `[1, q]` by layer.
    """

    passes: tuple[SecondPass, ...]
    row: int
    length: int
    start: int
    end: int
    positions: Tensor
    norms: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_normalised(self) -> bool:
        """Whether one of the passes weighs attention by what it moves."""
        return any(each.normalised for each in self.passes)


def _look_back(decoder: nn.Module, layers: Sequence[Any], look: _Look, fed: Tensor, real: Tensor) -> None:
    readers: list[Any] = [
        _Reader(layer, look) if isinstance(layer, KeepLayer) else _window_of(layer, look.row, real) for layer in layers
    ]
    device = next(decoder.parameters()).device
    indices = [layer.index for layer in layers if isinstance(layer, KeepLayer)]
    with torch.no_grad(), _measured_states(decoder, indices, look):
        decoder(
            input_ids=fed[None].to(device),
            position_ids=look.positions.to(device),
            use_cache=True,
            **{CACHE_ARGUMENT: Cache(layers=readers)},
        )


@contextmanager
def _measured_states(decoder: Any, indices: Sequence[int], look: _Look) -> Iterator[None]:
    """Within the block, the norms of the hidden states that go into attention are noted, if the pass asks for them."""
    if not look.is_normalised:
        yield
        return

    def note(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            look.norms[index] = torch.linalg.vector_norm(hidden.float(), dim=-1)

        return hook

    hooks = [
        decoder.layers[index].self_attn.register_forward_pre_hook(note(index), with_kwargs=True) for index in indices
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Reader(HandingLayer):
    """Stands in for a KeepLayer during one forward: reads what that holds of a row, and notes how it is looked at."""

    def __init__(self, layer: KeepLayer, look: _Look) -> None:
        super().__init__()
        self.layer, self.look = layer, look

    def get_seq_length(self) -> int:
        """Tokens of the row before its repetition."""
        return self.look.length

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of the tokens that are fed over the row and one another; arguments as for `KeepLayer.attend`."""
        look, store = self.look, self.layer.store
        positions = look.positions.to(key.device)
        alone = store.fork()
        if store.batch > 1:
            alone.reorder(torch.tensor([look.row]))
        row_bytes = _copied(alone, store)
        chunk = _chunk(alone, look)
        alone.append(key, value, positions)
        observation = chunk.looked_at_by(query, key, positions, scaling, look)
        # What was here at once beside the layer itself: the copy of a row is copied again, with room for what is fed.
        beside = row_bytes + max(chunk.rectangle_bytes, _copied(alone, store) + nbytes(observation.keys))
        beside += nbytes(chunk.keys, chunk.values)
        store.high_water = max(store.high_water, store.bytes().total + beside)
        self.layer.record()
        for each in look.passes:
            weights = 1 / look.norms[self.layer.index].to(key.device) if each.normalised else None
            peaks = observation.attention_peaks(weights)[..., : chunk.positions.shape[2]]  # [1, H_kv, G, n]
            if each.normalised:
                peaks = peaks * _moved(module, chunk.values, query.shape[1])
            best = self.layer.repeated[each][look.row : look.row + 1]
            scores = peaks.amax(2).masked_fill(~chunk.wanted, 0)
            best.scatter_reduce_(2, chunk.positions.masked_fill(~chunk.wanted, 0), scores, "amax")
        del observation, peaks, chunk
        return attend(query, alone, scaling).transpose(1, 2).contiguous()


@dataclass(frozen=True, eq=False)
class _Chunk:
    """The entries that a chunk's queries judge.

    Attributes:
        keys: `[1, H_kv, n, D]`.
        values: `[1, H_kv, n, D]`; of no width where nobody asks for them.
        positions: `[1, H_kv, n]`.
        wanted: `[1, H_kv, n]` false where a cell does not hold what another one does.
        rectangle_bytes: of the copy that they were taken from, where one was needed.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    wanted: Tensor
    rectangle_bytes: int

    def looked_at_by(self, query: Tensor, key: Tensor, positions: Tensor, scaling: float, look: _Look) -> Observation:
        """These entries and the tokens that are fed, judged by the queries of the latter."""
        heads = key.shape[1]
        keys = torch.cat([self.keys, key], dim=2)
        return Observation(
            queries=query,
            query_positions=positions,
            keys=keys,
            values=keys,  # nobody looks at them
            positions=torch.cat([self.positions, positions[:, None].expand(-1, heads, -1)], dim=2),
            valid=torch.cat([self.wanted, self.wanted.new_ones(1, heads, key.shape[2])], dim=2),
            scaling=scaling,
            length=look.length + key.shape[2],
            budget=look.length,
        )


def _chunk(alone: RaggedLayer, look: _Look) -> _Chunk:
    """The entries of the chunk and the sinks, of a layer that holds one row."""
    held = alone.held([look.length])[0]
    wanted = (held.positions >= look.start) & (held.positions < look.end)
    wanted = held.valid & (wanted | (held.positions < min(look.passes[0].sinks, look.start)))
    columns = wanted.flatten(0, 1).any(0).nonzero()[:, 0]
    values = held.values if look.is_normalised else held.values[..., :0]
    return _Chunk(
        held.keys[:, :, columns],
        values[:, :, columns],
        held.positions[:, :, columns],
        wanted[:, :, columns],
        rectangle_bytes=alone.lent_bytes,
    )


def _moved(attention: nn.Module, values: Tensor, heads: int) -> Tensor:
    """`|W_O v|`, the norm of each value behind the output projection of each query head: `[1, H_kv, G, n]` float32.

    A matrix and the triangle of its QR decomposition give every vector the same norm, and the triangle is small.
    """
    weight = output_weight_of(attention, heads).float()  # [H, hidden, D]
    triangles = cast(Tensor, torch.linalg.qr(weight, mode="r").R)  # [H, D, D]
    kv_heads, group = values.shape[1], heads // values.shape[1]
    grouped = triangles.view(kv_heads, group, *triangles.shape[1:])
    norms = [
        torch.linalg.vector_norm(values.float() @ grouped[:, member].transpose(1, 2), dim=-1)  # [1, H_kv, n]
        for member in range(group)
    ]
    return torch.stack(norms, dim=2)


class _Window(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Stands in for a sliding layer during one forward."""

    keys: Tensor | None
    values: Tensor | None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers does it; what would be kept for a next forward is dropped."""
        full: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        self.keys = self.values = None
        return full


def _window_of(layer: KeepSlidingLayer, row: int, real: Tensor) -> _Window:
    """What a sliding layer holds of a row, without its padding; `real [columns]` is false there."""
    window = _Window(sliding_window=layer.sliding_window)
    keys, values, _ = layer.snapshot()
    if keys is None or values is None:
        raise RuntimeError("a sliding layer that has seen nothing")
    held = real[len(real) - keys.shape[2] :].to(keys.device)
    picked = (slice(row, row + 1), slice(None), slice(None) if bool(held.all()) else held)
    keys, values = keys[picked], values[picked]
    window.keys, window.values = keys, values
    # The mask only compares columns, and these follow one another.
    window.cumulative_length = keys.shape[2]
    window.is_initialized, window.device, window.dtype = True, keys.device, keys.dtype
    return window


def _copied(alone: RaggedLayer, store: RaggedLayer) -> int:
    """Bytes of a layer's tensors that are not those of the store."""
    own = {tensor.untyped_storage().data_ptr() for tensor in store.tensors().values()}
    return nbytes(*(t for t in alone.tensors().values() if t.untyped_storage().data_ptr() not in own))


def _device(store: RaggedLayer) -> torch.device:
    return next(iter(store.tensors().values())).device
