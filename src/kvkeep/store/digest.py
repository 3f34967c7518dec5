"""A hash of tensors and of the text that describes them, for files that must come back as they were written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def sha256_of(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of names, types, shapes and bytes of tensors, in the order of their names."""
    hasher = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
