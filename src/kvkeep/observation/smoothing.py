"""Scores pooled over neighbours, whatever a cell still holds of them."""

from __future__ import annotations

import torch
from torch import Tensor


def smooth(scores: Tensor, kernel: int, pool: str = "avg", valid: Tensor | None = None) -> Tensor:
    """Pool scores `[B, H_kv, N]` over `kernel` neighbours, the window centred, edges padded with zeros.

    Args:
        scores: what to pool, over the last dimension; zero or positive.
        kernel: width of the window, odd.
        pool: `avg` or `max`.
        valid: `[B, H_kv, N]` which entries are held: neighbours are then the nearest ones that the cell holds, however
            many missing ones lie between. How many there are depends on the other cells, and must not matter.

    Returns:
        `[B, H_kv, N]`, zero where `valid` is false.
    """
    if kernel <= 1:
        return scores
    if valid is not None and not bool(valid.all()):
        held_first = (~valid).long().argsort(dim=-1, stable=True)
        packed = scores.masked_fill(~valid, 0).gather(-1, held_first)
        pooled = torch.empty_like(packed).scatter_(-1, held_first, smooth(packed, kernel, pool))
        return pooled.masked_fill(~valid, 0)
    if pool == "max":
        return torch.nn.functional.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    return torch.nn.functional.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)
