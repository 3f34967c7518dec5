"""Attention over a ragged layer in two Triton kernels, for GPUs.

All query heads of a KV head share one read of its keys and values; prefix and tail are read where they lie. A cell's
entries are divided into parts of equal length, so that cells of any length keep the whole GPU busy, and the parts are
joined by log-sum-exp. Scores, softmax and sums are float32. Nothing waits for the GPU: the lengths of the cells are
known on the host.

Triton comes with torch's builds for GPUs and is imported when it is first wanted. `TRITON_INTERPRET=1`, set before
that, runs the kernels on the CPU, for tests: slowly.
"""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention.joint import tail_of
from kvkeep.store import RaggedLayer

NEEDS = (
    "Triton and a GPU of compute capability 8.0, and on it a layer whose keys and values are of one type (float32, "
    "float16 or bfloat16) and one size of at most 256"
)

# Query heads times tokens of a cell up to which entries are read once; with more, matrix products over tiles win.
_MOST_ROWS = 64
# Programs for each multiprocessor: a few wait for memory while another one computes.
_PROGRAMS = 4
# A part has a multiple of so many entries: a whole number of blocks, and no fewer than are worth joining.
_LEAST_ENTRIES = 128
# Elements of keys that a program has in hand at a time; products in float32 take more registers.
_BLOCK_ELEMENTS = {torch.float32: 2**11, torch.float16: 2**13, torch.bfloat16: 2**13}
_LARGEST_SIZE = 256
# The smallest matrix that GPUs multiply.
_LEAST_ROWS = 16
# Parts that are joined at a time.
_JOINED = 32


def attend(query: Tensor, layer: RaggedLayer, scaling: float, *, parts: int | None = None) -> Tensor:
    """See `reference.attend`; the same arguments and the same result.

    Args:
        query: `[B, H, q, D]`.
        layer: the store, on the same device.
        scaling: factor on the dot products.
        parts: how many to divide the longest cell into; what suits the GPU if None.

    Raises:
        RuntimeError: Triton or a GPU is not there, or the kernels do not read such tensors; see `can_attend`.
    """
    if not can_attend(query, layer):
        raise RuntimeError("no Triton attention for this layer")
    batch, heads, count, size = query.shape
    tail, prefix = tail_of(layer.tail, count), layer.prefix
    if query.stride(3) != 1:
        query = query.contiguous()
    cells, group = batch * layer.kv_heads, heads // layer.kv_heads
    rows = min(_power_of_two(group * count), _MOST_ROWS)
    tiles = math.ceil(group * count / rows)
    longest = layer.longest_cell + tail.length
    entries = cells * tail.length + (0 if prefix is None else prefix.bounds[-1])
    chunk = _chunk(entries * tiles, query.device) if parts is None else math.ceil(longest / parts)
    parts = math.ceil(longest / chunk)

    # In the order that the model wants, so that nobody copies it.
    output = query.new_empty(batch, count, heads, size).transpose(1, 2)
    partial, lse = output[None], None
    if parts > 1:
        partial = query.new_empty(parts, batch, heads, count, size, dtype=torch.float32)
        lse = query.new_empty(parts, batch, heads, count, dtype=torch.float32)
    columns = _power_of_two(size)
    kernels = _kernels()
    with _on(query.device):
        kernels.attend_part[cells, parts, tiles](
            query,
            partial,
            lse,
            query if prefix is None else prefix.keys,
            query if prefix is None else prefix.values,
            None if prefix is None else prefix.offsets,
            tail.keys,
            tail.values,
            None if tail.valid is None else tail.valid.view(torch.uint8),
            scaling / math.log(2),  # powers of two are what GPUs compute
            group,
            layer.kv_heads,
            count,
            tail.length,
            chunk,
            *query.stride()[:3],
            *partial.stride()[:4],
            batch * heads * count,
            *tail.keys.stride()[:3],
            *tail.values.stride()[:3],
            tail.capacity,
            SIZE=size,
            COLUMNS=columns,
            ROWS=rows,
            ENTRIES=_block_entries(query.dtype, columns),
            FACTOR=kernels.factor(query.dtype),
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,  # the default, of which Triton 3.9 warns that it will change
        )
        if lse is not None:
            kernels.join_parts[(batch * heads * count,)](
                partial,
                lse,
                output,
                parts,
                heads,
                count,
                *output.stride()[:3],
                SIZE=size,
                COLUMNS=columns,
                PARTS=_JOINED,
                enable_fp_fusion=True,
            )
    return output


def can_attend(query: Tensor, layer: RaggedLayer) -> bool:
    """Whether the kernels read such tensors, and there is something to run them."""
    size = query.shape[-1]
    if query.dtype not in _BLOCK_ELEMENTS or query.requires_grad or size > _LARGEST_SIZE:
        return False
    if not _can_run_on(query.device):
        return False
    parts = [part for part in (layer.prefix, layer.tail) if part is not None]
    same = all(
        (tensor.dtype, tensor.device, tensor.shape[-1], tensor.stride(-1)) == (query.dtype, query.device, size, 1)
        for part in parts
        for tensor in (part.keys, part.values)
    )
    prefix = layer.prefix
    return same and (prefix is None or (prefix.keys.is_contiguous() and prefix.values.is_contiguous()))


def suits(query: Tensor, layer: RaggedLayer) -> bool:
    """Whether `attend` works, and is the fastest way for so many queries."""
    few = query.shape[2] == 1 or query.shape[1] // layer.kv_heads * query.shape[2] <= _MOST_ROWS
    return few and query.is_cuda and can_attend(query, layer)


def is_available() -> bool:
    """Whether Triton is installed, and there is a GPU, or Triton's interpreter is on."""
    return _is_interpreted() or (torch.cuda.is_available() and _kernels() is not None)


def _can_run_on(device: torch.device) -> bool:
    if device.type == "cuda":
        return _gpu(device.index)[0] >= 8 and _kernels() is not None
    return device.type == "cpu" and _is_interpreted()


def _is_interpreted() -> bool:
    """Whether the kernels run on the CPU, which is settled when Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _kernels() is not None and bool(_kernels().INTERPRETED)


@cache
def _gpu(index: int | None) -> tuple[int, int]:
    """Generation (8 is Ampere, the first with bfloat16) and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(index)
    return properties.major, properties.multi_processor_count


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _chunk(entries: int, device: torch.device) -> int:
    """Entries of a part, so that all parts together, of `entries` to read, keep the device busy."""
    programs = _PROGRAMS * (_gpu(device.index)[1] if device.type == "cuda" else 1)
    return _LEAST_ENTRIES * max(1, math.ceil(entries / programs / _LEAST_ENTRIES))


def _block_entries(dtype: torch.dtype, columns: int) -> int:
    """Entries that a program reads at a time."""
    return max(_LEAST_ROWS, min(128, _BLOCK_ELEMENTS[dtype] // columns))


def _power_of_two(number: int) -> int:
    """The smallest one that is at least `number`, and enough for a side of a matrix product."""
    return max(_LEAST_ROWS, 1 << (number - 1).bit_length())


@cache
def _kernels() -> Any:
    """The kernels, which are None where Triton is not installed."""
    try:
        from kvkeep.attention import triton_kernels
    except ImportError:
        return None
    return triton_kernels
