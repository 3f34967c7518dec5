"""The queries of a text that is not cut yet, forward by forward: its policy will judge by the last of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Piece = tuple[Tensor, Tensor, Tensor | None]  # queries `[B, H, q, D]`, positions `[B, q]`, and which are no padding


class TextQueries:
    """Queries of a text, as many as a policy wants of them.

    Args:
        wanted: how many of the last ones; None for all.
        pieces: those of earlier forwards.
    """

    def __init__(self, wanted: int | None, pieces: Iterable[Piece] = ()) -> None:
        self._wanted, self._pieces = wanted, list(pieces)

    def add(self, queries: Tensor, positions: Tensor, valid: Tensor | None) -> None:
        """Add those of a forward, all of them.

        Args:
            queries: `[B, H, q, D]`.
            positions: `[B, q]`.
            valid: `[B, q]` false at padding; None if there is none.
        """
        self._pieces.append((queries.detach(), positions, valid))

    def forget_old(self, *, leave_shape: bool = False) -> None:
        """Hold no more than are wanted, in memory of their own.

        Args:
            leave_shape: hold a piece without queries, which still tells their shape, where none are wanted.
        """
        left = self._wanted
        if left is None:
            return
        kept: list[Piece] = []
        for queries, positions, valid in reversed(self._pieces):
            if left <= 0:
                break
            count = queries.shape[2]
            if valid is None and left < count:
                queries, positions = queries[:, :, count - left :].clone(), positions[:, count - left :].clone()
            kept.append((queries, positions, valid))
            left -= count
        if leave_shape and not kept:
            queries, positions, valid = self._pieces[-1]
            none = None if valid is None else valid[:, :0].clone()
            kept.append((queries[:, :, :0].clone(), positions[:, :0].clone(), none))
        self._pieces = kept[::-1]

    def clear(self) -> None:
        """Forget all of them: the text is cut, or given up."""
        self._pieces.clear()

    def select(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        rows = rows.to(self._pieces[0][0].device) if self._pieces else rows
        self._pieces = [(q[rows], p[rows], None if v is None else v[rows]) for q, p, v in self._pieces]

    def copy(self) -> TextQueries:
        """The same for a fork; pieces are never written to."""
        return TextQueries(self._wanted, self._pieces)

    def tensors(self) -> list[Tensor]:
        """Everything that is held in memory."""
        return [tensor for piece in self._pieces for tensor in piece if tensor is not None]

    def of_rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """What some rows are judged by, without padding; rows with padding come one by one.

        Args:
            first: of the rows.
            last: behind the last of them.

        Returns:
            Queries `[b, H, Q, D]` and their positions `[b, Q]` int64, at most as many as are wanted.
        """
        pieces, places = [], []
        for queries, positions, valid in self._pieces:
            columns = _newest(queries.shape[2], None if valid is None else valid[first], self._wanted)
            pieces.append(queries[first:last, :, columns])
            places.append(positions[first:last, columns])
        joined, at = _joined(pieces, dim=2), _joined(places, dim=1).long()
        start = 0 if self._wanted is None else max(0, joined.shape[2] - self._wanted)
        return joined[:, :, start:], at[:, start:]


def _newest(count: int, valid: Tensor | None, wanted: int | None) -> slice | Tensor:
    """The last `wanted` of `count` columns, or of those that are `valid [count]`; None: all of them."""
    if valid is None:
        return slice(0 if wanted is None else max(0, count - wanted), count)
    real = valid.nonzero()[:, 0]
    return real if wanted is None else real[max(0, len(real) - wanted) :]


def _joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=dim)
