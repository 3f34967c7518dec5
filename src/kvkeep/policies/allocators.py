"""Allocators: how many entries each cell keeps.

All of them keep the sum at `cells x budget` where the cells hold that much (chunk selectors may then use less of it),
and give every cell at least its protected entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.policies.protocols import Allocator, Judgement, Scope, require


@dataclass(frozen=True)
class Uniform(Allocator):
    """Every cell keeps the same number of entries."""

    name: ClassVar[str] = "uniform"

    def allocate(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """The budget, or all that a cell holds if it holds less."""
        return [torch.clamp(judgement.available, max=judgement.budget) for judgement in judgements]


@dataclass(frozen=True)
class Ada(Allocator):
    """The heads of a layer compete for the layer's budget; each keeps a guaranteed share.

    Feng et al. 2024 (arXiv 2407.11550), algorithm 1. Deviation: the guaranteed share is each head's top
    `floor(safeguard * budget)` entries, at least one (as kvpress does), instead of a mix of two roundings, so that the
    total is exact.

    Attributes:
        safeguard: share of the budget that every head keeps; with 0, a head may lose all its entries.
    """

    safeguard: float = 0.2
    name: ClassVar[str] = "ada"

    def __post_init__(self) -> None:
        remedy = "it is the share of the budget that every head keeps; 0.2 is the paper's"
        require(0 <= self.safeguard <= 1, "0 <= safeguard <= 1", f"safeguard={self.safeguard}", remedy)

    def allocate(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """For each layer, the top scores over all its heads, after each head's guaranteed share."""
        counts = []
        for judgement in judgements:
            floor = max(1, math.floor(self.safeguard * judgement.budget + 1e-9)) if self.safeguard else 0
            counts += _compete([judgement], floor)
        return counts


