"""Attention where entries come and go while a text is read, and attention whose weights are looked at.

Both are for stores that hold a cap at every step. Scores, softmax and sums are at least float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.attention.joint import Piece, attend_pieces, query_blocks, scaled


@dataclass(frozen=True, eq=False)
class Interval:
    """Entries, and the steps in which they are seen: query j of a chunk sees those with `start <= j < gone`.

    Attributes:
        keys: `[B, H_kv, n, D]`.
        values: `[B, H_kv, n, D]`.
        start: `[n]` the first query; None where all were there before.
        gone: `[B, H_kv, n]` the first query that no longer sees them.
    """

    keys: Tensor
    values: Tensor
    start: Tensor | None
    gone: Tensor


def attend_intervals(query: Tensor, entries: Sequence[Interval], scaling: float) -> Tensor:
    """Attention of the queries of a chunk, each over the entries that are held while it comes.

    Args:
        query: `[B, H, q, D]`.
        entries: those that were held before, and those of the chunk.
        scaling: factor on the dot products.

    Returns:
        `[B, H, q, D]`.
    """
    batch, heads, count, size = query.shape
    kv_heads = entries[0].keys.shape[1]
    grouped = scaled(query, scaling).reshape(batch * kv_heads, heads // kv_heads, count, size)
    outputs = []
    for block in query_blocks(count, batch * heads * sum(each.keys.shape[2] for each in entries)):
        steps = torch.arange(block.start, block.stop, device=query.device)[:, None]
        pieces = [_piece(each, steps) for each in entries]
        outputs.append(attend_pieces(grouped[:, :, block], pieces))
    return torch.cat(outputs, dim=2).view(batch, heads, count, -1).to(query.dtype)


def _piece(entries: Interval, steps: Tensor) -> Piece:
    """Some entries of all cells, as the queries `steps [q, 1]` see them."""
    hidden = steps >= entries.gone.flatten(0, 1)[:, None, None]  # [cells, 1, q, n]
    if entries.start is not None:
        hidden = hidden | (steps < entries.start)
    return Piece(entries.keys.flatten(0, 1), entries.values.flatten(0, 1), hidden)


def attend_watched(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention and its weights.

    Args:
        query: `[B, H, q, D]`.
        keys: `[B, H_kv, N, D]`.
        values: `[B, H_kv, N, D]`; finite where they are hidden, too.
        hidden: `[B, H_kv, q, N]` true where a query must not look; None where each sees everything.
        scaling: factor on the dot products.

    Returns:
        `[B, H, q, D]`, and the weights `[B, H_kv, q, N]` float32, mean over the query heads of a group.
    """
    batch, heads, count, size = query.shape
    kv_heads, held = keys.shape[1:3]
    grouped = scaled(query, scaling).reshape(batch, kv_heads, -1, size)
    scores = grouped @ keys.to(grouped.dtype).transpose(2, 3)
    scores = scores.view(batch, kv_heads, heads // kv_heads, count, held)
    if hidden is not None:
        scores.masked_fill_(hidden[:, :, None], -torch.inf)
    weights = scores.softmax(-1)
    output = weights.flatten(2, 3) @ values.to(weights.dtype)
    return output.view(batch, heads, count, -1).to(query.dtype), weights.mean(2).float()
