"""Does a policy keep its contract? `check_policy` tries it on random observations and tells in words what it breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.observation import Needs, Observation
from kvkeep.policies import AnyPolicy, Full, Judgement, OnlinePolicy, PromptPolicy, parse_policy
from kvkeep.testing.faults import Fault, caught, generator_states, value_faults
from kvkeep.testing.observations import changed_passes, gathered, random_observation
from kvkeep.testing.online_conformance import ONLINE_CHECKS

_LENGTH, _BUDGET, _LAYERS = 67, 20, 2  # odd, and no multiple of a usual chunk


def check_policy(policy: str | AnyPolicy, *, raise_on_failure: bool = True) -> list[str]:
    """Try a policy on random observations, and tell what of its contract it breaks.

        check_policy("snapkv[window=16]+ada")
        check_policy(Policy(MyScorer(), Uniform(), TopK()))

    - It is a frozen dataclass: equal to its copy, with the same hash.
    - Same input, same output, in any autograd mode, without the global random generators, the input left as it was.
    - One boolean mask `[B, H_kv, N]` a layer; scores in float32, finite where an entry is held.
    - Missing entries are never kept, nor looked at; rows do not see one another; no more than `needs` declares is used.
    - A row keeps at least one entry of each layer, over all layers no more than the budget, and everything where the
      budget is as long as the text. A policy that keeps everything by contract, such as `full`, has no budget.
    - Protected entries stay; more of them than the budget holds are refused with a BudgetError.

    Of an online policy:

    - It spends no more than the cap, its memory included, whose size does not depend on the text.
    - One finite float32 priority for each entry that leaves the window, or after each observation for each held one.
    - The same whether a text comes token by token or in chunks; rows and layers do not see one another.

    All this on first prompts and on cells that hold different entries, on texts of 1 to 67 tokens, in float32, float16
    and bfloat16, on keys near float16's largest number, and on entries that are all alike.

    Args:
        policy: a policy, or the text that names it. Needs neither a model nor transformers; takes about a second.
        raise_on_failure: raise instead of only returning what was found.

    Returns:
        One sentence for each kind of fault; empty if there is none.

    Raises:
        PolicyError: with these sentences; or the text names no policy, or the object is none.
    """
    parsed = parse_policy(policy)
    faults: dict[str, str] = {}  # by kind: the first example of each will do
    checks: Sequence[Callable[[Any], Iterator[Fault]]] = ONLINE_CHECKS if isinstance(parsed, OnlinePolicy) else _CHECKS
    for check in checks:
        for kind, detail in caught(check, parsed):
            faults.setdefault(kind, f"{kind}: {detail}")
    found = list(faults.values())
    if found and raise_on_failure:
        raise PolicyError(
            expected=f"{policy} to keep the contract of a policy",
            received=f"{len(found)} kinds of faults:\n- " + "\n- ".join(found) + "\n",
            remedy="the contract stands in kvkeep.policies.protocols; for online policies in kvkeep.policies.online",
        )
    return found


@dataclass
class _Outcome:
    """What a policy made of the layers of a text."""

    judgements: list[Judgement]
    masks: list[Tensor]
    keeps_all: bool

    def same_as(self, other: _Outcome, rows: slice = slice(None)) -> bool:
        """The same entries stay; `rows` picks some of the other's."""
        return all(torch.equal(a, b[rows]) for a, b in zip(self.masks, other.masks, strict=True))


def _run(policy: PromptPolicy, layers: Sequence[Observation]) -> _Outcome:
    """As an adapter does it: judge layer by layer, choose at once or at the end."""
    needs = policy.needs()
    judgements = [policy.judge(gathered(layer, needs)) for layer in layers]
    return _outcome(policy, layers, judgements)


def _outcome(policy: PromptPolicy, layers: Sequence[Observation], judgements: list[Judgement]) -> _Outcome:
    if policy.scope == "model":
        masks = list(policy.choose(judgements))
    else:
        masks = [mask for judgement in judgements for mask in policy.choose([judgement])]
    # What protects every entry, though nobody asked for it, keeps everything by contract.
    keeps_all = isinstance(policy, Full) or all(
        layer.protected is None and torch.equal(judgement.protected & layer.valid, layer.valid)
        for layer, judgement in zip(layers, judgements, strict=True)
    )
    return _Outcome(judgements, masks, keeps_all)


