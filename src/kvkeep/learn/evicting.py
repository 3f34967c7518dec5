"""A model that reads a whole text as if a cache of fixed size held its entries, with gradients.

Which query sees which entry is known for a whole text at once (`ranking.evict_at`), so that one masked forward gives
what a cache gives that deletes one entry at each step (KVpop, arXiv 2607.05061, section 3.3). Eviction itself has no
gradient; attention to what is held has.

Shapes: `B` rows, `H` query heads, `H_kv` KV heads, `S` positions, `D` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from kvkeep.hf.substitute import LayerCall, Output, substituted
from kvkeep.hf.support import rotary_of, unwrap
from kvkeep.learn.traces import LayerTrace, evictable_ordinals

# Queries of a block: its mask is made again for its gradient, so that no mask of S x S is ever kept.
_BLOCK = 512

Decide = Callable[[LayerTrace], Tensor]


@contextmanager
def evicting(model: Any, decide: Decide) -> Iterator[None]:
    """Let every layer of full attention read whole texts under a cap, within the block.

    Layers with a sliding window are left to themselves. Where a layer is computed again for its gradient
    (`torch.utils.checkpoint`), it sees what it saw before. So a block is for one text: its forward, and its backward.

    Args:
        model: one that kvkeep supports, wrapped or not.
        decide: given a layer, detached from what it was computed from, `[B, H_kv, S]` from `ranking.evict_at`: the
            position from which on no query sees an entry. It may compute gradients of its own.

    Raises:
        UnsupportedError: a model or an attention implementation that kvkeep has not checked.
    """
    inner = unwrap(model)
    ordinals = evictable_ordinals(inner)
    decoder = inner.get_decoder()
    known: dict[int, Tensor] = {}

    def attend(call: LayerCall) -> Output:
        layer = int(call.module.layer_idx)
        if layer not in ordinals:
            return call.former()
        if layer not in known:
            seen = (call.query.detach(), call.key.detach(), call.value.detach())
            trace = LayerTrace(ordinals[layer], layer, *seen, call.scaling, rotary_of(decoder, call.module))
            # Whoever keeps tensors of the model's graph in another place has no business with those of `decide`; and
            # scores are float32 whatever the model computes in.
            with saved_tensors_hooks(_itself, _itself), torch.autocast(call.query.device.type, enabled=False):
                known[layer] = decide(trace)
        found = attend_evicted(call.query, call.key, call.value, known[layer], call.scaling)
        return found.transpose(1, 2).contiguous(), None

    # A layer that is computed again must find this attention: on the thread that entered the block.
    with substituted(inner, attend), torch.autograd.set_multithreading_enabled(False):
        yield


def attend_evicted(
    query: Tensor, key: Tensor, value: Tensor, evicted: Tensor, scaling: float, *, block: int = _BLOCK
) -> Tensor:
    """Attention of a whole text in which entries leave, by torch's own attention, in blocks of queries.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, H_kv, S, D]`.
        value: `[B, H_kv, S, D]`.
        evicted: `[B, H_kv, S]`: query q sees entry t where `t <= q < evicted[t]`.
        scaling: factor on the products.
        block: queries that are computed at once.

    Returns:
        `[B, H, S, D]`.
    """
    batch, heads, length, _ = query.shape
    cells = batch * key.shape[1]
    group = heads // key.shape[1]
    # Query heads that share a KV head lie side by side, so that keys need no copies.
    asking = query.reshape(cells, group, length, -1)
    keys, values = (t.reshape(cells, 1, length, -1).expand(-1, group, -1, -1) for t in (key, value))
    gone = evicted.reshape(cells, 1, 1, length)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        given = (asking[:, :, start:stop], keys[:, :, :stop], values[:, :, :stop], gone[..., :stop], start, scaling)
        again = torch.is_grad_enabled() and query.requires_grad
        outputs.append(checkpoint(_attend, *given, use_reentrant=False) if again else _attend(*given))
    return torch.cat(outputs, dim=2).reshape(batch, heads, length, -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, gone: Tensor, start: int, scaling: float) -> Tensor:
    """Queries from `start` on, `[N, G, n, D]`, over the entries up to the last of them."""
    at = torch.arange(start, start + query.shape[2], device=query.device)[:, None]
    seen = (torch.arange(key.shape[2], device=query.device) <= at) & (at < gone)  # [N, 1, n, m]
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
