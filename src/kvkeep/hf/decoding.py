"""Decoding many rows together, each to its own end: a row that is done is taken out and costs nothing more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import CacheStateError, UnsupportedError
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.stacking import left_padded
from kvkeep.hf.support import CACHE_ARGUMENT


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends an answer: those that the model's own settings name, and the tokenizer's."""
    given = getattr(model.generation_config, "eos_token_id", None)
    ends = given if isinstance(given, list | tuple) else [given]
    return {int(end) for end in [*ends, tokenizer.eos_token_id] if end is not None}


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, `[rows]` from `[rows, vocabulary]`."""
    return logits.argmax(-1)


@torch.no_grad()
def decode_batch(
    model: Any,
    cache: KeepCache,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    stop_tokens: Collection[int] = (),
    stop: Callable[[int, list[int]], bool] | None = None,
    choose: Callable[[Tensor], Tensor] = greedy,
) -> list[list[int]]:
    """Go on from each row of a cache with tokens of its own.

    The cache is used up: its rows leave it one by one. Fork it first if it is still needed. Rows may hold different
    entries and have seen texts of different length; see `KeepCache.stack`.

    Args:
        model: the model that the cache was made for.
        cache: with as many rows as there are prompts; an empty one reads the prompts as its text.
        prompts: tokens that each row reads before its first new one, at least one each (a question).
        max_new_tokens: at most so many new tokens, for all rows or for each.
        stop_tokens: a row ends with one of these, which is left in its result.
        stop: given a row and its new tokens so far, whether it ends here.
        choose: picks tokens `[rows]` from logits `[rows, vocabulary]` of the rows that go on.

    Returns:
        New tokens of each row.

    Raises:
        CacheStateError: another number of prompts than rows, or an empty prompt.
        UnsupportedError: prompts of different length, for a model with sliding-window layers.
    """
    rows = len(cache.lengths) or len(prompts)
    limits = [max_new_tokens] * rows if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(prompts) != rows or len(limits) != rows or not all(prompts):
        raise CacheStateError(
            expected=f"one prompt of at least one token, and one limit, for each of the {rows} rows of the cache",
            received=f"{len(prompts)} prompts of {sorted(map(len, prompts))} tokens, {len(limits)} limits",
            remedy="stack as many caches as there are prompts",
        )
    ends = frozenset(stop_tokens)
    new: list[list[int]] = [[] for _ in range(rows)]
    ids, fresh = left_padded(prompts, pad=prompts[0][0], device=model.device)
    refuse_padding(cache, fresh, list(map(len, prompts)))
    mask = mask_of(cache, fresh, ids)
    going = list(range(rows))
    while True:
        positions = positions_of(cache, ids, None if mask is None else mask[:, -ids.shape[1] :])
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{CACHE_ARGUMENT: cache},
        ).logits[:, -1]
        chosen = choose(logits)
        staying = []
        for place, (row, token) in enumerate(zip(going, chosen.tolist(), strict=True)):
            new[row].append(token)
            done = token in ends or len(new[row]) >= limits[row] or (stop is not None and stop(row, new[row]))
            if not done:
                staying.append(place)
        if not staying:
            return new
        if len(staying) < len(going):
            kept = torch.tensor(staying, device=logits.device)
            cache.batch_select_indices(kept)
            chosen, mask = chosen[kept], None if mask is None else mask[kept]
            going = [going[place] for place in staying]
        ids = chosen[:, None]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(going), 1)], dim=1)


def refuse_padding(cache: KeepCache, fresh: Tensor | None, lengths: Sequence[int]) -> None:
    """Refuse new tokens with padding among them where a window would count it.

    Args:
        cache: that they are for.
        fresh: `[rows, new]` false at padding; None if there is none.
        lengths: tokens of each row.

    Raises:
        UnsupportedError: there is padding, and the model has sliding-window layers.
    """
    if fresh is not None and cache.sliding_layers:
        raise UnsupportedError(
            expected="prompts of one length, in a model with sliding-window layers, whose window counts padding too",
            received=f"{sorted(lengths)} tokens",
            remedy="decode those of equal length together",
        )


def mask_of(cache: KeepCache, fresh: Tensor | None, ids: Tensor) -> Tensor | None:
    """`[rows, seen + new]` false at padding; None if there is none in what is new.

    What was seen counts from the right: the cache knows how long each row is, not where its padding was.
    """
    if fresh is None:
        return None
    columns = cache.get_seq_length()
    lengths = torch.tensor(cache.lengths or [0] * len(ids), device=ids.device)
    seen = torch.arange(columns, device=ids.device) >= columns - lengths[:, None]
    return torch.cat([seen.long(), fresh], dim=1)


def positions_of(cache: KeepCache, ids: Tensor, fresh: Tensor | None) -> Tensor:
    """Logical positions `[rows, new]` of new tokens; `fresh [rows, new]` is false at their padding."""
    lengths = torch.tensor(cache.lengths or [0] * len(ids), device=ids.device)[:, None]
    steps = torch.ones_like(ids) if fresh is None else fresh
    return (lengths + steps.cumsum(1) - 1).clamp(min=0)
