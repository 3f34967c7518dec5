"""Takes the newest tokens out of a cache again, where nothing was decided since they came."""

from __future__ import annotations

from collections.abc import Sequence

from kvkeep.errors import CacheStateError
from kvkeep.hf.evictable import EvictableLayer
from kvkeep.hf.layers import KeepLayer
from kvkeep.hf.sliding import KeepSlidingLayer


def crop_layers(
    layers: Sequence[EvictableLayer], sliding: Sequence[KeepSlidingLayer], count: int, remedy: str
) -> list[int]:
    """Forget the newest columns.

    Args:
        layers: the evictable layers.
        sliding: the others.
        count: of columns, at least 1.
        remedy: what else can be done.

    Returns:
        Tokens that each row loses, padding not counted.

    Raises:
        CacheStateError: they reach back into what was cut, or a sliding window no longer holds what lies before.
    """
    room = min((layer.store.tail_length for layer in layers), default=0)
    slid = any(layer.cumulative_length >= layer.sliding_window for layer in sliding)
    if count > room or slid:
        raise CacheStateError(
            expected=f"at most {0 if slid else room} tokens to remove, those since the last cut"
            + (" while no sliding window is full" if slid else ""),
            received=f"{count}",
            remedy=remedy,
        )
    gone: list[int] = []
    for layer in layers:
        if isinstance(layer, KeepLayer):  # others never have room
            before = layer.store.tail_counts()
            layer.store.rewind(layer.store.tail_length - count)
            gone = (before - layer.store.tail_counts()).tolist()
    for window in sliding:
        keys, values, seen = window.snapshot()
        if keys is not None and values is not None:
            window.restore((keys[:, :, :-count].clone(), values[:, :, :-count].clone(), seen - count))
    return gone
