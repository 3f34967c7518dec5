"""The store of one layer: an immutable ragged prefix and a tail that grows.

    prefix   keys, values [entries, D]: the kept entries of all cells, one cell after the other; padding is not stored.
    tail     keys, values [B, H_kv, capacity, D]: what came after the last cut, the same tokens for all heads of a row.

A cut gathers what stays of both into a new prefix.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.store.memory import nbytes
from kvkeep.store.prefix import Prefix
from kvkeep.store.tail import Tail, grown_capacity


@dataclass(frozen=True)
class Bytes:
    """Bytes that a layer holds, by purpose.

    Attributes:
        payload: keys and values of held entries.
        slack: reserved and unused, or used for padding.
        metadata: offsets and positions.
        state: what a scorer remembers between forwards.
    """

    payload: int = 0
    slack: int = 0
    metadata: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.payload + self.slack + self.metadata + self.state


@dataclass(frozen=True, eq=False)
class Held:
    """What some rows of a layer hold, as rectangles, for a policy to look at.

    Attributes:
        rows: the first row and the one behind the last.
        keys: `[B, H_kv, N, D]`.
        values: `[B, H_kv, N, D]`.
        positions: `[B, H_kv, N]` int64, ascending in each cell.
        valid: `[B, H_kv, N]`.
    """

    rows: tuple[int, int]
    keys: Tensor
    values: Tensor
    positions: Tensor
    valid: Tensor


class RaggedLayer:
    """Keys and values of one layer. Owns its tensors; see the module for the layout.

    Attributes:
        batch: rows, 0 before the first append.
        kv_heads: KV heads.
        prefix: what was kept at the last cut; None before the first.
        tail: what came since; None if nothing did.
        high_water: most bytes held at once since the ledger last took note; the ledger sets it back.
        state_bytes: what a scorer remembers for this layer, beside the store; whoever holds it writes it here.
    """

    def __init__(self) -> None:
        self.batch = 0
        self.kv_heads = 0
        self.prefix: Prefix | None = None
        self.tail: Tail | None = None
        self.high_water = 0
        self.state_bytes = 0
        self._lent: weakref.WeakSet[Held] = weakref.WeakSet()

    def reset(self) -> None:
        """Hold nothing, as after construction."""
        self.batch = self.kv_heads = self.high_water = self.state_bytes = 0
        self.prefix = self.tail = None

    # -- writing ----------------------------------------------------------------------------------------------------

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor | None = None, reserve: int = 0
    ) -> None:
        """Add tokens to the tail.

        Args:
            keys: `[B, H_kv, q, D]`. The first tokens of an empty layer are taken over without a copy where the tensor
                owns its memory.
            values: `[B, H_kv, q, D]`.
            positions: `[B, q]` logical positions.
            valid: `[B, q]`, false at padding; None if there is none.
            reserve: columns to make room for at once, when the caller knows how many will come.

        Raises:
            CacheStateError: the layer holds another number of rows or heads.
        """
        keys, values = keys.detach(), values.detach()
        batch, kv_heads, count, _ = keys.shape
        if self.batch and (batch, kv_heads) != (self.batch, self.kv_heads):
            raise CacheStateError(
                expected=f"{self.batch} rows of {self.kv_heads} KV heads, as the layer holds",
                received=f"{batch} rows of {kv_heads}",
                remedy="reorder the rows of the cache first, or use a fresh one",
            )
        self.batch, self.kv_heads = batch, kv_heads
        if self.prefix is None and self.tail is None and reserve <= count:
            self.tail = Tail.adopt(keys, values, positions, valid)
            self._note_peak()
        else:  # a write into room that is there adds nothing to what is held
            self._room_for(keys, values, reserve).write(keys, values, positions, valid)

    def cut(self, held: Sequence[Held], masks: Sequence[Tensor]) -> None:
        """Keep only what the masks name; everything else is gone when this returns.

        Args:
            held: what `held()` gave, all rows of it, in order; an empty layer takes those of another over.
            masks: for each of them `[B, H_kv, N]`, true where the entry stays.
        """
        before = self.bytes().total + self.lent_bytes
        if not self.batch:  # the rectangles are somebody else's
            self.batch, self.kv_heads = sum(h.rows[1] - h.rows[0] for h in held), held[0].keys.shape[1]
        places = [mask.nonzero(as_tuple=True) for mask in masks]
        self.prefix = Prefix.from_counts(
            keys=_gathered([h.keys for h in held], places),
            values=_gathered([h.values for h in held], places),
            positions=_joined([h.positions[place].to(torch.int32) for h, place in zip(held, places, strict=True)]),
            counts=_joined([mask.sum(-1) for mask in masks]),
        )
        self.tail = None
        self._note_peak(before)

    def rewind(self, tail_length: int) -> None:
        """Forget the columns of the tail from `tail_length` on."""
        if not 0 <= tail_length <= self.tail_length:
            raise CacheStateError(
                expected=f"a tail length between 0 and the {self.tail_length} columns held",
                received=f"{tail_length}",
                remedy="rewind to a mark that was taken since the last cut",
            )
        if self.tail is not None:
            self.tail.rewind(tail_length)

    def trim(self) -> None:
        """Give back the slack of the tail."""
        if self.tail is not None and self.tail.length < self.tail.capacity:
            self._replace_tail(self.tail.resized(self.tail.length) if self.tail.length else None)

    def reorder(self, rows: Tensor) -> None:
        """Make row `i` what row `rows[i]` was; rows may repeat or be left out."""
        if self.prefix is not None:
            old = self.prefix.nbytes
            self.prefix = self.prefix.select(rows)
            self._note_peak(old)
        if self.tail is not None:
            self._replace_tail(self.tail.select(rows))
        self.batch = len(rows) if self.batch else 0

    def fork(self) -> RaggedLayer:
        """An independent layer with the same content. The prefix is shared; the tail is copied at the next write."""
        twin = RaggedLayer()
        twin.batch, twin.kv_heads = self.batch, self.kv_heads
        twin.prefix, twin.state_bytes = self.prefix, self.state_bytes
        twin.tail = None if self.tail is None else self.tail.share()
        return twin

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def tail_length(self) -> int:
        """Columns of the tail that are in use."""
        return 0 if self.tail is None else self.tail.length

    @property
    def tail_capacity(self) -> int:
        """Columns that the tail has room for."""
        return 0 if self.tail is None else self.tail.capacity

    @property
    def longest_cell(self) -> int:
        """Entries of the prefix's longest cell."""
        return 0 if self.prefix is None else self.prefix.longest_cell

    @property
    def is_uniform(self) -> bool:
        """Whether all cells of the prefix have equally many entries."""
        return self.prefix is None or self.prefix.is_uniform

    @property
    def entry_bytes(self) -> int:
        """Bytes of one key and one value vector; 0 before the first append."""
        part = self.prefix or self.tail
        if part is None:
            return 0
        return (part.keys.shape[-1] + part.values.shape[-1]) * part.keys.element_size()

    def cell_counts(self) -> Tensor:
        """`[B, H_kv]` int64 entries of each cell, prefix and tail; padding does not count."""
        return self.prefix_counts() + self.tail_counts()[:, None]

    def prefix_counts(self) -> Tensor:
        """`[B, H_kv]` int64 entries of each cell of the prefix."""
        if self.prefix is not None:
            return self.prefix.counts
        return torch.zeros(self.batch, self.kv_heads, dtype=torch.int64, device=self._device)

    def tail_counts(self) -> Tensor:
        """`[B]` int64 tokens of each row in the tail, without padding."""
        if self.tail is not None:
            return self.tail.counts
        return torch.zeros(self.batch, dtype=torch.int64, device=self._device)

    def held(self, lengths: Sequence[int]) -> list[Held]:
        """What the layer holds, as rectangles without padding: all rows at once where they are alike, else row by row.

        Args:
            lengths: logical length of each row; rows of different length are not alike.
        """
        alike = len(set(lengths)) == 1 and (self.tail is None or self.tail.valid is None)
        groups = [(0, self.batch)] if alike else [(row, row + 1) for row in range(self.batch)]
        held = [self._held_rows(*rows) for rows in groups]
        self._lent.update(held)
        return held

    def cell(self, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys `[n, D]`, values `[n, D]` and positions `[n]` of one cell, prefix then tail."""
        held = self._held_rows(row, row + 1)
        valid = held.valid[0, head]
        return held.keys[0, head][valid], held.values[0, head][valid], held.positions[0, head][valid]

    def cell_positions(self, row: int, head: int) -> Tensor:
        """Positions `[n]` of one cell's entries, as `cell` gives them; keys and values are not touched."""
        cell, pieces = row * self.kv_heads + head, []
        if self.prefix is not None:
            pieces.append(self.prefix.positions[slice(*self.prefix.bounds[cell : cell + 2])])
        if self.tail is not None:
            pieces.append(self.tail.row_positions(row))
        if not pieces:
            raise _nothing_held()
        return _joined([piece.long() for piece in pieces])

    def padded_prefix(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The prefix of rows `first` to `last` as rectangles: keys, values `[B, H_kv, P, D]`, positions, valid.

        No copy where these cells have the same length. Elsewhere missing entries are zeros.
        """
        if self.prefix is None:
            raise _nothing_held()
        return self.prefix.rectangle(first, last)

    def bytes(self) -> Bytes:
        """Bytes of the layer's storages, by purpose."""
        payload = slack = metadata = 0
        if self.prefix is not None:
            payload = self.prefix.payload_bytes
            metadata = self.prefix.nbytes - payload
        if self.tail is not None:
            used = self.tail.tokens * self.kv_heads * self.entry_bytes
            reserved = nbytes(self.tail.keys, self.tail.values)
            payload, slack = payload + used, reserved - used
            metadata += self.tail.nbytes - reserved
        return Bytes(payload, slack, metadata, self.state_bytes)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the keys and values that were copied for rectangles of `held()` which are still in use."""
        if not self._lent:  # as in every decoding step
            return 0
        own = {tensor.untyped_storage().data_ptr() for tensor in self.tensors().values()}
        lent = [tensor for held in self._lent for tensor in (held.keys, held.values)]
        return nbytes(*(tensor for tensor in lent if tensor.untyped_storage().data_ptr() not in own))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the layer owns, by name; what is not there is left out."""
        parts = [part.tensors() for part in (self.prefix, self.tail) if part is not None]
        return {name: tensor for part in parts for name, tensor in part.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor], batch: int, kv_heads: int) -> None:
        """Take over the tensors that `tensors()` of a trimmed layer gave: the tail has no slack.

        Raises:
            CacheStateError: they are not what a layer of this shape owns.
        """
        prefix = Prefix.from_tensors(tensors, batch, kv_heads)
        tail = Tail.from_tensors(tensors, batch, kv_heads)
        known = {name for part in (prefix, tail) if part is not None for name in part.tensors()}
        if known != set(tensors):
            raise CacheStateError(
                expected=f"the tensors of a layer of {batch} rows of {kv_heads} KV heads, which agree with one another",
                received=", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())),
                remedy="the file is damaged or not one of kvkeep's; save the cache again",
            )
        self.reset()
        self.batch, self.kv_heads = batch, kv_heads
        self.prefix, self.tail = prefix, tail
        self._note_peak()

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device | None:
        part = self.prefix or self.tail
        return None if part is None else part.keys.device

    def _held_rows(self, first: int, last: int) -> Held:
        pieces = [] if self.prefix is None else [self.prefix.rectangle(first, last)]
        if self.tail is not None and (self.tail.length or not pieces):
            pieces.append(self.tail.rectangle(first, last))
        if not pieces:
            raise _nothing_held()
        keys, values, positions, valid = (_joined(parts, dim=2) for parts in zip(*pieces, strict=True))
        return Held((first, last), keys, values, positions, valid)

    def _room_for(self, keys: Tensor, values: Tensor, reserve: int) -> Tail:
        """The tail with room for these tokens and nobody else who reads it."""
        columns = self.tail_length + keys.shape[2]
        enough = columns <= self.tail_capacity
        if self.tail is not None and enough and self.tail.is_writable:
            return self.tail
        capacity = self.tail_capacity if enough else max(grown_capacity(self.tail_capacity, columns), reserve)
        tail = Tail.allocate(keys, values, capacity) if self.tail is None else self.tail.resized(capacity)
        self._replace_tail(tail)
        return tail

    def _replace_tail(self, tail: Tail | None) -> None:
        old = 0 if self.tail is None else self.tail.nbytes
        self.tail = tail
        self._note_peak(old)

    def _note_peak(self, beside: int = 0) -> None:
        """There were `beside` bytes at the same time as what is held now."""
        self.high_water = max(self.high_water, beside + self.bytes().total)


def _joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=dim)


def _gathered(rectangles: Sequence[Tensor], places: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """The vectors `[entries, D]` at some places `(row, head, column)` of rectangles `[B, H_kv, N, D]`."""
    ends = list(itertools.accumulate(len(place[0]) for place in places))
    size = rectangles[0].shape[-1]
    gathered = rectangles[0].new_empty(ends[-1], size)
    for rectangle, place, end in zip(rectangles, places, ends, strict=True):
        *steps, step = rectangle.stride()
        part = gathered[end - len(place[0]) : end]
        if rectangle.numel() and step == 1 and not any(s % size for s in steps):
            # Vectors lie one behind the other, in whatever order of rows, heads and columns: copy them as a whole.
            steps = [s // size for s in steps]
            last = sum((n - 1) * s for n, s in zip(rectangle.shape, steps, strict=False))
            rows, heads, columns = place
            index = rows * steps[0] + heads * steps[1] + columns * steps[2]
            torch.index_select(rectangle.as_strided((last + 1, size), (size, 1)), 0, index, out=part)
        else:
            part.copy_(rectangle[place])
    return gathered


def _nothing_held() -> CacheStateError:
    return CacheStateError(
        expected="a layer that holds entries", received="an empty one", remedy="process a text first"
    )
