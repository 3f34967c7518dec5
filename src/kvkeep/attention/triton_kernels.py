"""The Triton kernels of `triton_decode`, which imports this file when they are wanted: Triton is not needed elsewhere.

Names in capitals are known when a kernel is compiled; each other value of theirs is compiled anew.
"""
# What the compiler for GPUs makes of these functions has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, import-untyped, import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl


# These change while a text is written; a kernel for each kind of number (1, a multiple of 16) would take seconds each.
@triton.jit(do_not_specialize=["queries", "tail_length", "chunk", "lse_part", "tail_valid_batch"])
def attend_part(
    query,
    output,
    lse,
    keys,
    values,
    offsets,
    tail_keys,
    tail_values,
    tail_valid,
    scale,
    group,
    kv_heads,
    queries,
    tail_length,
    chunk,
    query_batch,
    query_head,
    query_token,
    output_part,
    output_batch,
    output_head,
    output_token,
    lse_part,
    tail_keys_batch,
    tail_keys_head,
    tail_keys_column,
    tail_values_batch,
    tail_values_head,
    tail_values_column,
    tail_valid_batch,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Attention of some queries of a cell over `chunk` of its entries; the prefix counts first, then the tail.

    One program for each cell, part and tile of ROWS rows, a row being one query of one head. Where there are several
    parts, `lse` receives the logarithm (base 2) of the sum of a part's weights: how much it weighs beside the others.

    Args:
        query: `[B, H, q, SIZE]`, with three strides.
        output: `[parts, B, H, q, SIZE]`, with four.
        lse: `[parts, B, H, q]` float32; None where there is one part.
        keys: `[entries, SIZE]` of the prefix, as are the values; unread where `offsets` is None.
        offsets: `[cells + 1]` int32; None without a prefix.
        tail_keys: `[B, H_kv, columns, SIZE]`, with three strides, as have the values.
        tail_valid: `[B, columns]` uint8, zero at padding, with a stride; None if there is none.
        scale: factor on the dot products, times log2(e).
        tail_length: columns in use, the last ones of which belong to the queries.
        chunk: entries of a part.
        COLUMNS: power of two, at least SIZE.
        ROWS, ENTRIES: powers of two, at least 16.
        FACTOR: type of the factors of matrix products, whose sums are float32.
    """
    cell, part = tl.program_id(0), tl.program_id(1)
    batch, head = cell // kv_heads, cell % kv_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = row < group * queries
    token = row % queries
    row_head = head * group + row // queries
    column = tl.arange(0, COLUMNS)
    in_size = column[None, :] < SIZE

    first, kept = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    if offsets is not None:
        first = tl.load(offsets + cell).to(tl.int64)
        kept = (tl.load(offsets + cell + 1) - first).to(tl.int32)
    start = part * chunk
    stop = tl.minimum(start + chunk, kept + tail_length)

    query += batch.to(tl.int64) * query_batch
    query_at = row_head.to(tl.int64)[:, None] * query_head + token.to(tl.int64)[:, None] * query_token + column[None, :]
    rows = tl.load(query + query_at, mask=is_row[:, None] & in_size, other=0.0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, COLUMNS], tl.float32)

    end = tl.minimum(stop, kept)
    for at in range(start, end, ENTRIES):
        entry = at + tl.arange(0, ENTRIES)
        is_entry = entry < end
        where = (first + entry)[:, None] * SIZE + column[None, :]
        there = is_entry[:, None] & in_size
        key = tl.load(keys + where, mask=there, other=0.0)
        value = tl.load(values + where, mask=there, other=0.0)
        largest, total, result = _add_block(rows, key, value, is_entry[None, :], scale, largest, total, result, FACTOR)

    tail_keys += batch.to(tl.int64) * tail_keys_batch + head.to(tl.int64) * tail_keys_head
    tail_values += batch.to(tl.int64) * tail_values_batch + head.to(tl.int64) * tail_values_head
    end = stop - kept
    for at in range(tl.maximum(start - kept, 0), end, ENTRIES):
        entry = at + tl.arange(0, ENTRIES)
        is_entry = entry < end
        if tail_valid is not None:
            valid = tl.load(tail_valid + batch.to(tl.int64) * tail_valid_batch + entry, mask=is_entry, other=0)
            is_entry = is_entry & (valid != 0)
        there = is_entry[:, None] & in_size
        place = entry.to(tl.int64)[:, None]
        key = tl.load(tail_keys + place * tail_keys_column + column[None, :], mask=there, other=0.0)
        value = tl.load(tail_values + place * tail_values_column + column[None, :], mask=there, other=0.0)
        visible = is_entry[None, :] & (entry[None, :] <= token[:, None] + (tail_length - queries))
        largest, total, result = _add_block(rows, key, value, visible, scale, largest, total, result, FACTOR)

    # A part may be empty, and a query may see nothing of it; a NaN is neither.
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    result = result / total[:, None]
    output += part.to(tl.int64) * output_part + batch.to(tl.int64) * output_batch
    output_at = row_head.to(tl.int64)[:, None] * output_head + token.to(tl.int64)[:, None] * output_token
    stored = tl.where(start < stop, group * queries, 0)  # nobody reads the output of a part without entries
    there = (row < stored)[:, None] & in_size
    tl.store(output + output_at + column[None, :], result.to(output.dtype.element_ty), mask=there)
    if lse is not None:
        lse += part.to(tl.int64) * lse_part
        query_index = (batch * kv_heads * group + row_head).to(tl.int64) * queries + token
        tl.store(lse + query_index, tl.where(blind, -float("inf"), largest + tl.log2(total)), mask=is_row)


@triton.jit
def _add_block(rows, key, value, visible, scale, largest, total, result, FACTOR: tl.constexpr):
    """One step of a softmax that meets its entries block by block: all is relative to the largest score so far."""
    score = tl.dot(rows.to(FACTOR), tl.trans(key).to(FACTOR), input_precision="ieee") * scale
    score = tl.where(visible, score, -float("inf"))
    most = tl.maximum(largest, tl.max(score, 1))
    level = tl.where(most == -float("inf"), 0.0, most)  # nothing is visible so far
    weight = tl.exp2(score - level[:, None])
    shrink = tl.exp2(largest - level)
    total = total * shrink + tl.sum(weight, 1)
    value = value.to(FACTOR)
    rounded = weight.to(FACTOR)
    result = tl.dot(rounded, value, result * shrink[:, None], input_precision="ieee")
    if rounded.dtype != tl.float32:  # what the rounding lost; reading the entries takes longer than these products
        result = tl.dot((weight - rounded.to(tl.float32)).to(FACTOR), value, result)
    return most, total, result


@triton.jit(do_not_specialize=["count", "queries"])
def join_parts(
    parts,
    lse,
    output,
    count,
    heads,
    queries,
    output_batch,
    output_head,
    output_token,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One softmax over `count` parts that `attend_part` computed; one program for each query of each head.

    Args:
        parts: `[count, B, H, q, SIZE]` float32.
        lse: `[count, B, H, q]` float32; -infinity where nothing was seen.
        output: `[B, H, q, SIZE]`, with three strides.
        PARTS: how many are read at a time.
    """
    index = tl.program_id(0)
    tokens = tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    largest = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    result = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        place = part.to(tl.int64) * tokens + index
        log_sum = tl.load(lse + place, mask=part < count, other=-float("inf"))
        there = (log_sum != -float("inf"))[:, None] & (column < SIZE)[None, :]
        values = tl.load(parts + place[:, None] * SIZE + column[None, :], mask=there, other=0.0)
        most = tl.maximum(largest, tl.max(log_sum, 0))
        level = tl.where(most == -float("inf"), 0.0, most)
        weight = tl.exp2(log_sum - level)
        shrink = tl.exp2(largest - level)
        total = total * shrink + tl.sum(weight, 0)
        result = result * shrink + tl.sum(weight[:, None] * values, 0)
        largest = most
    result = result / tl.where(total == 0, 1.0, total)
    batch, head, token = index // (heads * queries), index // queries % heads, index % queries
    output += batch.to(tl.int64) * output_batch + head.to(tl.int64) * output_head + token.to(tl.int64) * output_token
    tl.store(output + column, result.to(output.dtype.element_ty), mask=column < SIZE)


INTERPRETED = not isinstance(attend_part, triton.JITFunction)


def factor(dtype: torch.dtype) -> tl.dtype:
    """The type of the factors of matrix products, for keys and values of a type."""
    if dtype == torch.float16:
        return tl.float16
    if dtype == torch.bfloat16 and not INTERPRETED:  # the interpreter would multiply its bits, read as whole numbers
        return tl.bfloat16
    return tl.float32
