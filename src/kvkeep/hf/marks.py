"""Points that a cache can go back to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import Tensor

from kvkeep.hf.evictable import EvictableLayer
from kvkeep.hf.progress import Progress
from kvkeep.hf.sliding import KeepSlidingLayer

Window = tuple[Tensor | None, Tensor | None, int]


@dataclass(frozen=True, eq=False)
class Mark:
    """A point that a cache can be rewound to; see `KeepCache.mark`.

    Attributes:
        columns: tokens seen, padding included.
        lengths: logical length of each row.
        entries: a snapshot of each evictable layer.
        windows: what each sliding layer held.
    """

    columns: int
    lengths: tuple[int, ...]
    entries: tuple[Any, ...]
    windows: tuple[Window, ...]

    @classmethod
    def of(cls, progress: Progress, layers: Sequence[EvictableLayer], sliding: Sequence[KeepSlidingLayer]) -> Mark:
        """Where a cache stands."""
        return cls(
            columns=progress.columns,
            lengths=tuple(progress.lengths),
            entries=tuple(layer.snapshot() for layer in layers),
            windows=tuple(layer.snapshot() for layer in sliding),
        )

    def restore(
        self, progress: Progress, layers: Sequence[EvictableLayer], sliding: Sequence[KeepSlidingLayer]
    ) -> None:
        """Let the cache stand here again. A forward that only appended is undone, also half of one."""
        for layer, snapshot in zip(layers, self.entries, strict=True):
            layer.restore(snapshot)
            if not self.columns:
                layer.store.reset()  # empty again: the next text may have other rows
        for window, held in zip(sliding, self.windows, strict=True):
            window.restore(held)
        progress.columns, progress.lengths = self.columns, list(self.lengths)
        progress.forward = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it, but for the windows' tensors; of a cache that is cut where a text ends."""
        return {
            "columns": self.columns,
            "lengths": self.lengths,
            "tails": self.entries,
            "seen": [seen for _, _, seen in self.windows],
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any], windows: Sequence[tuple[Tensor | None, Tensor | None]]) -> Mark:
        """What `to_dict` gave, with the windows' tensors."""
        pairs = zip(windows, facts["seen"], strict=True)
        return cls(
            columns=facts["columns"],
            lengths=tuple(facts["lengths"]),
            entries=tuple(facts["tails"]),
            windows=tuple((keys, values, seen) for (keys, values), seen in pairs),
        )


class Marks:
    """The marks of a cache that it can still go back to, as long as somebody holds them.

    Args:
        held: those to begin with.

    Attributes:
        last_cut: where the cache stood after its last cut; None where there is no such point.
    """

    def __init__(self, held: Iterable[Mark] = (), last_cut: Mark | None = None) -> None:
        self._held: WeakSet[Mark] = WeakSet(held)
        self.last_cut = last_cut

    def __contains__(self, mark: Mark) -> bool:
        return mark in self._held

    def add(self, mark: Mark) -> None:
        """One more."""
        self._held.add(mark)

    def clear(self) -> None:
        """No mark holds any more: what they name was cut, or the rows have changed."""
        self._held.clear()

    def forget_after(self, columns: int) -> None:
        """After going back: what stood behind this point is gone, also if as many tokens come again."""
        for mark in [mark for mark in self._held if mark.columns > columns]:
            self._held.discard(mark)

    def copy(self) -> Marks:
        """The same for a fork."""
        return Marks(self._held, self.last_cut)
