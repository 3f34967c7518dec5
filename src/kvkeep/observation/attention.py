"""Attention probabilities of a layer's queries over its held entries, in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# At most this many probabilities exist at once, so that no L x L matrix ever does. Blocks are small on a CPU: fresh
# memory for a large one costs more than what is computed in it.
_BLOCK_ELEMENTS = 2**21
_BLOCK_ELEMENTS_ON_DEVICES = 2**23


def attention_blocks(
    queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor, valid: Tensor, scaling: float
) -> Iterator[Tensor]:
    """Yield attention probabilities `[B, H_kv, G, q, N]` float32, some queries at a time.

    All blocks use the same memory: each is valid until the next is asked for. No gradient flows through them.

    Args:
        queries: `[B, H, Q, D]`.
        query_positions: `[B, Q]`; a query sees the entries up to its own position.
        keys: `[B, H_kv, N, D]` float32.
        positions: `[B, H_kv, N]` of the entries.
        valid: `[B, H_kv, N]` false where a cell holds fewer than N entries.
        scaling: factor on the dot products.
    """
    batch, heads, count, size = queries.shape
    kv_heads, held = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    keys = keys.detach().transpose(2, 3)
    open_columns = _open_columns(query_positions, positions, valid)
    at_entries, missing = positions[:, :, None, open_columns:], ~valid[:, :, None, open_columns:]
    on_cpu = keys.device.type == "cpu"
    elements = _BLOCK_ELEMENTS if on_cpu else _BLOCK_ELEMENTS_ON_DEVICES
    block = max(1, min(count, elements // (batch * heads * held)))
    memory = keys.new_empty(batch * heads * block * held)
    for first in range(0, count, block):
        last = min(first + block, count)
        # The few queries are scaled, not their many products.
        some = queries[:, :, first:last].detach().float() * scaling
        grouped = some.reshape(batch, kv_heads, group * (last - first), size)
        logits = memory[: batch * heads * (last - first) * held].view(batch, kv_heads, -1, held)
        for row in range(batch):  # all at once, a product would copy keys that do not lie side by side
            torch.bmm(grouped[row], keys[row], out=logits[row])
        logits = logits.view(batch, kv_heads, group, last - first, held)
        at = query_positions[:, None, first:last, None]
        hidden = (at_entries > at) | missing  # [B, H_kv, q, n]
        logits[..., open_columns:].masked_fill_(hidden[:, :, None], -math.inf)
        # In place where fresh memory is what costs; elsewhere it is not promised to work.
        attention = torch.softmax(logits, -1, out=logits) if on_cpu else logits.softmax(-1)
        if not open_columns:
            blind = hidden.all(-1)  # queries of an earlier chunk: nothing of what they saw is left
            if not on_cpu or bool(blind.any()):
                attention.masked_fill_(blind[:, :, None, :, None], 0)
        yield attention


def _open_columns(query_positions: Tensor, positions: Tensor, valid: Tensor) -> int:
    """From which column on an entry may be hidden from one of the queries.

    All earlier columns are seen by all of them, so that masks need not cover the whole text.
    """
    earliest = query_positions.amin(1)[:, None, None]
    hidden = ((positions > earliest) | ~valid).flatten(0, 1).any(0)
    return int(hidden.int().argmax()) if bool(hidden.any()) else hidden.shape[0]
