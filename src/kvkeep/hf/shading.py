"""Which tokens of a text a cache still holds, and in how many of its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.hf.cache import KeepCache


@dataclass(frozen=True)
class Stretch:
    """A stretch of text whose tokens share one fate.

    Attributes:
        text: as it stands in the document.
        share: of the cells that still hold it, 0 to 1.
    """

    text: str
    share: float


def kept_shares(cache: KeepCache, layer: int | None = None, head: int | None = None) -> Tensor:
    """For each position seen, the share of cells that hold it, `[L]` float32.

    Args:
        cache: with one row.
        layer: the model's index of an evictable layer; None for all of them.
        head: a KV head; None for all of them.

    Raises:
        CacheStateError: no such layer or head, or a layer that is not evicted.
    """
    layers = [keep.index for keep in cache.keep_layers]
    heads = cache.keep_layers[0].store.kv_heads
    if layer is not None and layer not in layers:
        raise CacheStateError(
            expected=f"an evictable layer: {', '.join(map(str, layers))}",
            received=f"{layer}",
            remedy="sliding-window layers keep their own window" if 0 <= layer < len(cache.layers) else "count from 0",
        )
    if head is not None and not 0 <= head < heads:
        raise CacheStateError(
            expected=f"a KV head from 0 to {heads - 1}", received=f"{head}", remedy="query heads share KV heads"
        )
    chosen_layers = layers if layer is None else [layer]
    chosen_heads = range(heads) if head is None else [head]
    counts = torch.zeros(cache.get_seq_length())
    for at in chosen_layers:
        for of in chosen_heads:
            counts[cache.kept_positions(at, head=of).cpu().long()] += 1
    return counts / (len(chosen_layers) * len(chosen_heads))


def shaded_stretches(text: str, tokenizer: Any, shares: Sequence[float]) -> list[Stretch]:
    """Cut a text where the shares of its tokens change; joined, the stretches are the text again.

    Args:
        text: the document.
        tokenizer: a fast one, which knows where a token stands in the text.
        shares: of each token of the text.

    Raises:
        CacheStateError: a tokenizer that splits the text into another number of tokens.
    """
    # Pieces of one character's bytes are tokens with the same span: the first stands for all.
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(spans) != len(shares):
        raise CacheStateError(
            expected=f"{len(shares)} tokens, as the cache has seen",
            received=f"{len(spans)}",
            remedy="use the tokenizer that the text was ingested with",
        )
    stretches: list[Stretch] = []
    done = 0
    for (_, end), share in zip(spans, shares, strict=True):
        if end <= done:
            continue
        words, done = text[done:end], end
        if stretches and stretches[-1].share == share:
            stretches[-1] = Stretch(stretches[-1].text + words, share)
        else:
            stretches.append(Stretch(words, share))
    if done < len(text):  # what the tokenizer dropped at the end
        stretches.append(Stretch(text[done:], 0.0))
    return stretches
