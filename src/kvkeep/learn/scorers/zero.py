"""Scores nothing: with the decay, the older of two entries leaves first, which is StreamingLLM."""

from __future__ import annotations

from torch import Tensor

from kvkeep.learn.scorers.base import Stateless


class ZeroScorer(Stateless):
    """Zero for every entry: sinks and the last w + k stay.

    Xiao et al. 2024 (arXiv 2309.17453). What every other scorer starts as, since its last layer is zero.
    """

    def score(self, x: Tensor, cells: slice | None) -> Tensor:
        """`[B, C, T]` zeros."""
        return self.normal(x, cells).new_zeros(x.shape[:-1])