def _text(layers: int = _LAYERS, **options: Any) -> list[Observation]:
    """The layers of one random text."""
    settings: dict[str, Any] = {"length": _LENGTH, "budget": _BUDGET, **options}
    return [random_observation(layer=layer, layers=layers, **settings) for layer in range(layers)]


def _texts() -> Iterator[tuple[str, list[Observation]]]:
    """Every kind of text that a policy may meet, with a name."""
    yield "a first prompt", _text()
    yield "a first prompt of one layer", _text(layers=1)
    yield "cells that hold different entries", _text(ragged=True)
    yield "two rows", _text(batch=2)
    yield "two rows whose cells hold different entries", _text(batch=2, ragged=True)
    yield "as many KV heads as query heads", _text(heads=2, kv_heads=2)
    yield "one KV head", _text(kv_heads=1)
    yield "a visible question", _text(question=(_LENGTH - 9, _LENGTH))
    yield "protected spans", _text(protect=[(0, 3), (30, 34)])
    yield "protected spans and cells that hold different entries", _text(protect=[(0, 5), (60, 64)], ragged=True)
    yield "as many protected positions as the budget", _text(protect=[(5, 5 + _BUDGET)])
    yield "a budget of 1", _text(budget=1)
    yield "a budget of 1 and cells that hold different entries", _text(budget=1, ragged=True)
    for length in (1, 2, 3, 5):
        for budget in {1, 2, length} - {3}:
            if budget <= length:
                yield f"a text of {length} tokens with a budget of {budget}", _text(length=length, budget=budget)
    for dtype in (torch.float16, torch.bfloat16):
        yield f"{dtype}", _text(dtype=dtype)
        yield f"{dtype} and cells that hold different entries", _text(dtype=dtype, ragged=True)
    yield "float16 keys and values whose norms are near its largest number", [_huge(o) for o in _text()]
    yield "entries that are all alike", [_alike(o, 1.0) for o in _text()]
    yield "entries of nothing but zeros", [_alike(o, 0.0) for o in _text()]


# --- what every outcome has to be -------------------------------------------------------------------------------------


def _check_every_text(policy: PromptPolicy) -> Iterator[Fault]:
    for name, layers in _texts():
        for kind, detail in caught(partial(_check_text, layers=layers), policy):
            yield kind, f"{detail} ({name})"


def _check_text(policy: PromptPolicy, layers: list[Observation]) -> Iterator[Fault]:
    yield from _problems(_run(policy, layers), layers)


def _problems(outcome: _Outcome, layers: Sequence[Observation]) -> Iterator[Fault]:
    kept = torch.zeros(layers[0].keys.shape[0], dtype=torch.int64)
    for layer, judgement, mask in zip(layers, outcome.judgements, outcome.masks, strict=True):
        shape = tuple(layer.valid.shape)
        if tuple(mask.shape) != shape or mask.dtype != torch.bool:
            yield "wrong masks", f"expected bool masks of shape {shape}, received {mask.dtype} of {tuple(mask.shape)}"
            return
        scores = judgement.scores
        if tuple(scores.shape) != shape or scores.dtype != torch.float32:
            yield (
                "wrong scores",
                f"expected float32 scores of shape {shape}, received {scores.dtype} of {tuple(scores.shape)}",
            )
        elif not bool(torch.isfinite(scores[layer.valid]).all()):
            yield "scores that are not finite", "NaN or infinity where an entry is held"
        if bool((mask & ~layer.valid).any()):
            yield "keeps missing entries", "the mask is true where `valid` is false"
        if bool((mask.sum((1, 2)) == 0).any()):
            yield "keeps nothing", f"layer {layer.layer} of a row is left without any entry"
        if layer.protected is not None and bool((layer.protected & layer.valid & ~mask).any()):
            yield "drops protected entries", "entries that the caller protects do not stay"
        kept += mask.sum((1, 2))
    first = layers[0]
    allowed = len(layers) * first.keys.shape[1] * first.budget
    if not outcome.keeps_all and int(kept.max()) > allowed:
        yield "over budget", f"keeps {int(kept.max())} entries of a row where the budget allows {allowed}"


def _check_room_for_all(policy: PromptPolicy) -> Iterator[Fault]:
    for ragged in (False, True):
        layers = _text(budget=_LENGTH, ragged=ragged)
        for layer, mask in zip(layers, _run(policy, layers).masks, strict=True):
            if not torch.equal(mask, layer.valid):
                yield "drops entries without need", "the budget is as long as the text, and not everything stays"


