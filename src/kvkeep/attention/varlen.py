"""Attention of many new tokens over a ragged layer by torch's flash attention for sequences of any length, on GPUs.

`torch.nn.attention.varlen.varlen_attn` takes sequences that lie one after the other, as a prefix's cells do. It has no
form for "all of these entries, and causally those", so each query attends to three pieces, which are joined by
log-sum-exp: the prefix; the tail's columns before the queries; and the queries' own columns, causally. The last piece
has as many queries as keys, so that it does not matter which corner a version of torch aligns a causal mask to.

Each cell is a sequence of one head, whose queries are those of all its query heads; in the causal piece each query head
is. So the queries lie in the same order in all three, nothing depends on torch's support for groups, and the layouts of
log-sum-exp that versions of torch have (heads or queries first, padded or not) are all the same numbers in one row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention.joint import tail_of
from kvkeep.store import RaggedLayer

NEEDS = (
    "a torch whose varlen_attn takes a scale and a window (2.12 does) and a GPU of compute capability 8.0, and on it a "
    "layer without padding whose keys and values are of one type (float16 or bfloat16) and one size, a multiple of 8 "
    "and at most 256"
)

_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_SIZE = 256  # flash attention's


def attend(
    query: Tensor, layer: RaggedLayer, scaling: float, *, function: Callable[..., tuple[Tensor, Tensor]] | None = None
) -> Tensor:
    """See `reference.attend`; the same arguments and the same result, but that it knows no padding.

    Args:
        query: `[B, H, q, D]`.
        layer: the store.
        scaling: factor on the dot products.
        function: what to call in the place of `varlen_attn`.

    Raises:
        RuntimeError: torch has no `varlen_attn` for such tensors; see `can_attend`.
    """
    if function is None:
        function = _varlen_attn() if can_attend(query, layer) else None
        if function is None:
            raise RuntimeError("no varlen attention for this layer")
    batch, heads, count, size = query.shape
    tail, prefix = tail_of(layer.tail, count), layer.prefix
    cells, group = batch * layer.kv_heads, heads // layer.kv_heads
    earlier = tail.length - count
    rows = query.reshape(-1, 1, size)  # [B * H * q, 1, D]: those of a cell side by side, and among them a head's

    def piece(
        keys: Tensor, values: Tensor, of_sequence: int, offsets: Tensor, longest: int, window: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        output, lse = function(
            rows,
            keys.reshape(-1, 1, size),
            values.reshape(-1, 1, size),
            _even_offsets(len(rows), of_sequence, query.device),
            offsets,
            of_sequence,
            longest,
            return_aux=_lse_wanted(),
            scale=scaling,
            window_size=window,
        )
        return output, lse

    pieces = []
    if prefix is not None and prefix.bounds[-1]:
        pieces.append(piece(prefix.keys, prefix.values, group * count, prefix.offsets, prefix.longest_cell, (-1, -1)))
    if earlier:
        offsets = _even_offsets(cells * earlier, earlier, query.device)
        keys, values = tail.keys[:, :, :earlier], tail.values[:, :, :earlier]
        pieces.append(piece(keys, values, group * count, offsets, earlier, (-1, -1)))
    own = slice(earlier, tail.length)
    keys, values = (part[:, :, own].repeat_interleave(group, dim=1) for part in (tail.keys, tail.values))
    offsets = _even_offsets(len(rows), count, query.device)
    pieces.append(piece(keys, values, count, offsets, count, (-1, 0)))
    return _joined(pieces).view(batch, heads, count, size).to(query.dtype)


def can_attend(query: Tensor, layer: RaggedLayer) -> bool:
    """Whether torch has `varlen_attn` and it reads such tensors."""
    size = query.shape[-1]
    parts = [part for part in (layer.prefix, layer.tail) if part is not None]
    return (
        query.is_cuda
        and query.dtype in _DTYPES
        and not query.requires_grad
        and size % 8 == 0
        and size <= _LARGEST_SIZE
        and (layer.tail is None or layer.tail.valid is None)
        and all(t.dtype == query.dtype and t.shape[-1] == size for part in parts for t in (part.keys, part.values))
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and _varlen_attn() is not None
    )


def suits(query: Tensor, layer: RaggedLayer) -> bool:
    """Whether `attend` works, and is the fastest way for so many queries."""
    return query.shape[2] > 1 and can_attend(query, layer)


def _joined(pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One softmax over pieces that were attended to alone: outputs `[rows, 1, D]` to one, in at least float32."""
    outputs = torch.stack([output for output, _ in pieces])
    precise = torch.promote_types(outputs.dtype, torch.float32)
    sums = torch.stack([lse.reshape(-1) for _, lse in pieces]).to(precise)
    # Flash attention calls the sum over no entries +infinity. Products with zero, not a selection: a NaN shall be seen.
    weights = sums.masked_fill(sums == torch.inf, -torch.inf).softmax(0)
    return (weights[..., None, None] * outputs.to(precise)).sum(0)


def _even_offsets(total: int, length: int, device: torch.device) -> Tensor:
    """`[total / length + 1]` int32: where sequences of equal length begin."""
    return torch.arange(0, total + 1, length, dtype=torch.int32, device=device)


@cache
def _varlen_attn() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Torch's function; None where it is not there, or is the first form of torch 2.10, which takes no scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    function: Any = varlen_attn  # what it returns depends on `return_aux`
    known = inspect.signature(function).parameters
    return function if {"return_aux", "scale", "window_size"} <= known.keys() else None


@cache
def _lse_wanted() -> Any:
    from torch.nn.attention.varlen import AuxRequest

    return AuxRequest(lse=True)
