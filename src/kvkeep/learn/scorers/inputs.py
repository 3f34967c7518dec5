"""What a scorer sees of an entry: its key and its value, and no more than that.

Source: KVpop (arXiv 2607.05061), section 3: `x = [k; v]` of the KV head, since these are still in the cache when the
decision comes, so that no hidden states have to be stored. Cached keys are rotated by their position; a scorer that has
seen positions up to some length only may not know what to do with later ones, so there are two other forms.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvkeep.learn.config import INPUTS, LearnError
from kvkeep.observation import Rotary


def scorer_inputs(
    keys: Tensor,
    values: Tensor,
    kind: str = "cached",
    *,
    positions: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """Keys and values side by side, detached from whatever they were computed from.

    Args:
        keys: `[B, H_kv, T, D]`, rotated.
        values: `[B, H_kv, T, D]`.
        kind: `cached`: keys as they are. `unrotated`: as before rotation. `position-free`: the lengths of the pairs
            `(i, i + D/2)` that a rotation turns, which it does not change; the angle within each pair is lost.
        positions: `[B, T]`, for `unrotated`.
        rotary: the layer's rotation, for `unrotated`.

    Returns:
        `[B, H_kv, T, I]`; I is `KVpopConfig.input_size(D)`.

    Raises:
        LearnError: an unknown kind, no rotation where one is needed, or heads of an odd size without pairs.
    """
    keys, values = keys.detach(), values.detach()
    if kind not in INPUTS:
        raise LearnError(expected=f"one of {', '.join(INPUTS)}", received=f"{kind!r}", remedy="correct the kind")
    if kind == "unrotated":
        if positions is None or rotary is None:
            raise LearnError(
                expected="positions and the rotation, to undo it",
                received=f"positions {None if positions is None else tuple(positions.shape)}, rotary {rotary}",
                remedy="pass both, or use inputs='cached'",
            )
        keys = rotary.unrotate(keys, positions)
    if kind == "position-free":
        size = keys.shape[-1]
        if size % 2:
            raise LearnError(
                expected="heads of an even size", received=f"{size}", remedy="use inputs='cached' or 'unrotated'"
            )
        keys = torch.linalg.vector_norm(keys.reshape(*keys.shape[:-1], 2, size // 2), dim=-2)
    return torch.cat([keys, values], dim=-1)


class InputStatistics:
    """Mean and standard deviation of each input of each cell, gathered piece by piece in float64.

    Args:
        cells: C of the whole model.
        size: I, inputs of a cell.
    """

    def __init__(self, cells: int, size: int) -> None:
        self._count = torch.zeros(cells, 1, dtype=torch.float64)
        self._mean = torch.zeros(cells, size, dtype=torch.float64)
        self._squares = torch.zeros(cells, size, dtype=torch.float64)  # of the distances to the mean

    def add(self, x: Tensor, cells: slice | None = None) -> None:
        """Take in `x [B, C, T, I]` of these cells, of all where None.

        Raises:
            LearnError: inputs of another shape, or not finite.
        """
        cells = slice(None) if cells is None else cells
        rows = x.detach().transpose(0, 1).flatten(1, 2).to("cpu", torch.float64)  # [C, B T, I]
        mean = self._mean[cells]
        if rows.shape[0] != mean.shape[0] or rows.shape[-1] != mean.shape[-1]:
            raise LearnError(
                expected=f"inputs [B, {mean.shape[0]}, T, {mean.shape[-1]}]",
                received=f"{tuple(x.shape)}",
                remedy="pass what scorer_inputs made of these cells",
            )
        if not bool(rows.isfinite().all()):
            raise LearnError(
                expected="finite inputs", received="NaN or infinity among them", remedy="look for where they come from"
            )
        if not rows.shape[1]:
            return
        # Two sets of numbers joined (Chan, Golub and LeVeque 1979): no difference of large sums.
        more = rows.shape[1]
        new_mean = rows.mean(1)
        step = new_mean - mean
        total = self._count[cells] + more
        self._squares[cells] += ((rows - new_mean[:, None]) ** 2).sum(1) + step**2 * (self._count[cells] * more / total)
        self._mean[cells] = mean + step * (more / total)
        self._count[cells] = total

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each `[C, I]` float32; 1 for inputs that never change.

        Raises:
            LearnError: a cell of which nothing was seen.
        """
        if not bool((self._count > 0).all()):
            raise LearnError(
                expected="inputs of every cell",
                received=f"none of {int((self._count == 0).sum())} of {len(self._count)}",
                remedy="add inputs of all layers before",
            )
        deviation = (self._squares / self._count).sqrt()
        constant = deviation <= 1e-6 * self._mean.abs().clamp(min=1e-30)
        return self._mean.float(), torch.where(constant, 1.0, deviation).float()

    @classmethod
    def of(cls, pieces: Iterable[Tensor]) -> InputStatistics:
        """Of pieces `[B, C, T, I]` that have all cells.

        Raises:
            LearnError: no piece, or pieces that do not fit together.
        """
        found: InputStatistics | None = None
        for piece in pieces:
            found = found or cls(piece.shape[1], piece.shape[-1])
            found.add(piece)
        if found is None:
            raise LearnError(expected="at least one piece", received="none", remedy="pass inputs of some text")
        return found
