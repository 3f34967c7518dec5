"""The ledger of a cache: what it holds, what the full cache would hold, and the most it ever held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.store.ragged import Bytes, RaggedLayer
from kvkeep.store.slots import SlotLayer


class Ledger:
    """Counts entries and bytes on the storages themselves.

    Held bytes, fraction and entries are over the evictable layers; the windows of sliding layers are listed apart, and
    the peak covers both. The peak also covers what a layer holds while it moves entries (the old and the new buffer),
    and the copies that it lends to policies; not the workspace of single tensor operations.

    Args:
        layers: the evictable layers' stores.
        lengths: gives the logical length of each row.
        windows: one function for each sliding layer that gives the bytes it holds.
    """

    def __init__(
        self,
        layers: Sequence[RaggedLayer | SlotLayer],
        lengths: Callable[[], Sequence[int]],
        windows: Sequence[Callable[[], int]] = (),
    ) -> None:
        self._layers = layers
        self._lengths = lengths
        self._windows = windows
        self.restart()

    def restart(self) -> None:
        """Forget the peak; what is held now is where the next one begins."""
        for layer in self._layers:
            layer.high_water = 0
        self._sizes = [_size(layer) for layer in self._layers]
        self._window_sizes = [window() for window in self._windows]
        self._total = sum(self._sizes) + sum(self._window_sizes)
        self.peak_bytes = self._total

    def record(self, index: int) -> None:
        """Take note of what layer `index` of the evictable layers did since the last call."""
        layer = self._layers[index]
        size = _size(layer)
        others = self._total - self._sizes[index]
        self.peak_bytes = max(self.peak_bytes, others + max(size, layer.high_water))
        layer.high_water = 0
        self._sizes[index] = size
        self._total = others + size

    def record_window(self, index: int) -> None:
        """Take note of what sliding layer `index` holds now."""
        size = self._windows[index]()
        self._total += size - self._window_sizes[index]
        self._window_sizes[index] = size
        self.peak_bytes = max(self.peak_bytes, self._total)

    @property
    def _bytes(self) -> list[Bytes]:
        return [layer.bytes() for layer in self._layers]

    @property
    def payload_bytes(self) -> int:
        """Keys and values of the entries that are held."""
        return sum(b.payload for b in self._bytes)

    @property
    def slack_bytes(self) -> int:
        """Reserved and unused."""
        return sum(b.slack for b in self._bytes)

    @property
    def metadata_bytes(self) -> int:
        """Offsets and positions."""
        return sum(b.metadata for b in self._bytes)

    @property
    def state_bytes(self) -> int:
        """Memory of a policy between forwards: queries of a prompt that arrives in chunks, until it is cut; what an
        online policy remembers, and what marks of its cache keep beside it."""
        return sum(b.state for b in self._bytes)

    @property
    def held_bytes(self) -> int:
        """Payload, slack, metadata and state."""
        return sum(b.total for b in self._bytes)

    @property
    def window_bytes(self) -> int:
        """What sliding layers hold; they keep their own window and are not evicted."""
        return sum(window() for window in self._windows)

    @property
    def full_bytes(self) -> int:
        """Payload of the full cache of the same text, over the evictable layers."""
        tokens = sum(self._lengths())
        return sum(tokens * layer.kv_heads * layer.entry_bytes for layer in self._layers)

    @property
    def fraction(self) -> float:
        """Held bytes as a share of the full cache's; 0 for an empty cache."""
        return self.held_bytes / self.full_bytes if self.full_bytes else 0.0

    @property
    def entries_per_cell(self) -> list[list[list[int]]]:
        """Entries held, `[layer][row][KV head]`."""
        return [layer.cell_counts().tolist() for layer in self._layers]

    @property
    def entries(self) -> int:
        """Entries held, over all cells."""
        return sum(int(layer.cell_counts().sum()) for layer in self._layers)

    @property
    def entries_full(self) -> int:
        """Entries of the full cache of the same text."""
        return sum(sum(self._lengths()) * layer.kv_heads for layer in self._layers)

    @property
    def uncut_entries(self) -> int:
        """Entries that came after the last cut and have not been judged."""
        return sum(int(layer.tail_counts().sum()) * layer.kv_heads for layer in self._layers)

    def to_dict(self) -> dict[str, Any]:
        """The counts as they go into results."""
        lengths = list(self._lengths())
        return {
            "logical_length": lengths[0] if len(set(lengths)) == 1 else lengths,
            "entries": self.entries,
            "entries_full": self.entries_full,
            "uncut_entries": self.uncut_entries,
            "payload_bytes": self.payload_bytes,
            "slack_bytes": self.slack_bytes,
            "metadata_bytes": self.metadata_bytes,
            "state_bytes": self.state_bytes,
            "held_bytes": self.held_bytes,
            "window_bytes": self.window_bytes,
            "peak_bytes": self.peak_bytes,
            "full_bytes": self.full_bytes,
            "fraction": self.fraction,
        }


def _size(layer: RaggedLayer | SlotLayer) -> int:
    return layer.bytes().total + layer.lent_bytes
