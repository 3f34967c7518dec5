"""What tensors weigh, and how they lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the storages behind the tensors, which may be larger than what the tensors show of them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class Layout(NamedTuple):
    """What keys and values have in common.

    Attributes:
        device: its type, such as "cpu".
        dtype: of both.
        size: D.
        contiguous: both lie in memory without gaps.
    """

    device: str
    dtype: torch.dtype
    size: int
    contiguous: bool

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Layout | None:
        """The layout of `[..., D]` and `[..., D]`; None where they differ in device, dtype or size."""
        if (keys.device, keys.dtype, keys.shape[-1]) != (values.device, values.dtype, values.shape[-1]):
            return None
        return cls(keys.device.type, keys.dtype, keys.shape[-1], keys.is_contiguous() and values.is_contiguous())
