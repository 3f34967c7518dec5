"""How far a model strays from itself while it reads a text under a cap: KL and likelihood, token by token.

The text runs once through the full cache and once through each cache that is compared, in pieces, so that no more than
a piece's logits are held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.hf.cache import KeepCache
from kvkeep.hf.scoring import kl_divergence
from kvkeep.hf.support import CACHE_ARGUMENT, unwrap
from kvkeep.learn.config import LearnError

PIECE = 256  # tokens


@dataclass(frozen=True)
class Strayed:
    """One text under one cache, from the first token on that it has to evict for.

    Attributes:
        kl: KL of the full cache's predictions to these, nats a token.
        nll: negative log-likelihood of the text, nats a token.
        full_nll: the same with the full cache.
        tokens: predictions that were compared.
        held_bytes: of the cache when the text has been read.
    """

    kl: float
    nll: float
    full_nll: float
    tokens: int
    held_bytes: int


@torch.no_grad()
def stray(model: Any, ids: Tensor, caches: Mapping[str, KeepCache], first: int) -> dict[str, Strayed]:
    """Read a text through several caches, beside the full one.

    Args:
        model: that the caches are of.
        ids: `[1, S]`.
        caches: fresh ones, by name.
        first: position of the first query whose prediction counts, the same for all: where a cell is full.

    Raises:
        LearnError: a text that ends before.
    """
    length = ids.shape[1]
    if length < first + 2:
        raise LearnError(
            expected=f"a text of at least {first + 2} tokens, more than its cells hold",
            received=f"{length}",
            remedy="choose longer texts or a smaller budget",
        )
    inner = unwrap(model)
    full = DynamicCache(config=inner.config)
    kl, nll, full_nll, tokens = dict.fromkeys(caches, 0.0), dict.fromkeys(caches, 0.0), 0.0, 0
    for start in range(0, length - 1, PIECE):
        stop = min(start + PIECE, length - 1)
        piece, count = ids[:, start:stop], max(0, stop - max(first, start))
        told = ids[0, stop - count + 1 : stop + 1, None]
        expected = _predictions(inner, piece, full, count)
        full_nll -= _told(expected, told)
        tokens += count
        for name, cache in caches.items():
            found = _predictions(inner, piece, cache, count)
            if count:
                kl[name] += float(kl_divergence(expected, found).double().sum())
                nll[name] -= _told(found, told)
    return {
        name: Strayed(kl[name] / tokens, nll[name] / tokens, full_nll / tokens, tokens, cache.ledger.held_bytes)
        for name, cache in caches.items()
    }


def _predictions(model: Any, piece: Tensor, cache: Any, count: int) -> Tensor:
    """Log-probabilities `[count, V]` of the last so many tokens of a piece; the cache takes all of it in."""
    logits: Tensor = model(
        input_ids=piece, use_cache=True, logits_to_keep=max(1, count), **{CACHE_ARGUMENT: cache}
    ).logits
    return logits[0, -count:].float().log_softmax(-1) if count else logits[0, :0]


def _told(predictions: Tensor, told: Tensor) -> float:
    return float(predictions.gather(1, told).double().sum()) if len(told) else 0.0
