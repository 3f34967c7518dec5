"""transformers' own caches with the entries of a KeepCache: padded to rectangles, or whole and partly hidden.

What others do in the place of deleting entries head by head: hold each layer as wide as its widest cell, or hold
everything and tell the attention what to leave out. An audit weighs these beside what kvkeep holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvkeep.errors import CacheStateError
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.support import CACHE_ARGUMENT, supported_decoder, unwrap


def uniform_cache(cache: KeepCache) -> DynamicCache:
    """The entries of a cut cache in tensors `[B, H_kv, widest, D]`, as transformers holds them; short cells are padded.

    Raises:
        CacheStateError: nothing was cut, or tokens came after the cut.
    """
    if any(layer.store.prefix is None or layer.store.tail_length for layer in cache.keep_layers):
        raise CacheStateError(
            expected="a cache right after its cut",
            received="one that holds nothing, or tokens that came later",
            remedy="call cache.rewind() first",
        )
    dense = DynamicCache(config=cache.model.config)
    for layer in cache.keep_layers:
        keys, values, _, _ = layer.store.padded_prefix(0, layer.store.batch)
        dense.layers[layer.index].update(keys, values)  # copies
    indices = sorted(set(range(len(cache.layers))) - {layer.index for layer in cache.keep_layers})
    for index, sliding in zip(indices, cache.sliding_layers, strict=True):
        window_keys, window_values, seen = sliding.snapshot()
        if window_keys is None or window_values is None:
            continue
        target = dense.layers[index]
        target.lazy_initialization(window_keys, window_values)
        target.keys, target.values, target.cumulative_length = window_keys.clone(), window_values.clone(), seen
    return dense


def kept_masks(cache: KeepCache, length: int) -> dict[int, Tensor]:
    """What the first row of a cache holds: by layer index `[H_kv, length]`, true where an entry is held."""
    masks = {}
    for layer in cache.keep_layers:
        cells = [layer.store.cell(0, head)[2].long() for head in range(layer.store.kv_heads)]
        mask = torch.zeros(len(cells), length, dtype=torch.bool, device=cells[0].device)
        for head, positions in enumerate(cells):
            mask[head, positions] = True
        masks[layer.index] = mask
    return masks


@contextmanager
def hidden_entries(model: Any, kept: Mapping[int, Tensor]) -> Iterator[None]:
    """Within the block, new tokens do not see the entries of a whole cache that are not kept (`-inf` in the scores).

    Args:
        model: a supported model, attached or not, run with one row and a DynamicCache that holds the text.
        kept: what `kept_masks` gave; later entries are seen by all heads.
    """
    decoder: Any = supported_decoder(unwrap(model))
    hooks = []
    try:
        for index, mask in kept.items():
            attention: nn.Module = decoder.layers[index].self_attn
            hooks.append(attention.register_forward_pre_hook(_Hiding(index, mask), with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Hiding:
    """Gives one layer a mask of its own, which neither transformers nor SDPA can be told otherwise."""

    def __init__(self, index: int, kept: Tensor) -> None:
        self._index, self._kept = index, kept

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        new, seen = hidden.shape[1], kwargs[CACHE_ARGUMENT].get_seq_length(self._index)
        later = self._kept.new_ones(len(self._kept), seen + new - self._kept.shape[1])
        entries = torch.cat([self._kept, later], dim=1).repeat_interleave(module.num_key_value_groups, dim=0)
        causal = torch.ones(new, seen + new, dtype=torch.bool, device=hidden.device).tril(seen)
        visible = causal[None, None] & entries[None, :, None]  # [1, H, new, seen + new]
        mask = torch.zeros(visible.shape, dtype=hidden.dtype, device=hidden.device).masked_fill(~visible, -torch.inf)
        return args, kwargs | {"attention_mask": mask}


@torch.no_grad()
def masked_logits(
    model: Any, dense: DynamicCache, kept: Mapping[int, Tensor], ids: Sequence[int], count: int
) -> Tensor:
    """Logits `[count, V]` of the last new tokens, from a whole cache with entries hidden; the tokens stay in it."""
    start = dense.get_seq_length()
    inputs = torch.tensor([list(ids)], device=model.device)
    positions = torch.arange(start, start + len(ids), device=model.device)[None]
    with hidden_entries(model, kept):
        logits: Tensor = model(
            input_ids=inputs,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=count,
            **{CACHE_ARGUMENT: dense},
        ).logits[0]
    return logits


def masked_decode(
    model: Any,
    dense: DynamicCache,
    kept: Mapping[int, Tensor],
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
) -> list[int]:
    """New tokens, the likeliest each time, from a whole cache with entries hidden; it is used up.

    Args:
        model: a supported model.
        dense: holds the text.
        kept: what `kept_masks` gave.
        ids: tokens that are read before the first new one.
        max_new_tokens: at most so many.
        stop_tokens: the answer ends with one of these, which is left in it.
    """
    new: list[int] = []
    while len(new) < max_new_tokens and not (new and new[-1] in stop_tokens):
        new.append(int(masked_logits(model, dense, kept, new[-1:] or ids, 1)[-1].argmax()))
    return new
