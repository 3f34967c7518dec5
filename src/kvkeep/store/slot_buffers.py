"""What a store of fixed size writes to, and what moves in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep.store.memory import nbytes


@dataclass(frozen=True, eq=False)
class Leaving:
    """Tokens that leave the window while others come, in order.

    Attributes:
        keys: `[R, H_kv, m, D]`.
        values: `[R, H_kv, m, D]`.
        positions: `[R, m]` int64.
        priorities: `[R, H_kv, m]` float32 their priorities so far; None where only slots have some.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    priorities: Tensor | None


@dataclass(eq=False)
class SlotBuffers:
    """Buffers of one layer; stores that share them make a copy before they write.

    Attributes:
        keys: `[B, H_kv, s + w + k, D]`.
        values: `[B, H_kv, s + w + k, D]`, zero where nothing was written: rows of different length are attended to
            together, and even a weight of zero would let a NaN through.
        positions: `[B, H_kv, k]` int32, of the slots.
        priorities: `[B, H_kv, k]` float32, of the slots; of all entries `[B, H_kv, s + w + k]` where they are watched.
        owners: the stores that have them.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    priorities: Tensor
    owners: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, init=False)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {"keys": self.keys, "values": self.values, "positions": self.positions, "priorities": self.priorities}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> SlotBuffers:
        """What `tensors` gave."""
        return cls(tensors["keys"], tensors["values"], tensors["positions"], tensors["priorities"])

    def cloned(self) -> SlotBuffers:
        """A copy."""
        return SlotBuffers.of({name: tensor.clone() for name, tensor in self.tensors().items()})

    def selected(self, rows: Tensor) -> SlotBuffers:
        """Buffers whose row `i` is this one's row `rows[i]`."""
        return SlotBuffers.of({name: tensor[rows.to(tensor.device)] for name, tensor in self.tensors().items()})

    def slots(self, behind: int) -> dict[str, Tensor]:
        """The slots' part of each, as views.

        Args:
            behind: columns of sinks and window.
        """
        watched = self.priorities.shape[2] > self.positions.shape[2]
        return {
            "keys": self.keys[:, :, behind:],
            "values": self.values[:, :, behind:],
            "positions": self.positions,
            "priorities": self.priorities[:, :, behind:] if watched else self.priorities,
        }


def move(slots: Tensor, incoming: Tensor, taken: Tensor) -> None:
    """Write incoming tokens `[R, H_kv, m, ...]` into slots `[R, H_kv, k, ...]` that they take; the last one wins."""
    if taken.shape[2] == 0:
        return
    if taken.shape[2] == 1:  # a step: no waiting for a device to tell how many there are
        index, moves = taken.clamp(min=0), taken >= 0
        if slots.ndim == 4:
            index, moves = index[..., None].expand(-1, -1, -1, slots.shape[3]), moves[..., None]
        slots.scatter_(2, index, torch.where(moves, incoming, slots.gather(2, index)))
        return
    steps = torch.arange(taken.shape[2], device=taken.device).expand_as(taken).masked_fill(taken < 0, -1)
    last = torch.full(slots.shape[:3], -1, dtype=torch.int64, device=taken.device)
    last = last.scatter_reduce_(2, taken.clamp(min=0), steps, "amax")
    rows, heads, columns = (last >= 0).nonzero(as_tuple=True)
    slots[rows, heads, columns] = incoming[rows, heads, last[rows, heads, columns]]


def place(tensor: Tensor) -> int:
    """Where a tensor's storage is."""
    return tensor.untyped_storage().data_ptr()


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each once."""
    return sum({place(tensor): nbytes(tensor) for tensor in tensors}.values())