def _check_refusal(policy: PromptPolicy) -> Iterator[Fault]:
    if _run(policy, _text()).keeps_all:
        return
    try:
        _run(policy, _text(protect=[(0, _BUDGET + 1)]))
    except BudgetError:
        return
    yield "accepts too much protection", f"no BudgetError for {_BUDGET + 1} protected entries, budget {_BUDGET}"


# --- what must not matter ---------------------------------------------------------------------------------------------


def _check_value(policy: PromptPolicy) -> Iterator[Fault]:
    yield from value_faults(policy)
    if policy.scope not in ("layer", "model"):
        yield "wrong scope", f"expected 'layer' or 'model', received {policy.scope!r}"
    if not isinstance(policy.needs(), Needs):
        yield "wrong needs", f"expected Needs, received {policy.needs()!r}"


def _check_determinism(policy: PromptPolicy) -> Iterator[Fault]:
    for ragged in (False, True):
        before = generator_states()
        first, second = _run(policy, _text(ragged=ragged)), _run(policy, _text(ragged=ragged))
        if before != generator_states():
            yield "uses a global random generator", "the state of torch's, numpy's or Python's generator has changed"
        if not first.same_as(second):
            yield "not deterministic", "two calls on the same input keep different entries"
    alike = [_run(policy, [_alike(o, 1.0) for o in _text()]) for _ in range(2)]
    if not alike[0].same_as(alike[1]):
        yield "not deterministic", "two calls on the same ties keep different entries"


def _check_input_unchanged(policy: PromptPolicy) -> Iterator[Fault]:
    for ragged in (False, True):
        layers = _text(protect=[(0, 3)], ragged=ragged)
        before = [_tensors(layer) for layer in layers]
        judgements = [policy.judge(gathered(layer, policy.needs())) for layer in layers]
        before += [_tensors(judgement) for judgement in judgements]
        _outcome(policy, layers, judgements)
        owners: list[Observation | Judgement] = [*layers, *judgements]
        for owner, old in zip(owners, before, strict=True):
            for name, tensor in _tensors(owner).items():
                if not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(old[name])):
                    yield "changes its input", f"{type(owner).__name__}.{name} is not what it was before the call"


def _check_missing_slots(policy: PromptPolicy) -> Iterator[Fault]:
    for protect in ([], [(0, 3)]):
        layers = _text(batch=2, ragged=True, protect=protect)
        plain = _run(policy, layers)
        for fill in (0.0, -1e4, float("nan")):
            what = f"if keys and values of missing slots are {fill}"
            try:
                if not _run(policy, [_poisoned(layer, fill) for layer in layers]).same_as(plain):
                    yield "reads missing slots", f"other entries stay {what}"
            except Exception as error:
                yield "reads missing slots", f"raises {type(error).__name__} {what}: {error}"
        wider = _run(policy, [_widened(layer) for layer in layers])
        for layer, narrow, wide in zip(layers, plain.masks, wider.masks, strict=True):
            if not torch.equal(narrow, wide[..., _old_columns(layer)]):
                yield "reads missing slots", "other entries stay if there are more missing slots"


def _check_rows(policy: PromptPolicy) -> Iterator[Fault]:
    for ragged, protect in ((False, []), (True, []), (True, [(0, 5), (60, 64)])):
        layers = _text(batch=2, ragged=ragged, protect=protect)
        both = _run(policy, layers)
        for row in (0, 1):
            rows = slice(row, row + 1)
            if not _run(policy, [_row(layer, row) for layer in layers]).same_as(both, rows):
                yield "rows see one another", f"row {row} of two keeps other entries than when it is alone"


def _check_needs(policy: PromptPolicy) -> Iterator[Fault]:
    for ragged in (False, True):
        layers = _text(ragged=ragged)
        declared = _run(policy, layers)
        # Fresh ones, without what was computed from fewer queries.
        generous = _outcome(policy, layers, [policy.judge(replace(layer)) for layer in layers])
        if not generous.same_as(declared):
            yield (
                "uses what it did not declare",
                f"other entries stay if it is given more than {policy.needs()}: all queries, rotary and output weight",
            )


