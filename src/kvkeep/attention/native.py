"""Attention over a ragged layer in one call of compiled code, for the CPU.

All query heads of a KV head share one read of its keys and values; prefix and tail are read where they lie. The work is
divided over cells and blocks of entries, so that three heads keep more than three threads busy, and joined by
log-sum-exp. Scores, softmax and sums are float32 for half precision, float64 for float64.

The code is built with the package where there is a C++ compiler (`native/`). Without it everything works on the torch
paths, more slowly.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention.joint import tail_of
from kvkeep.store import RaggedLayer

# Numbers in the queries of a cell (heads of the group, times tokens, times their size) above which torch's matrix
# products win over reading each entry once: measured in float32 and bfloat16, for sizes of 64, 128 and 256.
_MOST_QUERIES = 96 * 64


def attend(query: Tensor, layer: RaggedLayer, scaling: float, *, instruction_set: str = "") -> Tensor:
    """See `reference.attend`; the same arguments and the same result.

    Args:
        query: `[B, H, q, D]`.
        layer: the store, on the CPU.
        scaling: factor on the dot products.
        instruction_set: one of `instruction_sets()`; the best one if empty.

    Raises:
        RuntimeError: the compiled code is not there, or does not read such tensors; see `can_attend`.
    """
    compiled = _module()
    if compiled is None or not _can_read(query, layer):
        raise RuntimeError("no compiled attention for this layer")
    batch, heads, count, size = query.shape
    tail, prefix = tail_of(layer.tail, count), layer.prefix
    row, head, token, one = query.stride()
    if one != 1:
        query = query.contiguous()
        row, head, token, one = query.stride()
    # In the order that the model wants, so that nobody copies it; for one token both orders are the same memory.
    single = count == 1
    output = query.new_empty((batch, heads, 1, size) if single else (batch, count, heads, size))
    compiled.attend(
        _TYPES[query.dtype],
        query.data_ptr(),
        output.data_ptr(),
        0 if prefix is None else prefix.keys.data_ptr(),
        0 if prefix is None else prefix.values.data_ptr(),
        0 if prefix is None else prefix.offsets.data_ptr(),
        tail.keys.data_ptr(),
        tail.values.data_ptr(),
        0 if tail.valid is None else tail.valid.data_ptr(),
        row,
        head,
        token,
        tail.length,
        tail.capacity,
        scaling,
        batch,
        heads,
        layer.kv_heads,
        count,
        size,
        torch.get_num_threads(),
        instruction_set,
    )
    return output if single else output.transpose(1, 2)


def can_attend(query: Tensor, layer: RaggedLayer) -> bool:
    """Whether the compiled code is there and reads such tensors."""
    return _can_read(query, layer) and is_available()


def suits(query: Tensor, layer: RaggedLayer) -> bool:
    """Whether `attend` works, and is the fastest way for so many queries."""
    _, heads, count, size = query.shape
    if heads // layer.kv_heads * count * size > _MOST_QUERIES or not _can_read(query, layer):
        return False
    if not is_available():
        _warn_once()
        return False
    return True


def is_available() -> bool:
    """Whether the package was built with its compiled attention."""
    return _module() is not None


def instruction_sets() -> list[str]:
    """What the compiled code can use on this processor, the best one first; empty where it is not there."""
    return _compiled().instruction_sets() if is_available() else []


_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def _can_read(query: Tensor, layer: RaggedLayer) -> bool:
    dtype = query.dtype
    if dtype not in _TYPES or not query.is_cpu or query.requires_grad:  # `device.type` makes a string, which is slow
        return False
    # Of what the layer remembers, since four tensors take longer to ask than a short text to attend to.
    wanted = ("cpu", dtype, query.shape[-1], True)
    prefix, tail = layer.prefix, layer.tail
    return (prefix is None or prefix.layout == wanted) and (tail is None or tail.layout == wanted)


def _compiled() -> Any:
    module = _module()
    if module is None:
        raise RuntimeError("no compiled attention")
    return module


@cache
def _module() -> Any:
    """The compiled module, which is None where it was not built."""
    try:
        from kvkeep.attention import _native
    except ImportError:
        return None
    address = _gomp_parallel()
    if address:
        _native.use_runtime(address)
    return _native


@cache
def _warn_once() -> None:
    warnings.warn(
        "kvkeep was installed without its compiled attention, so decoding on the CPU takes a slower path. Reinstall "
        "kvkeep where there is a C++ compiler for the fast one, or set KVKEEP_ATTENTION=cells to be content.",
        stacklevel=2,
    )


def _gomp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded; 0 where there is none to be found."""
    for path in _openmp_libraries():
        try:
            # RTLD_NOLOAD: the one that is there already, never a second one.
            library = ctypes.CDLL(str(path), mode=ctypes.DEFAULT_MODE | getattr(os, "RTLD_NOLOAD", 0))
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


def _openmp_libraries() -> Iterator[str]:
    """Names under which torch's OpenMP runtime may be loaded."""
    folder = Path(torch.__file__).parent
    for pattern in ("lib/libgomp*", "lib/libiomp5*", "lib/libomp*", "../torch.libs/libgomp*"):
        yield from map(str, sorted(folder.glob(pattern)))
    yield from ("libgomp.so.1", "libiomp5.so", "libomp.so")
