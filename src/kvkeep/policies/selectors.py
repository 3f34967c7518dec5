"""Selectors: which entries a cell keeps, given their scores and how many may stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.policies.allocators import top_mask
from kvkeep.policies.protocols import Judgement, Selector, require


@dataclass(frozen=True)
class TopK(Selector):
    """Each cell keeps its highest scores; of equal scores the lower position wins."""

    name: ClassVar[str] = "topk"

    def select(self, judgement: Judgement, counts: Tensor) -> Tensor:
        """Exactly `counts` entries of each cell."""
        return top_mask(judgement.ranked_scores(), counts)


@dataclass(frozen=True)
class Chunks(Selector):
    """Cells keep whole chunks of neighbouring positions, those with the highest mean score.

    Liu et al. 2025 (ChunkKV, arXiv 2502.00299), algorithm 1. Chunks begin at multiples of `length`; the last one may be
    shorter. Deviations: protected entries stay by structure, outside the chunks, and a chunk's mean is over its other
    entries; chunks are taken from the best one down while they fit, so that the budget is never exceeded. Where not
    even one chunk fits, the best entries of the best chunk stay.

    Attributes:
        length: positions per chunk.
        shared: all heads of a layer take the same chunks, by the sum of their scores (the paper's way); false lets
            each head choose its own.
        fill: spend what whole chunks leave of the budget on the best single entries.
    """

    length: int = 20
    shared: bool = True
    fill: bool = False
    name: ClassVar[str] = "chunks"

    def __post_init__(self) -> None:
        require(self.length >= 1, "length >= 1", f"length={self.length}", "20 is the paper's")

    def select(self, judgement: Judgement, counts: Tensor) -> Tensor:
        """At most `counts` entries of each cell, in whole chunks."""
        free = judgement.valid & ~judgement.protected
        chunk = torch.div(judgement.positions, self.length, rounding_mode="floor")  # [B, H_kv, N]
        chunk = chunk.masked_fill(~free, 0)
        chunks = int(judgement.length - 1) // self.length + 1
        shape = (*chunk.shape[:2], chunks)
        total = torch.zeros(shape, device=chunk.device, dtype=torch.float64)
        total.scatter_add_(2, chunk, judgement.scores.masked_fill(~free, 0).double())
        sizes = torch.zeros(shape, device=chunk.device, dtype=torch.int64).scatter_add_(2, chunk, free.long())
        pooled, pooled_sizes = total, sizes
        if self.shared:
            pooled, pooled_sizes = total.sum(1, keepdim=True).expand(shape), sizes.sum(1, keepdim=True).expand(shape)
        mean = (pooled / pooled_sizes.clamp(min=1)).masked_fill(pooled_sizes == 0, -torch.inf)

        order = mean.argsort(dim=-1, descending=True, stable=True)
        room = (counts - judgement.pinned)[..., None]  # [B, H_kv, 1]
        ordered_sizes = sizes.gather(2, order)
        fits = ordered_sizes.cumsum(-1) <= room
        taken = torch.zeros_like(fits).scatter_(2, order, fits)
        kept = judgement.protected | (taken.gather(2, chunk) & free)

        # A cell that could take no chunk at all still keeps what its budget allows of the best one that it holds.
        first = order.gather(2, (ordered_sizes > 0).int().argmax(-1, keepdim=True))  # [B, H_kv, 1]
        best = free & (chunk == first)
        partial = room[..., 0].masked_fill((ordered_sizes * fits).any(-1), 0)  # [B, H_kv]
        kept |= top_mask(judgement.scores.masked_fill(~best, -torch.inf), partial) & best
        if self.fill:
            kept = top_mask(judgement.ranked_scores().masked_fill(kept, torch.inf), counts)
        return kept
