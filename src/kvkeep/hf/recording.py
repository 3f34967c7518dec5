"""Layers that report to a ledger, weakly: a cycle of references would delay the freeing of a cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from kvkeep.hf.evictable import EvictableLayer
from kvkeep.hf.progress import Progress
from kvkeep.hf.sliding import KeepSlidingLayer
from kvkeep.store import Ledger


def new_ledger(layers: Sequence[EvictableLayer], sliding: Sequence[KeepSlidingLayer], progress: Progress) -> Ledger:
    """A ledger that all layers of a cache report to from now on.

    Args:
        layers: the evictable layers.
        sliding: the others.
        progress: tells how many tokens have been seen.
    """
    ledger = Ledger(
        [layer.store for layer in layers],
        lambda: progress.forward.lengths if progress.forward and progress.forward.touched else progress.lengths,
        [_weak_nbytes(layer) for layer in sliding],
    )
    reference = weakref.ref(ledger)
    for index, layer in enumerate(layers):
        layer.record = _recorder(reference, Ledger.record, index)
    for index, window in enumerate(sliding):
        window.record = _recorder(reference, Ledger.record_window, index)
    return ledger


def _weak_nbytes(layer: KeepSlidingLayer) -> Callable[[], int]:
    reference = weakref.ref(layer)

    def nbytes() -> int:
        alive = reference()
        return 0 if alive is None else alive.nbytes()

    return nbytes


def _recorder(ledger: weakref.ref[Ledger], method: Callable[[Ledger, int], None], index: int) -> Callable[[], None]:
    def record() -> None:
        alive = ledger()
        if alive is not None:
            method(alive, index)

    return record
