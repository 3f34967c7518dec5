"""Caches that are filled without a prefill, so that long ones cost seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvkeep
from kvkeep.hf.support import CACHE_ARGUMENT


def embedded_model(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """SmolLM2-135M and its tokenizer, ready for inference."""
    return kvkeep.load_model("smollm2-135m", dtype=dtype)


def random_entries(model: Any, length: int, rows: int = 1, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values `[rows, H_kv, length, D]` of each layer, as large as real ones; the same for the same seed."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        generator = torch.Generator().manual_seed(seed * 1000 + layer)
        shape = (rows, config.num_key_value_heads, length, size)
        yield tuple(torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))  # type: ignore[misc]


def dense_cache(model: Any, length: int) -> DynamicCache:
    """transformers' own cache, holding `length` random entries a cell."""
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(random_entries(model, length)):
        cache.update(keys, values, layer)
    return cache


def kept_cache(model: Any, length: int, compression_ratio: float) -> kvkeep.KeepCache:
    """A KeepCache of the same entries, cut to ragged heads: 0.4, 1 and 1.6 times the average."""
    policy = "full" if compression_ratio == 0 else "random"
    cache = kvkeep.KeepCache(model, policy, compression_ratio=compression_ratio)
    average = kvkeep.Budget(compression_ratio=compression_ratio).entries_per_cell([length], [])[0]
    for layer, (keys, values) in zip(cache.keep_layers, random_entries(model, length), strict=True):
        layer.store.append(keys, values, torch.arange(length)[None])
        if compression_ratio:
            held = layer.store.held([length])[0]
            shares = torch.linspace(0.4, 1.6, keys.shape[1]).roll(layer.index)
            counts = (average * shares).long()
            generator = torch.Generator().manual_seed(layer.index)
            order = torch.rand(held.valid.shape, generator=generator).argsort(-1).argsort(-1)
            layer.store.cut([held], [order < counts[None, :, None]])
    cache.begin_with([length], length)
    return cache


def random_prompt(model: Any, length: int, seed: int = 0) -> Tensor:
    """Token ids `[1, length]`, the same for the same seed."""
    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def prefill(model: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Run a prompt into a cache; logits `[1, 1, vocabulary]` of its last token."""
    arguments = {} if cache is None else {CACHE_ARGUMENT: cache}
    logits: Tensor = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **arguments).logits
    return logits


def step(model: Any, cache: Any, token: Tensor) -> Tensor:
    """Logits `[1, 1, vocabulary]` of one more token."""
    logits: Tensor = model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache}).logits
    return logits
