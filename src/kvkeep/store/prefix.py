"""The immutable part of a layer's store: what was kept at the last cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from kvkeep.store.memory import Layout, nbytes


@dataclass(frozen=True, eq=False)
class Prefix:
    """The kept entries of all cells, one cell after the other: row 0 head 0, row 0 head 1, ...

    It is never written to, so forks share it.

    Attributes:
        keys: `[entries, D]`, each cell's in ascending order of position.
        values: `[entries, D]`.
        positions: `[entries]` int32, where an entry stood in the text.
        offsets: `[cells + 1]` int32, where a cell begins.
        bounds: the offsets as numbers; decoding steps read these, and so never wait for a device.
        kv_heads: KV heads, that is, cells of one row.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    offsets: Tensor
    bounds: tuple[int, ...]
    kv_heads: int

    @classmethod
    def from_counts(cls, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor) -> Prefix:
        """Entries in order of cells, of which there are `counts [B, H_kv]`."""
        offsets = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=keys.device)
        offsets[1:] = counts.flatten().cumsum(0)
        return cls(keys, values, positions, offsets, tuple(offsets.tolist()), counts.shape[1])

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], batch: int, kv_heads: int) -> Prefix | None:
        """What `tensors()` of another prefix gave; None if they are not there or do not agree."""
        try:
            keys, values, positions, offsets = (tensors[name] for name in ("keys", "values", "positions", "offsets"))
        except KeyError:
            return None
        if (keys.ndim, values.ndim, positions.ndim, offsets.ndim) != (2, 2, 1, 1) or offsets.is_floating_point():
            return None
        bounds = tuple(offsets.tolist())
        whole = len(bounds) == batch * kv_heads + 1 and bounds[0] == 0 and min(_sizes(bounds), default=-1) >= 0
        agree = len(keys) == len(values) == len(positions) == bounds[-1]
        return cls(keys, values, positions, offsets, bounds, kv_heads) if whole and agree else None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its storages."""
        return nbytes(*self.tensors().values())

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the keys and values among them."""
        return nbytes(self.keys, self.values)

    @cached_property
    def layout(self) -> Layout | None:
        """How keys and values lie, asked of the tensors once: a decoding step asks every layer."""
        return Layout.of(self.keys, self.values)

    @cached_property
    def sizes(self) -> list[int]:
        """Entries of each cell."""
        return _sizes(self.bounds)

    @cached_property
    def longest_cell(self) -> int:
        """Entries of the cell that has most."""
        return max(self.sizes)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all cells have equally many entries."""
        return len(set(self.sizes)) == 1

    @property
    def counts(self) -> Tensor:
        """`[B, H_kv]` int64 entries of each cell."""
        return self.offsets.diff().view(-1, self.kv_heads).long()

    def cell(self, cell: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[n, D]` of one cell, as views."""
        entries = slice(self.bounds[cell], self.bounds[cell + 1])
        return self.keys[entries], self.values[entries]

    def rectangle(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows `first` to `last` side by side: keys, values `[B, H_kv, P, D]`, positions, valid `[B, H_kv, P]`.

        Views of keys and values where these cells have the same length. Elsewhere short cells are filled up with zeros.
        """
        bounds = self.bounds[first * self.kv_heads : last * self.kv_heads + 1]
        sizes = _sizes(bounds)
        shape = (last - first, self.kv_heads, max(sizes))
        valid = torch.arange(max(sizes), device=self.keys.device) < self.counts[first:last, :, None]

        def spread(flat: Tensor) -> Tensor:
            flat = flat[bounds[0] : bounds[-1]]
            if len(set(sizes)) == 1:
                return flat.view(*shape, *flat.shape[1:])
            full = flat.new_zeros(*shape, *flat.shape[1:])
            full[valid] = flat
            return full

        return spread(self.keys), spread(self.values), spread(self.positions).long(), valid

    def select(self, rows: Tensor) -> Prefix:
        """A prefix whose row `i` is this one's row `rows[i]`."""
        rows = rows.to(self.keys.device)
        counts = self.counts[rows]  # [rows, H_kv]
        starts = self.offsets[:-1].view(-1, self.kv_heads)[rows].flatten()
        ends = counts.flatten().cumsum(0)
        shift = starts - (ends - counts.flatten())
        index = torch.arange(int(ends[-1]), device=shift.device) + shift.repeat_interleave(counts.flatten())
        return Prefix.from_counts(self.keys[index], self.values[index], self.positions[index], counts)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {"keys": self.keys, "values": self.values, "offsets": self.offsets, "positions": self.positions}


def _sizes(bounds: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]
