"""What tensors weigh."""

from __future__ import annotations

from torch import Tensor


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the storages behind the tensors, which may be larger than what the tensors show of them."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
