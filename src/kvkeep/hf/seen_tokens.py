"""The tokens that a cache has seen, for policies that make the model repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SeenTokens:
    """The tokens that a cache has seen, column by column. They stay on their device until they are asked for.

    Attributes:
        pieces: `[B, q]` int32, -1 at padding.
    """

    pieces: list[Tensor] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """How many columns there are, padding included."""
        return sum(piece.shape[1] for piece in self.pieces)

    def add(self, ids: Tensor, valid: Tensor | None) -> None:
        """Add the tokens of a forward `[B, q]`; `valid` is false at padding."""
        ids = ids.detach().to(torch.int32, copy=True)
        if valid is not None:
            ids.masked_fill_(~valid.to(ids.device), -1)
        self.pieces.append(ids)
        if len(self.pieces) > 64:  # tokens that come one by one
            self.pieces = [self._joined()]

    def truncate(self, columns: int) -> None:
        """Forget the columns from `columns` on."""
        if columns < self.columns:
            self.pieces = [self._joined()[:, :columns].clone()] if columns else []

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was."""
        self.pieces = [piece[list(rows)] for piece in self.pieces]

    def copy(self) -> SeenTokens:
        """The same tokens for a fork; pieces are never written to."""
        return SeenTokens(list(self.pieces))

    def rows(self) -> list[Tensor]:
        """The columns of each row `[columns]` int64 on the CPU, -1 at padding."""
        return list(self._joined().cpu().long()) if self.pieces else []

    def _joined(self) -> Tensor:
        """All columns, where the newest are."""
        return torch.cat([piece.to(self.pieces[-1].device) for piece in self.pieces], dim=1)