@dataclass(frozen=True)
class Pyramid(Allocator):
    """Lower layers keep more than upper ones; the budgets fall linearly with depth.

    Cai et al. 2024 (arXiv 2406.02069), section 4.2: the last layer keeps `budget / beta` beyond its protected
    window, the first as much above the average as the last is below it. Deviation: budgets are rounded so that their
    sum is exactly the model's (the paper's integer steps drift), and a layer that would get more than the text has
    passes the rest on. A layer that earlier cuts left with less than its share keeps what it has.

    Attributes:
        beta: how many times smaller than the average the last layer's share is, the window left aside.
    """

    beta: float = 20.0
    name: ClassVar[str] = "pyramid"

    def __post_init__(self) -> None:
        require(self.beta >= 1, "beta >= 1", f"beta={self.beta}", "beta=1 is uniform, 20 is the paper's")

    def allocate(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """The layer's share, the same for each of its cells."""
        return [torch.clamp(j.available, max=self._share(j)) for j in judgements]

    def _share(self, judgement: Judgement) -> int:
        # Every layer works out the whole pyramid by itself, so all of it must rest on numbers that are the same for all
        # layers; what a layer holds after an earlier cut is not.
        pinned = max(1, judgement.protects, int(judgement.pinned.max()))  # no layer is left without an entry
        free = judgement.budget - pinned
        lowest = free / self.beta
        if judgement.layers == 1:
            return judgement.budget
        step = 2 * (free - lowest) / (judgement.layers - 1)
        wanted = [2 * free - lowest - step * i for i in range(judgement.layers)]
        shares = apportion(free * judgement.layers, wanted, judgement.length - pinned)
        return pinned + shares[judgement.ordinal]


@dataclass(frozen=True)
class Threshold(Allocator):
    """One threshold on the score for all layers and heads; the newest `floor` positions always stay.

    ContourKV 2026 (arXiv 2608.25230), section 5: the threshold is set so that a cell keeps `budget` entries on
    average, exactly. Scores are compared as they are, so they should mean the same in all cells, as attention does.
    Needs every layer's scores before any layer can be cut, so the peak is the full cache.

    The paper leaves open whether its floor counts in that average. Here it does, as all that stays counts in a budget;
    for `s` entries beside the floor, the other reading, ask for `s + floor`. Not in the paper: the floor shrinks to
    half of a small budget, since one that fills the budget leaves nothing to the threshold; and the cap.

    Attributes:
        floor: the newest positions that every cell keeps.
        cap: the most that a cell keeps, as a multiple of the budget; what it may not keep goes to the next best scores
            of the others. 0 sets no cap, 1 makes all cells equal.
    """

    floor: int = 32
    cap: float = 0.0
    name: ClassVar[str] = "threshold"
    scope: ClassVar[Scope] = "model"

    def __post_init__(self) -> None:
        require(self.floor >= 0, "floor >= 0", f"floor={self.floor}", "0 keeps no recent entries")
        sensible = self.cap == 0 or 1 <= self.cap < math.inf
        require(sensible, "cap=0 or cap >= 1", f"cap={self.cap}", "below 1 the budget could not be spent")

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The newest `floor` positions."""
        return 0, self.floor

    def allocate(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """The counts that one threshold over all judgements gives."""
        most = math.floor(self.cap * judgements[0].budget + 1e-9) if self.cap else None
        return _compete(judgements, floor=0, most=most)


@dataclass(frozen=True)
class Flat(Allocator):
    """Cells that spread their mass over many entries keep more than those that have it in a few.

    After ContourKV 2026 (arXiv 2608.25230), which maps by its dropped mass which cells are flat, and found that sharing
    a budget by this map makes the attention's output worse in every family of its panel: a baseline, no advice. The
    paper says how the map is made, not how the budget follows it. Inferred: a cell's dropped mass is the share of its
    scores outside of its `budget` highest (the paper's is the median over single queries; the scores have summed
    these up); what is left after every cell's guaranteed share is shared in proportion to it, over all layers and
    heads; where nothing is dropped anywhere, equally. Protected entries belong to the guaranteed share and are no mass.

    Attributes:
        safeguard: share of the budget that every cell keeps, at least one entry.
    """

    safeguard: float = 0.2
    name: ClassVar[str] = "flat"
    scope: ClassVar[Scope] = "model"

    def __post_init__(self) -> None:
        remedy = "it is the share of the budget that every cell keeps; 1 is uniform"
        require(0 <= self.safeguard <= 1, "0 <= safeguard <= 1", f"safeguard={self.safeguard}", remedy)

    def allocate(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """The guaranteed share, and a part of the rest that grows with the cell's dropped mass."""
        budget = judgements[0].budget
        floor = max(1, math.floor(self.safeguard * budget + 1e-9))
        # All of it `[B, cells]`, the cells in order of layer, then head.
        available = torch.cat([j.available.cpu() for j in judgements], dim=1)
        pinned = torch.cat([j.pinned.cpu() for j in judgements], dim=1)
        dropped = torch.cat([_dropped_mass(j).cpu() for j in judgements], dim=1).tolist()
        least = torch.minimum(available, pinned.clamp(min=floor))
        totals = available.sum(1).clamp(max=available.shape[1] * budget) - least.sum(1)
        room = (available - least).tolist()
        more = [apportion(total, dropped[row], room[row]) for row, total in enumerate(totals.tolist())]
        counts = least + torch.tensor(more)
        shares, start = [], 0
        for judgement in judgements:
            heads = judgement.valid.shape[1]
            shares.append(counts[:, start : start + heads].to(judgement.valid.device))
            start += heads
        return shares


def masses(judgement: Judgement) -> Tensor:
    """Scores as masses `[B, H_kv, N]`, float64: zero or positive, zero for protected and for missing entries.

    Attention is a mass as it is. Scores below zero, as negative norms, are counted from the lowest of their cell.
    """
    free = judgement.valid & ~judgement.protected
    scores = judgement.scores.double().masked_fill(~free, 0)
    return (scores - scores.amin(-1, keepdim=True).clamp(max=0)).masked_fill(~free, 0)


def _dropped_mass(judgement: Judgement) -> Tensor:
    """`[B, H_kv]` share of each cell's mass that lies outside of its highest entries, at the average budget."""
    mass = masses(judgement)
    best = top_mask(mass, (judgement.budget - judgement.pinned).clamp(min=0))
    dropped = mass.masked_fill(best, 0).sum(-1)
    return dropped / mass.sum(-1).clamp(min=torch.finfo(mass.dtype).tiny)


def apportion(total: int, wanted: Sequence[float], most: int | Sequence[int]) -> list[int]:
    """Whole numbers in proportion to `wanted`, none above `most`, that sum to `total` (or are `most`, if that is less).

    What a capped share cannot take goes to the others in the same proportions; the rest after rounding down goes to
    the largest remainders, the earlier first.
    """
    limits = [most] * len(wanted) if isinstance(most, int) else list(most)
    total = min(total, sum(limits))
    shares = [0.0] * len(wanted)
    open_shares = list(range(len(wanted)))
    left = float(total)
    while open_shares:
        weight = sum(wanted[i] for i in open_shares)
        for i in open_shares:
            shares[i] = left * (wanted[i] / weight if weight > 0 else 1 / len(open_shares))
        full = [i for i in open_shares if shares[i] >= limits[i]]
        if not full:
            break
        for i in full:
            shares[i] = float(limits[i])
            left -= limits[i]
        open_shares = [i for i in open_shares if i not in full]
    whole = [int(share + 1e-9) for share in shares]
    missing = total - sum(whole)
    by_remainder = sorted(range(len(wanted)), key=lambda i: (whole[i] - shares[i], i))
    for i in [i for i in by_remainder if whole[i] < limits[i]][:missing]:
        whole[i] += 1
    return whole


def _compete(judgements: Sequence[Judgement], floor: int, most: int | None = None) -> list[Tensor]:
    """Counts of the entries among the top scores of all cells, each cell's first `floor` and protected ones included.

    No cell gets more than `most`, unless it protects more.
    Ties go to the earlier layer, then the lower head, then the lower position. No layer loses all its entries.
    """
    ranked, available = [], []
    for judgement in judgements:
        scores, eligible = judgement.ranked_scores(), judgement.available
        if most is not None:
            eligible = torch.minimum(eligible, judgement.pinned.clamp(min=most))
            scores = scores.masked_fill(~top_mask(scores, eligible), -torch.inf)
        available.append(eligible.sum(-1))
        if floor:
            guaranteed = top_mask(scores, torch.clamp(judgement.available, max=floor))
            scores = scores.masked_fill(guaranteed & judgement.valid, torch.inf)
        scores = scores.flatten(1)  # [B, H_kv * N]
        best = top_mask(scores, torch.ones_like(scores[:, 0], dtype=torch.int64))
        ranked.append(scores.masked_fill(best, torch.inf))
    together = torch.cat([r.to(ranked[0].device) for r in ranked], dim=1)  # layers may live on different devices
    cells = sum(j.valid.shape[1] for j in judgements)
    total = torch.stack([a.to(together.device) for a in available]).sum(0)  # [B]
    total = torch.clamp(total, max=cells * judgements[0].budget)
    kept = top_mask(together, total)
    counts, start = [], 0
    for judgement in judgements:
        batch, heads, held = judgement.valid.shape
        mask = kept[:, start : start + heads * held].reshape(batch, heads, held)
        counts.append(mask.sum(-1).to(judgement.valid.device))
        start += heads * held
    return counts


def top_mask(scores: Tensor, counts: Tensor) -> Tensor:
    """A mask of the `counts [...]` highest of `scores [..., N]`; of equal scores the lower index wins."""
    most = min(int(counts.max()), scores.shape[-1])
    if most <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    # The last score that is taken is found without sorting the others; of those equal to it, the first ones are taken.
    best = scores.topk(most, dim=-1).values
    last = best.gather(-1, (counts - 1).clamp(0, most - 1)[..., None])
    above, level = scores > last, scores == last
    room = counts - above.sum(-1)
    return above | (level & (level.cumsum(-1) <= room[..., None]))
