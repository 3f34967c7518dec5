"""Observations made up at random: of a first prompt, or of cells that earlier cuts left with different entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.calibrated import OF_MODEL, LayerStatistics
from kvkeep.observation import Needs, Observation, Rotary, SecondPass


class AnyPass(dict[SecondPass, Tensor]):
    """What a second pass gives: the same numbers for every pass that a policy may ask for.

    Args:
        attention: `[B, H_kv, N]` float32.
    """

    def __init__(self, attention: Tensor) -> None:
        super().__init__({SecondPass(): attention})

    def __missing__(self, second_pass: SecondPass) -> Tensor:
        return self[SecondPass()]


class AnyPlace(dict[str, LayerStatistics]):
    """The same statistics at every place that a policy may name.

    Args:
        statistics: of a layer.
    """

    def __init__(self, statistics: LayerStatistics) -> None:
        super().__init__({OF_MODEL: statistics})

    def __missing__(self, place: str) -> LayerStatistics:
        return self[OF_MODEL]


def changed_passes(observation: Observation, change: Callable[[Tensor], Tensor]) -> AnyPass:
    """The second passes of a random observation, whose numbers `change` has changed."""
    return AnyPass(change(observation.second_passes[SecondPass()]))


def random_observation(
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 64,
    head_size: int = 8,
    queries: int | None = None,
    budget: int = 16,
    ragged: bool = False,
    protect: Sequence[tuple[int, int]] = (),
    question: tuple[int, int] | None = None,
    layer: int = 0,
    layers: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Observation:
    """One layer of a model that does not exist, with everything that a policy may ask for.

        random_observation(length=100, budget=20)                # a first prompt: every cell holds every position
        random_observation(length=100, budget=20, ragged=True)   # a later piece: each cell holds other old entries

    Queries and keys are normally distributed before they are rotated, and the norms of keys and values vary.

    Args:
        batch: rows, B.
        heads: query heads, H.
        kv_heads: KV heads, H_kv.
        length: tokens seen so far, L.
        head_size: D, even.
        queries: how many of the last queries to give, Q; None gives those of the whole text (of its last piece where
            `ragged`).
        budget: entries that a cell may keep on average.
        ragged: the last quarter of the text is new and held by all cells; of the rest each cell holds a random part.
            As in the store, missing slots lie between the two, and hold what looks like entries.
        protect: position ranges `(start, end)` that the caller protects.
        question: positions of the question, if it is visible.
        layer: which of the `layers` layers that share the budget.
        layers: how many they are.
        dtype: of queries, keys and values.
        seed: of everything random; each layer draws its own numbers.

    Returns:
        An observation with keys `[B, H_kv, N, D]`; N = L unless `ragged`.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rotary = ordinary_rotary(head_size)
    everywhere = torch.arange(length).expand(batch, -1)  # [B, L]
    new = max(1, length // 4) if ragged else length
    count = new if queries is None else min(queries, new)
    query_positions = everywhere[:, length - count :]
    keys = normal(batch, kv_heads, length, head_size) * (0.5 + normal(batch, kv_heads, length, 1).abs())
    values = normal(batch, kv_heads, length, head_size) * (0.5 + normal(batch, kv_heads, length, 1).abs())
    positions, valid = everywhere[:, None].expand(-1, kv_heads, -1), torch.ones(batch, kv_heads, length).bool()
    keys = rotary.rotate(keys, everywhere)
    if ragged:
        positions, valid = _ragged(batch, kv_heads, length - new, new, generator)
        index = positions[..., None].expand(-1, -1, -1, head_size)
        keys, values = keys.gather(2, index), values.gather(2, index)
    protected = torch.zeros_like(valid)
    for start, end in protect:
        protected |= (positions >= start) & (positions < end)
    return Observation(
        queries=rotary.rotate(1.5 * normal(batch, heads, count, head_size), query_positions).to(dtype),
        query_positions=query_positions,
        keys=keys.to(dtype),
        values=values.to(dtype),
        positions=positions,
        valid=valid,
        scaling=head_size**-0.5,
        length=length,
        budget=budget,
        layer=layer,
        ordinal=layer,
        layers=layers,
        question=question,
        protected=protected if protect else None,
        protected_positions=len({p for start, end in protect for p in range(start, min(end, length))}),
        rotary=rotary,
        output_weight=(normal(heads, heads * head_size, head_size) * head_size**-0.5).to(dtype),
        second_passes=AnyPass(torch.rand(positions.shape, generator=generator)),
        statistics=AnyPlace(random_statistics(heads, kv_heads, head_size, generator)),
    )


def random_statistics(heads: int, kv_heads: int, head_size: int, generator: torch.Generator) -> LayerStatistics:
    """Statistics of a layer that does not exist."""
    roots = torch.randn(heads, head_size, head_size, generator=generator)
    return LayerStatistics(
        query_mean=torch.randn(heads, head_size, generator=generator),
        query_covariance=roots @ roots.transpose(1, 2) / head_size,
        filters=torch.nn.functional.normalize(torch.randn(kv_heads, head_size, generator=generator), dim=-1),
        copying=torch.rand(heads, generator=generator),
    )


def gathered(observation: Observation, needs: Needs) -> Observation:
    """What an adapter gives a policy: of all that the observation has, what the policy declared."""
    count = observation.queries.shape[2]
    start = 0 if needs.queries is None else max(0, count - needs.queries)
    return replace(
        observation,
        queries=observation.queries[:, :, start:],
        query_positions=observation.query_positions[:, start:],
        rotary=observation.rotary if needs.rotary else None,
        output_weight=observation.output_weight if needs.output_weight else None,
        second_passes={each: observation.second_passes[each] for each in needs.second_passes},
        statistics={each: observation.statistics[each] for each in needs.statistics},
    )


def ordinary_rotary(head_size: int, base: float = 10_000.0) -> Rotary:
    """Rotary positions as Llama computes them (Su et al. 2021, arXiv 2104.09864), halves rotated, in float32.

    Args:
        head_size: D, even; all of it is rotated.
        base: of the frequencies, `base ** (-2i / D)`.
    """
    frequencies = base ** (-torch.arange(0, head_size, 2) / head_size)  # [D / 2]

    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None] * frequencies.to(positions.device).repeat(2)  # [..., N, D]
        return angles.cos(), angles.sin()

    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    return Rotary(cos_sin, apply)


def _ragged(batch: int, kv_heads: int, old: int, new: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions and validity `[B, H_kv, N]`: of each cell a random part of the `old` positions, then all `new` ones."""
    if old == 0:
        positions = torch.arange(new).expand(batch, kv_heads, -1)
        return positions, torch.ones_like(positions, dtype=torch.bool)
    rank = torch.rand(batch, kv_heads, old, generator=generator).argsort(-1).argsort(-1)
    counts = torch.randint(1, old + 1, (batch, kv_heads, 1), generator=generator)
    held = rank < counts
    first = (~held).long().argsort(dim=-1, stable=True)[..., : int(counts.max())]  # held positions, then missing ones
    tail = torch.arange(old, old + new).expand(batch, kv_heads, -1)
    positions = torch.cat([first, tail], dim=-1)
    return positions, torch.cat([held.gather(-1, first), torch.ones_like(tail, dtype=torch.bool)], dim=-1)
