"""The rotation of a layer's queries and keys: applied, undone, averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one layer, as the model itself computes it.

    Attributes:
        cos_sin: maps positions `[..., N]` to cosine and sine `[..., N, R]`, R <= D the rotated size.
        apply: rotates `x [B, H, N, D]` by cosine and sine `[B, N, R]`.
    """

    cos_sin: Callable[[Tensor], tuple[Tensor, Tensor]]
    apply: Callable[[Tensor, Tensor, Tensor], Tensor]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x [B, H, N, D]` to `positions [B, N]`."""
        return self.apply(x, *self.cos_sin(positions))

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotation of `x [B, H, N, D]` at `positions [B, N]`, scaled variants (yarn) included."""
        cos, sin = self.cos_sin(positions)
        rotated = self.apply(x, cos, -sin)
        scale = (cos.square() + sin.square())[:, None].to(x.dtype)  # [B, 1, N, R]
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return rotated / scale
        return torch.cat([rotated[..., :size] / scale, rotated[..., size:]], dim=-1)

    def mean_rotation(self, positions: Tensor, head_size: int) -> Tensor:
        """The matrix `[D, D]` that rotates a column vector by the average over `positions [N]`.

        A rotation is linear in its cosine and sine, so the average rotation is the rotation by their averages.
        """
        cos, sin = self.cos_sin(positions[None])
        identity = torch.eye(head_size, dtype=cos.dtype, device=cos.device)[None, None]
        mean_cos = cos.mean(1, keepdim=True).expand(1, head_size, -1)
        mean_sin = sin.mean(1, keepdim=True).expand(1, head_size, -1)
        return self.apply(identity, mean_cos, mean_sin)[0, 0].T
