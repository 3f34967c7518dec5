"""Dense attention with `-inf` on evicted entries: what eviction must equal, computed by transformers' own cache.

The model runs with a DynamicCache that keeps everything and an attention function of its own, which hides from later
tokens what a KeepCache has evicted. Nothing of kvkeep takes part but the positions that a cache says it kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvkeep import KeepCache
from kvkeep.hf.support import CACHE_ARGUMENT

_NAME = "dense_reference"
_kernel = ["eager"]  # or "sdpa": the two ways in which transformers computes attention
_evicted: dict[int, tuple[int, Tensor]] = {}  # layer -> (columns at the cut, [B, H_kv, columns] true where evicted)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    count, held = query.shape[2], key.shape[2]
    visible = attention_mask
    if visible is None:
        visible = torch.ones(count, held, dtype=torch.bool).tril(held - count)[None, None]
    if module.layer_idx in _evicted:
        cut, gone = _evicted[module.layer_idx]
        hidden = torch.zeros(*gone.shape[:2], held, dtype=torch.bool)
        hidden[..., :cut] = gone
        first_query = held - count
        if first_query >= cut:  # tokens of the prompt itself saw everything
            visible = visible & ~hidden.repeat_interleave(group, dim=1)[:, :, None]
    if _kernel[0] == "sdpa":
        whole = attention_mask is None and count == held  # then transformers asks for a causal kernel
        output = scaled_dot_product_attention(
            query, keys, values, attn_mask=None if whole else visible, is_causal=whole, scale=scaling
        )
    else:
        logits = (query @ keys.transpose(2, 3) * scaling).masked_fill(~visible, -torch.inf)
        output = logits.softmax(-1).nan_to_num(0.0) @ values
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def dense_with_evictions(model: PreTrainedModel, cache: KeepCache | None) -> Iterator[None]:
    """Within the block, the model attends densely, without what `cache` evicted at its (only) cut.

    Left padding is evicted too, as far as the mask does not hide it. `cache=None` evicts nothing.
    """
    _evicted.clear()
    if cache is not None:
        columns = cache._marks.last_cut.columns
        lengths = cache._marks.last_cut.lengths
        for layer in cache.keep_layers:
            gone = torch.ones(len(lengths), layer.store.kv_heads, columns, dtype=torch.bool)
            for row, length in enumerate(lengths):
                for head in range(layer.store.kv_heads):
                    positions = layer.store.cell(row, head)[2]
                    kept = positions[positions < length] + (columns - length)
                    gone[row, head, kept] = False
            _evicted[layer.index] = (columns, gone)
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    config = model.config.get_text_config(decoder=True)
    former = config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(former)
        _evicted.clear()


def dense_logits(
    model: PreTrainedModel,
    cache: KeepCache | None,
    pieces: list[Tensor],
    masks: list[Tensor | None] | None = None,
    kernel: str = "eager",
) -> list[Tensor]:
    """Logits of each piece of text after the first, which is the prompt; all with a DynamicCache.

    Args:
        model: any supported model.
        cache: tells what is evicted after the first piece.
        pieces: token ids `[B, n]`.
        masks: attention masks for each piece, over everything up to its end.
        kernel: `eager` or `sdpa`.
    """
    _kernel[0] = kernel
    full = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad(), dense_with_evictions(model, cache):
        for index, piece in enumerate(pieces):
            mask = None if masks is None else masks[index]
            output = model(piece, attention_mask=mask, position_ids=positions_of(mask, piece), **{CACHE_ARGUMENT: full})
            logits.append(output.logits)
    return logits


def kept_logits(
    model: PreTrainedModel, cache: KeepCache, pieces: list[Tensor], masks: list[Tensor | None] | None = None
) -> list[Tensor]:
    """Logits of each piece with a KeepCache, the first piece being the prompt."""
    logits = []
    with torch.no_grad():
        for index, piece in enumerate(pieces):
            mask = None if masks is None else masks[index]
            output = model(
                piece, attention_mask=mask, position_ids=positions_of(mask, piece), **{CACHE_ARGUMENT: cache}
            )
            logits.append(output.logits)
    return logits


def positions_of(mask: Tensor | None, piece: Tensor) -> Tensor | None:
    """Position ids that count no padding, as `generate` makes them."""
    if mask is None:
        return None
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -piece.shape[1] :]
