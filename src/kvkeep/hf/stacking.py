"""Several caches as the rows of one, so that they decode together: other prompts, policies and budgets side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.errors import CacheStateError, UnsupportedError
from kvkeep.hf.evictable import EvictableLayer
from kvkeep.hf.layers import KeepLayer
from kvkeep.hf.online import OnlineLayer
from kvkeep.hf.policy_table import PolicyLike, table_to_text
from kvkeep.hf.sliding import KeepSlidingLayer
from kvkeep.hf.spans import Span
from kvkeep.store import RaggedLayer, SlotLayer
from kvkeep.store.prefix import Prefix
from kvkeep.store.tail import Tail

if TYPE_CHECKING:
    from kvkeep.hf.cache import KeepCache


def stack_caches(kind: type[KeepCache], caches: Sequence[KeepCache]) -> KeepCache:
    """The rows of several caches as one cache; see `KeepCache.stack`."""
    for cache in caches:
        cache.refuse_unusable()
    check_alike([cache.model for cache in caches], [cache.evictable_layers for cache in caches])
    first = caches[0]
    if any(cache.is_online for cache in caches):
        check_one_cap([(cache.policy, cache.budget, cache.protect) for cache in caches])
        stacked = kind(first.model, first.policy, budget=first.budget, protect=first.protect)
        stack_slots(_online_layers(stacked), [_online_layers(cache) for cache in caches])
    else:
        if len({cache.rerotate_keys for cache in caches}) > 1:
            raise CacheStateError(
                expected="caches that all rotate their keys anew, or none of them",
                received="both kinds",
                remedy="stack those of each kind by themselves",
            )
        stacked = kind(first.model, "full", rerotate_keys=first.rerotate_keys)
        stack_layers(stacked.keep_layers, [cache.keep_layers for cache in caches])
    stack_windows(stacked.sliding_layers, [cache.sliding_layers for cache in caches])
    lengths = [length for cache in caches for length in cache.lengths]
    stacked.begin_with(lengths, max(cache.get_seq_length() for cache in caches))
    return stacked


def stack_layers(target: Sequence[KeepLayer], sources: Sequence[Sequence[KeepLayer]]) -> None:
    """Fill the layers of an empty cache with the rows of others, one after the other; they are copied.

    Args:
        target: the evictable layers of the new cache.
        sources: for each cache its evictable layers.
    """
    for index, layer in enumerate(target):
        stores = [layers[index].store for layers in sources]
        layer.store.batch = sum(store.batch for store in stores)
        layer.store.kv_heads = stores[0].kv_heads
        layer.store.prefix = _stack_prefixes(stores)
        layer.store.tail = _stack_tails(stores)


def stack_slots(target: Sequence[OnlineLayer], sources: Sequence[Sequence[OnlineLayer]]) -> None:
    """The same for layers under one online policy and one cap."""
    for index, layer in enumerate(target):
        layer.stack([layers[index] for layers in sources])


def stack_windows(target: Sequence[KeepSlidingLayer], sources: Sequence[Sequence[KeepSlidingLayer]]) -> None:
    """The same for sliding-window layers, whose rows must have seen equally much.

    Raises:
        UnsupportedError: they have not.
    """
    for index, layer in enumerate(target):
        windows = [layers[index].snapshot() for layers in sources]
        if len({seen for _, _, seen in windows}) > 1:
            raise UnsupportedError(
                expected="rows that have seen equally many tokens, in a model with sliding-window layers",
                received=f"{sorted({seen for _, _, seen in windows})} tokens",
                remedy="stack caches of one prompt, or decode one by one",
            )
        keys = [keys for keys, _, _ in windows if keys is not None]
        values = [values for _, values, _ in windows if values is not None]
        layer.restore((torch.cat(keys), torch.cat(values), windows[0][2]))


def check_alike(models: Sequence[Any], sources: Sequence[Sequence[EvictableLayer]]) -> None:
    """Refuse caches that cannot be rows of one.

    Args:
        models: that the caches belong to.
        sources: for each cache its evictable layers.

    Raises:
        CacheStateError: nothing to stack, an empty cache, or caches of different models, devices or dtypes.
    """
    if not sources or not all(layers[0].store.batch for layers in sources):
        raise CacheStateError(
            expected="caches that hold a text each",
            received="an empty one" if sources else "none",
            remedy="process a text with each of them first",
        )
    kinds = {(id(model), *_kind(layers[0].store)) for model, layers in zip(models, sources, strict=True)}
    if len(kinds) > 1:
        raise CacheStateError(
            expected="caches of one model, on one device and of one dtype",
            received=f"{len(kinds)} kinds",
            remedy="stack those of each kind by themselves",
        )


def check_one_cap(kinds: Sequence[tuple[PolicyLike, Budget, Sequence[Span]]]) -> None:
    """Refuse caches that do not all hold one cap by one online policy.

    Args:
        kinds: policy, budget and protected ranges of each.

    Raises:
        UnsupportedError: they differ, or their cap is in bytes, which more rows would exceed.
    """
    texts = {(str(table_to_text(policy)), str(budget), str(list(protect))) for policy, budget, protect in kinds}
    if len(texts) > 1 or kinds[0][1].bytes is not None:
        raise UnsupportedError(
            expected="caches with one online policy, one cap in entries and the same protected ranges",
            received=", ".join(f"{policy} with {budget}" for policy, budget, _ in sorted(texts)),
            remedy="stack those of each kind by themselves, or give one cache all rows with the first text",
        )


def _online_layers(cache: KeepCache) -> list[OnlineLayer]:
    return [layer for layer in cache.evictable_layers if isinstance(layer, OnlineLayer)]


def _kind(store: RaggedLayer | SlotLayer) -> tuple[torch.device, torch.dtype]:
    keys = next(tensor for name, tensor in store.tensors().items() if name.endswith("keys"))
    return keys.device, keys.dtype


def _stack_prefixes(stores: Sequence[RaggedLayer]) -> Prefix | None:
    prefixes = [store.prefix for store in stores if store.prefix is not None]
    if not prefixes:
        return None
    counts = torch.cat([store.prefix_counts() for store in stores])
    return Prefix.from_counts(
        keys=torch.cat([prefix.keys for prefix in prefixes]),
        values=torch.cat([prefix.values for prefix in prefixes]),
        positions=torch.cat([prefix.positions for prefix in prefixes]),
        counts=counts,
    )


def _stack_tails(stores: Sequence[RaggedLayer]) -> Tail | None:
    """All tails end in the same column; shorter ones have padding before them."""
    length = max(store.tail_length for store in stores)
    if not length:
        return None
    like = next(store.tail for store in stores if store.tail is not None)
    rows = sum(store.batch for store in stores)
    tail = Tail.allocate(like.keys[:1].expand(rows, -1, -1, -1), like.values[:1].expand(rows, -1, -1, -1), length)
    valid = torch.zeros(rows, length, dtype=torch.bool, device=like.keys.device)
    for tensor in (tail.keys, tail.values, tail.positions):
        tensor.zero_()
    row = 0
    for store in stores:
        if store.tail is not None and store.tail.length:
            own, last = store.tail, slice(length - store.tail.length, length)
            mine = slice(row, row + store.batch)
            tail.keys[mine, :, last] = own.keys[:, :, : own.length]
            tail.values[mine, :, last] = own.values[:, :, : own.length]
            tail.positions[mine, last] = own.positions[:, : own.length]
            valid[mine, last] = True if own.valid is None else own.valid[:, : own.length]
        row += store.batch
    if not bool(valid.all()):
        tail.valid = valid
    tail.rewind(length)
    return tail


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Token ids `[rows, longest]` with padding on the left, and their mask; no mask where nothing is padded.

    Args:
        rows: tokens of each row, at least one.
        pad: the token to fill up with.
        device: of the result.
    """
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return ids, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
