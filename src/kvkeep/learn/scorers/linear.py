"""Scores an entry by a weighted sum of its numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvkeep.learn.config import KVpopConfig, ModelShape
from kvkeep.learn.scorers.base import Stateless, part


class LinearScorer(Stateless):
    """`a^T x + b` for each cell.

    KVpop (arXiv 2607.05061), section 3. It begins at zero.
    """

    def __init__(self, config: KVpopConfig, shape: ModelShape) -> None:
        super().__init__(config, shape)
        self.out_weight = nn.Parameter(torch.zeros(shape.cells, self.size))
        self.out_bias = nn.Parameter(torch.zeros(shape.cells))

    def score(self, x: Tensor, cells: slice | None) -> Tensor:
        """`[B, C, T]`."""
        x = self.normal(x, cells)
        return torch.einsum("bcti,ci->bct", x, part(self.out_weight, cells)) + part(self.out_bias, cells)[:, None]
