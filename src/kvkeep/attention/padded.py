"""Attention over a ragged layer as a few large products: all cells side by side in one rectangle.

Where all cells have the same length the rectangle is a view of the store. Elsewhere it is a padded copy, whose padding
has weight exactly zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvkeep.attention.joint import Piece, attend_pieces, query_blocks, scaled, tail_of, visible_columns
from kvkeep.store import RaggedLayer
from kvkeep.store.tail import Tail


def attend(query: Tensor, layer: RaggedLayer, scaling: float) -> Tensor:
    """See `reference.attend`; the same arguments and the same result."""
    batch, heads, count, size = query.shape
    tail = tail_of(layer.tail, count)
    if not layer.longest_cell and tail.valid is None and query.dtype == tail.keys.dtype == tail.values.dtype:
        return _over_uncut(query, tail, scaling)
    grouped = scaled(query, scaling).reshape(batch * layer.kv_heads, heads // layer.kv_heads, count, size)
    prefix = []
    if layer.longest_cell:
        keys, values, _, valid = layer.padded_prefix(0, batch)
        missing = None if layer.is_uniform else ~valid.flatten(0, 1)[:, None, None]
        prefix.append(Piece(keys.flatten(0, 1), values.flatten(0, 1), missing))
    outputs = []
    for block in query_blocks(count, batch * heads * (layer.longest_cell + tail.length)):
        columns, hidden = visible_columns(tail, block, count)
        if hidden is not None and len(hidden) > 1:  # rows to cells
            hidden = hidden.repeat_interleave(layer.kv_heads, dim=0)
        seen = Piece(tail.keys[:, :, :columns].flatten(0, 1), tail.values[:, :, :columns].flatten(0, 1), hidden)
        outputs.append(attend_pieces(grouped[:, :, block], [*prefix, seen]))
    return torch.cat(outputs, dim=2).view(batch, heads, count, -1).to(query.dtype)


def _over_uncut(query: Tensor, tail: Tail, scaling: float) -> Tensor:
    """Where nothing was cut and nothing is padding there is one rectangle already, which torch reads without a copy."""
    count, outputs = query.shape[2], []
    for block in query_blocks(count, query.shape[0] * query.shape[1] * tail.length):
        columns, hidden = visible_columns(tail, block, count)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, block],
                tail.keys[:, :, :columns],
                tail.values[:, :, :columns],
                attn_mask=None if hidden is None else ~hidden,
                scale=scaling,
                enable_gqa=query.shape[1] != tail.keys.shape[1],
            )
        )
    return torch.cat(outputs, dim=2)
