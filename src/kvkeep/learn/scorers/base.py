"""What all scorers have in common: one network for each cell, all cells of a layer or of the model at once.

Shapes: `B` batch, `C` cells (all of the model, or those of one layer: `cells` is the slice), `T` tokens, `I` inputs of
an entry, from `scorer_inputs`. Cell `layer * H_kv + head` is the model's. Parameters are `[C, ...]`, and every product
is one einsum over all cells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from kvkeep.learn.config import KVpopConfig, LearnError, ModelShape
from kvkeep.learn.scorers.inputs import InputStatistics
from kvkeep.policies.online import State


class CellScorer(nn.Module, ABC):
    """Scores entries of all cells: the higher, the longer an entry should stay.

    Args:
        config: what both sides of a policy agree on.
        shape: of the model.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, config: KVpopConfig, shape: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.size = config.input_size(shape.head_size)
        self.register_buffer("mean", torch.zeros(shape.cells, self.size))
        self.register_buffer("deviation", torch.ones(shape.cells, self.size))

    def standardise(self, statistics: InputStatistics) -> None:
        """Take the inputs' mean off from now on and divide by their deviation.

        Raises:
            LearnError: statistics of other cells, or of too few.
        """
        mean, deviation = statistics.result()
        if mean.shape != self.mean.shape:
            raise LearnError(
                expected=f"statistics of {tuple(self.mean.shape)} inputs",
                received=f"{tuple(mean.shape)}",
                remedy="gather them from the model that the scorer is for",
            )
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)

    def normal(self, x: Tensor, cells: slice | None) -> Tensor:
        """`x [B, C, T, I]` standardised, in the type of the parameters.

        Raises:
            LearnError: inputs of another shape.
        """
        mean, deviation = (t if cells is None else t[cells] for t in (self.mean, self.deviation))
        if x.dim() != 4 or x.shape[1] != mean.shape[0] or x.shape[-1] != mean.shape[-1]:
            raise LearnError(
                expected=f"inputs [B, {mean.shape[0]}, T, {mean.shape[-1]}]",
                received=f"{tuple(x.shape)}",
                remedy="pass what scorer_inputs made of these cells",
            )
        return (x.to(mean.dtype) - mean[:, None]) / deviation[:, None]

    def start(self, batch: int, cells: slice | None = None, device: torch.device | None = None) -> State:
        """The state before the first token: tensors `[B, C, ...]` by name; none for most scorers.

        Args:
            batch: B.
            cells: those of one layer; None is all.
            device: other than the scorer's own.
        """
        return {}

    @abstractmethod
    def forward(self, x: Tensor, cells: slice | None = None, valid: Tensor | None = None) -> Tensor:
        """Scores of whole texts.

        Args:
            x: `[B, C, S, I]` from the first token on.
            cells: those of one layer; None is all.
            valid: `[B, S]` false where a token is padding, which is then not taken in. None is none.

        Returns:
            `[B, C, S - w]`: the last w tokens never leave the window and need no score.
        """

    @abstractmethod
    def advance(
        self, new: Tensor, leaving: Tensor, state: State, cells: slice | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Scores while a text comes in, one token or many: takes a token in, then scores one that leaves the window.

        Args:
            new: `[B, C, n, I]` the tokens that come.
            leaving: `[B, C, m, I]`, m <= n: with each of the last m new tokens goes the one that stands w before it.
            state: from `start` or from the last `advance`; it is not changed.
            cells: those of one layer; None is all.
            valid: `[B, n]` false where a new token is padding.

        Returns:
            Scores `[B, C, m]` of the leaving tokens, and the state behind the last new one.
        """


class Stateless(CellScorer):
    """A scorer that sees nothing but the entry itself."""

    @abstractmethod
    def score(self, x: Tensor, cells: slice | None) -> Tensor:
        """`[B, C, T]` of `x [B, C, T, I]`."""

    def forward(self, x: Tensor, cells: slice | None = None, valid: Tensor | None = None) -> Tensor:
        """See `CellScorer.forward`."""
        return self.score(x[:, :, : max(0, x.shape[2] - self.config.protected_window)], cells)

    def advance(
        self, new: Tensor, leaving: Tensor, state: State, cells: slice | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """See `CellScorer.advance`."""
        return self.score(leaving, cells), state


def part(parameter: Tensor, cells: slice | None) -> Tensor:
    """The cells' share of a parameter `[C, ...]`."""
    return parameter if cells is None else parameter[cells]
