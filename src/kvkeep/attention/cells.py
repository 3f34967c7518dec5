"""Attention over a ragged layer cell by cell, on views of the store: nothing is padded, and nothing copied."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.joint import Piece, attend_pieces, query_blocks, scaled, tail_of, visible_columns
from kvkeep.store import RaggedLayer


def attend(query: Tensor, layer: RaggedLayer, scaling: float) -> Tensor:
    """See `reference.attend`; the same arguments and the same result."""
    batch, heads, count, _ = query.shape
    group = heads // layer.kv_heads
    tail = tail_of(layer.tail, count)
    precise = scaled(query, scaling)
    outputs = []
    for block in query_blocks(count, group * (layer.longest_cell + tail.length)):
        columns, hidden = visible_columns(tail, block, count)
        cells = []
        for row in range(batch):
            row_hidden = None if hidden is None else hidden[min(row, len(hidden) - 1)]
            for head in range(layer.kv_heads):
                pieces = _kept(layer, row, head)
                pieces.append(Piece(tail.keys[row, head, :columns], tail.values[row, head, :columns], row_hidden))
                queries = precise[row, head * group : (head + 1) * group, block]
                cells.append(attend_pieces(queries, pieces))
        outputs.append(torch.stack(cells).view(batch, heads, block.stop - block.start, -1))
    return torch.cat(outputs, dim=2).to(query.dtype)


def _kept(layer: RaggedLayer, row: int, head: int) -> list[Piece]:
    cell = row * layer.kv_heads + head
    if layer.prefix is None or layer.prefix.sizes[cell] == 0:
        return []
    return [Piece(*layer.prefix.cell(cell), hidden=None)]