def _check_autograd(policy: PromptPolicy) -> Iterator[Fault]:
    plain = _run(policy, _text())
    modes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "under no_grad": torch.no_grad,
        "under inference_mode": torch.inference_mode,
        "with inputs that require gradients": torch.enable_grad,
    }
    for name, mode in modes.items():
        with mode():
            layers = _text()
            if mode is torch.enable_grad:
                for tensor in (t for layer in layers for t in (layer.queries, layer.keys, layer.values)):
                    tensor.requires_grad_()
            if not _run(policy, layers).same_as(plain):
                yield "depends on the autograd mode", f"other entries stay {name}"


_CHECKS: tuple[Callable[[PromptPolicy], Iterator[Fault]], ...] = (
    _check_value,
    _check_every_text,
    _check_room_for_all,
    _check_refusal,
    _check_determinism,
    _check_input_unchanged,
    _check_missing_slots,
    _check_rows,
    _check_needs,
    _check_autograd,
)


# --- tools ------------------------------------------------------------------------------------------------------------


def _tensors(owner: Observation | Judgement) -> dict[str, Tensor]:
    """Copies of all tensors of an observation or a judgement, by name."""
    fields = {f.name: getattr(owner, f.name) for f in dataclasses.fields(owner)}
    if isinstance(owner, Observation):
        fields |= {f"second_passes[{each}]": tensor for each, tensor in owner.second_passes.items()}
    return {name: value.detach().clone() for name, value in fields.items() if isinstance(value, Tensor)}


def _row(observation: Observation, row: int) -> Observation:
    """One row alone. The output weight is the same for all."""
    names = [f.name for f in dataclasses.fields(observation) if f.name != "output_weight"]
    tensors = {name: getattr(observation, name) for name in names}
    alone: dict[str, Any] = {name: x[row : row + 1] for name, x in tensors.items() if isinstance(x, Tensor)}
    return replace(observation, **alone, second_passes=changed_passes(observation, lambda x: x[row : row + 1]))


def _huge(observation: Observation) -> Observation:
    """Keys and values in float16 with norms of about 60,000; their squares are far beyond float16."""

    def long(x: Tensor) -> Tensor:
        return (torch.nn.functional.normalize(x, dim=-1) * 60_000).half()

    return replace(
        observation,
        queries=observation.queries.half(),
        keys=long(observation.keys),
        values=long(observation.values),
    )


def _alike(observation: Observation, value: float) -> Observation:
    """All queries, keys and values the same: nothing but ties."""
    return replace(
        observation,
        queries=torch.full_like(observation.queries, value),
        keys=torch.full_like(observation.keys, value),
        values=torch.full_like(observation.values, value),
        second_passes=changed_passes(observation, lambda x: torch.full_like(x, value)),
    )


def _poisoned(observation: Observation, fill: float) -> Observation:
    """Missing slots with `fill` as keys and values, with the last position of the text, and protected."""
    missing = ~observation.valid
    protected = observation.protected_or_none() | missing
    return replace(
        observation,
        keys=observation.keys.masked_fill(missing[..., None], fill),
        values=observation.values.masked_fill(missing[..., None], fill),
        positions=observation.positions.masked_fill(missing, observation.length - 1),
        protected=None if observation.protected is None else protected,
        second_passes=changed_passes(observation, lambda x: x.masked_fill(missing, fill)),
    )


def _old_columns(observation: Observation) -> Tensor:
    """Where the columns of an observation are in its `_widened` form."""
    old = observation.keys.shape[2] - max(1, observation.length // 4)
    columns = torch.arange(observation.keys.shape[2])
    return columns + 5 * (columns >= old)


def _widened(observation: Observation) -> Observation:
    """Five more missing slots, as other rows with more entries would cause them: between old and new entries."""
    columns = _old_columns(observation)
    index = torch.zeros(int(columns[-1]) + 1, dtype=torch.int64)
    index[columns] = torch.arange(len(columns))
    missing = torch.ones_like(index, dtype=torch.bool)
    missing[columns] = False
    protected = observation.protected
    return replace(
        observation,
        keys=observation.keys[:, :, index],
        values=observation.values[:, :, index],
        positions=observation.positions[:, :, index],
        valid=observation.valid[:, :, index] & ~missing,
        protected=None if protected is None else protected[:, :, index],
        second_passes=changed_passes(observation, lambda x: x[:, :, index]),
    )
