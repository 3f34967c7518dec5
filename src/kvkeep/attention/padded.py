"""Attention over a ragged layer as a few large products: the cells of a layer side by side in one rectangle.

Where all cells have the same length the rectangle is a view of the store. Elsewhere it is a padded copy, whose padding
has weight exactly zero. Prefix and tail are never joined: their scores share one softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.store import RaggedLayer

# Scores of at most this many (query, entry) pairs exist at once.
_BLOCK_ELEMENTS = 2**24


def attend(query: Tensor, layer: RaggedLayer, scaling: float) -> Tensor:
    """See `reference.attend`; the same arguments and the same result."""
    batch, heads, count, _ = query.shape
    held = layer.longest_cell + layer.tail_length
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * held))
    prefix = layer.padded_prefix(0, batch) if layer.keys is not None else None
    blocks = [
        _attend_block(query[:, :, first : first + block], first, count, layer, prefix, scaling)
        for first in range(0, count, block)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _attend_block(
    query: Tensor,
    first: int,
    count: int,
    layer: RaggedLayer,
    prefix: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    scaling: float,
) -> Tensor:
    batch, heads, q, size = query.shape
    group = heads // layer.kv_heads
    grouped = query.reshape(batch, layer.kv_heads, group * q, size)
    scores = []
    if prefix is not None:
        logits = torch.matmul(grouped, prefix[0].transpose(2, 3))
        if not layer.is_uniform:
            logits = logits.masked_fill(~prefix[3][:, :, None], -torch.inf)
        scores.append(logits)
    tail_values = None
    if layer.tail_keys is not None and layer.tail_values is not None:
        # Only the columns that some query of this block sees; what lies behind them is slack or the future.
        used = layer.tail_length - count + first + q
        tail_values = layer.tail_values[:, :, :used]
        logits = torch.matmul(grouped, layer.tail_keys[:, :, :used].transpose(2, 3))
        hidden = _hidden(layer, used, q, query.device)
        if hidden is not None:
            shaped = logits.view(batch, layer.kv_heads, group, q, used)
            logits = shaped.masked_fill(hidden, -torch.inf).view(logits.shape)
        scores.append(logits)
    joined = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    precise = torch.promote_types(query.dtype, torch.float32)
    weights = (joined.to(precise) * scaling).softmax(-1)
    if layer.tail_valid is not None:
        weights = weights.nan_to_num(0.0)  # a query at padding may see nothing
    weights = weights.to(query.dtype)
    split = 0 if prefix is None else prefix[1].shape[2]
    output: Tensor | None = torch.matmul(weights[..., :split], prefix[1]) if prefix is not None else None
    if tail_values is not None:
        from_tail = torch.matmul(weights[..., split:], tail_values)
        output = from_tail if output is None else output + from_tail
    if output is None:
        raise RuntimeError("this layer holds nothing")
    return output.view(batch, heads, q, output.shape[-1])


def _hidden(layer: RaggedLayer, used: int, q: int, device: torch.device) -> Tensor | None:
    """`[B or 1, 1, 1, q, used]` true where a query must not look; None where every query sees every column."""
    hidden = None
    if q > 1:
        columns = torch.arange(used, device=device)
        hidden = (columns[None] > columns[used - q :, None])[None, None, None]
    if layer.tail_valid is not None:
        padding = ~layer.tail_valid[:, None, None, None, :used]
        hidden = padding if hidden is None else hidden | padding
    return hidden
