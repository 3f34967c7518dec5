"""Attention over a ragged layer, cell by cell: the truth that every faster path is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.store import RaggedLayer


def attend(query: Tensor, layer: RaggedLayer, scaling: float) -> Tensor:
    """Attention of the newest tokens over everything that the layer holds.

    Args:
        query: `[B, H, q, D]`; the queries belong to the last q columns of the layer's tail, and see the whole prefix
            and the tail up to their own column.
        layer: the store.
        scaling: factor on the dot products.

    Returns:
        `[B, H, q, D]`; zeros for a query at padding that sees nothing.
    """
    batch, heads, count, _ = query.shape
    group = heads // layer.kv_heads
    precise = torch.promote_types(query.dtype, torch.float32)
    rows = []
    for row in range(batch):
        columns = torch.arange(layer.tail_length, device=query.device)
        allowed = columns[None] <= columns[layer.tail_length - count :, None]  # [q, T]
        if layer.tail is not None and layer.tail.valid is not None:
            allowed = allowed & layer.tail.valid[row, : layer.tail.length]
        for head in range(layer.kv_heads):
            keys, values, visible = _cell(layer, row, head, allowed)
            queries = query[row, head * group : (head + 1) * group].to(precise)  # [G, q, D]
            logits = (queries @ keys.to(precise).T) * scaling
            weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
            blind = ~visible.any(-1, keepdim=True)  # [q, 1]
            rows.append((weights @ values.to(precise)).masked_fill(blind, 0))
    output = torch.stack(rows).view(batch, heads, count, -1)
    return output.to(query.dtype)


def _cell(layer: RaggedLayer, row: int, head: int, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of one cell, prefix then all columns of the tail, and which of them each query sees `[q, n]`."""
    keys, values, visible = [], [], []
    if layer.prefix is not None:
        kept = layer.prefix.cell(row * layer.kv_heads + head)
        keys.append(kept[0])
        values.append(kept[1])
        visible.append(allowed.new_ones(allowed.shape[0], len(kept[0])))
    if layer.tail is not None:
        keys.append(layer.tail.keys[row, head, : layer.tail.length])
        values.append(layer.tail.values[row, head, : layer.tail.length])
        visible.append(allowed)
    return torch.cat(keys), torch.cat(values), torch.cat(visible, dim=1)
