"""Scores an entry by a small network of two layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from kvkeep.learn.config import KVpopConfig, ModelShape
from kvkeep.learn.scorers.base import Stateless, part


class MLPScorer(Stateless):
    """`a^T SiLU(W x + c) + b` for each cell.

    KVpop (arXiv 2607.05061), section 3, KVpop_mlp. The paper does not give the width; ours has about as many parameters
    as the mLSTM. The last layer begins at zero.
    """

    def __init__(self, config: KVpopConfig, shape: ModelShape) -> None:
        super().__init__(config, shape)
        width = config.inner_width(shape.head_size)
        self.hidden_weight = nn.Parameter(torch.randn(shape.cells, self.size, width) * self.size**-0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(shape.cells, width))
        self.out_weight = nn.Parameter(torch.zeros(shape.cells, width))
        self.out_bias = nn.Parameter(torch.zeros(shape.cells))

    def score(self, x: Tensor, cells: slice | None) -> Tensor:
        """`[B, C, T]`."""
        hidden = torch.einsum("bcti,ciw->bctw", self.normal(x, cells), part(self.hidden_weight, cells))
        hidden = silu(hidden + part(self.hidden_bias, cells)[:, None])
        return torch.einsum("bctw,cw->bct", hidden, part(self.out_weight, cells)) + part(self.out_bias, cells)[:, None]
