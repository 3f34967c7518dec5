"""The store of one layer: an immutable ragged prefix and a tail that grows.

    prefix   keys, values [entries, D]: the kept entries of all cells, one cell after the other (row 0 head 0, row 0
             head 1, ...), each in ascending order of position; `offsets [cells + 1]` tells where a cell begins,
             `positions [entries]` where an entry stood in the text. Padding is never stored.
    tail     keys, values [B, H_kv, capacity, D]: what came after the last cut, the same tokens for all heads of a row.

A cut gathers what stays of both into a new prefix. A prefix is never written to, so forks share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_CAPACITY = 16


@dataclass(frozen=True)
class Bytes:
    """Bytes that a layer holds, by purpose.

    Attributes:
        payload: keys and values of held entries.
        slack: reserved and unused, or used for padding.
        metadata: offsets and positions.
    """

    payload: int = 0
    slack: int = 0
    metadata: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.payload + self.slack + self.metadata


@dataclass(frozen=True)
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
        keys: prefix keys `[entries, D]`; values likewise.
        values: prefix values `[entries, D]`.
        offsets: `[cells + 1]` int32.
        positions: `[entries]` int32.
        tail_keys: `[B, H_kv, capacity, D]`; None when there is no tail.
        tail_values: `[B, H_kv, capacity, D]`.
        tail_positions: `[B, capacity]` int32.
        tail_valid: `[B, capacity]`, false at padding; None when the tail has none.
        tail_length: columns of the tail that are in use.
        high_water: most bytes held at once since `record` was last called on the ledger.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Hold nothing, as after construction."""
        self.batch = 0
        self.kv_heads = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.offsets: Tensor | None = None
        self.positions: Tensor | None = None
        self._drop_tail()
        self.high_water = 0
        # Read by every decoding step; kept here so that no step waits for a device.
        self.longest_cell = 0
        self.is_uniform = True

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
        """
        keys, values = keys.detach(), values.detach()
        batch, kv_heads, count, _ = keys.shape
        self.batch, self.kv_heads = batch, kv_heads
        if self.tail_keys is None and self.keys is None and reserve <= count:
            self.tail_keys, self.tail_values = _owned(keys), _owned(values)
            self.tail_positions = positions.to(torch.int32).clone()
            self.tail_valid = None if valid is None else valid.clone()
            self.tail_length = count
            self._touch(self.bytes().total)
            return
        start, end = self.tail_length, self.tail_length + count
        self._make_room(keys, values, end, reserve)
        tail = self._tail()
        tail.keys[:, :, start:end] = keys
        tail.values[:, :, start:end] = values
        tail.positions[:, start:end] = positions
        if valid is not None and self.tail_valid is None:
            self.tail_valid = torch.ones(batch, self.tail_capacity, dtype=torch.bool, device=keys.device)
        if self.tail_valid is not None:
            self.tail_valid[:, start:end] = True if valid is None else valid
        self.tail_length = end
        self._touch(self.bytes().total)

    def cut(self, held: Sequence[Held], masks: Sequence[Tensor]) -> None:
        """Keep only what the masks name; everything else is gone when this returns.

        Args:
            held: what `held()` gave, all rows of it, in order.
            masks: for each of them `[B, H_kv, N]`, true where the entry stays.
        """
        before = self.bytes().total
        keys = _joined([h.keys[m] for h, m in zip(held, masks, strict=True)])
        values = _joined([h.values[m] for h, m in zip(held, masks, strict=True)])
        positions = _joined([h.positions[m].to(torch.int32) for h, m in zip(held, masks, strict=True)])
        counts = torch.cat([m.sum(-1).flatten() for m in masks])
        copied = sum(_nbytes(h.keys, h.values) for h in held) if self.keys is not None else 0
        self._set_prefix(keys, values, positions, counts)
        self._drop_tail()
        self._touch(before + copied + self.bytes().total)

    def rewind(self, tail_length: int) -> None:
        """Forget the columns of the tail from `tail_length` on."""
        self.tail_length = tail_length

    def trim(self) -> None:
        """Give back the slack of the tail."""
        if self.tail_keys is None or self.tail_capacity == self.tail_length:
            return
        tail, used = self._tail(), self.tail_length
        if used == 0:
            self._drop_tail()
            return
        self.tail_keys, self.tail_values = tail.keys[:, :, :used].clone(), tail.values[:, :, :used].clone()
        self.tail_positions = tail.positions[:, :used].clone()
        self.tail_valid = None if self.tail_valid is None else self.tail_valid[:, :used].clone()
        self._tail_shared = False

    def reorder(self, rows: Tensor) -> None:
        """Make row `i` what row `rows[i]` was; rows may repeat or be left out."""
        if self.batch == 0:
            return
        before = self.bytes().total
        if self.keys is not None:
            prefix = self._prefix()
            counts = prefix.offsets.diff().view(self.batch, self.kv_heads)
            starts = prefix.offsets[:-1].view(self.batch, self.kv_heads)
            picked = rows.to(prefix.keys.device)
            new_counts = counts[picked].flatten()
            ends = new_counts.cumsum(0)
            shift = starts[picked].flatten() - (ends - new_counts)
            index = torch.arange(int(ends[-1]), device=shift.device) + shift.repeat_interleave(new_counts.long())
            self._set_prefix(prefix.keys[index], prefix.values[index], prefix.positions[index], new_counts)
        if self.tail_keys is not None:
            tail = self._tail()
            picked = rows.to(tail.keys.device)
            self.tail_keys, self.tail_values = tail.keys[picked], tail.values[picked]
            self.tail_positions = tail.positions[picked]
            self.tail_valid = None if self.tail_valid is None else self.tail_valid[picked]
            self._tail_shared = False
        self.batch = len(rows)
        self._touch(before + self.bytes().total)

    def fork(self) -> RaggedLayer:
        """An independent layer with the same content. The prefix is shared; the tail is copied at the next write."""
        twin = RaggedLayer()
        twin.__dict__.update(self.__dict__)
        self._tail_shared = twin._tail_shared = self.tail_keys is not None
        twin.high_water = 0
        return twin

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def entry_bytes(self) -> int:
        """Bytes of one key and one value vector; 0 before the first append."""
        keys = self.keys if self.keys is not None else self.tail_keys
        values = self.values if self.values is not None else self.tail_values
        if keys is None or values is None:
            return 0
        return (keys.shape[-1] + values.shape[-1]) * keys.element_size()

    @property
    def tail_capacity(self) -> int:
        """Columns that the tail has room for."""
        return 0 if self.tail_keys is None else self.tail_keys.shape[2]

    def cell_counts(self) -> Tensor:
        """`[B, H_kv]` int64 entries of each cell, prefix and tail; padding does not count."""
        return self.prefix_counts() + self.tail_counts()[:, None]

    def prefix_counts(self) -> Tensor:
        """`[B, H_kv]` int64 entries of each cell of the prefix."""
        if self.offsets is None:
            return torch.zeros(self.batch, self.kv_heads, dtype=torch.int64)
        return self.offsets.diff().view(self.batch, self.kv_heads).long()

    def tail_counts(self) -> Tensor:
        """`[B]` int64 tokens of each row in the tail, without padding."""
        if self.tail_valid is not None:
            return self.tail_valid[:, : self.tail_length].sum(-1)
        device = self.offsets.device if self.offsets is not None else None
        return torch.full((self.batch,), self.tail_length, dtype=torch.int64, device=device)

    def held(self, lengths: Sequence[int]) -> list[Held]:
        """What the layer holds, as rectangles without padding: all rows at once where they are alike, else row by row.

        Args:
            lengths: logical length of each row; rows of different length are not alike.
        """
        alike = len(set(lengths)) == 1 and self.tail_valid is None
        groups = [(0, self.batch)] if alike else [(row, row + 1) for row in range(self.batch)]
        return [self._held_rows(*rows) for rows in groups]

    def cell(self, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys `[n, D]`, values `[n, D]` and positions `[n]` of one cell, prefix then tail."""
        held = self._held_rows(row, row + 1)
        valid = held.valid[0, head]
        return held.keys[0, head][valid], held.values[0, head][valid], held.positions[0, head][valid]

    def padded_prefix(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The prefix of rows `first` to `last` as rectangles: keys, values `[B, H_kv, P, D]`, positions, valid.

        No copy where all cells of the layer have the same length. Elsewhere missing entries hold another cell's.
        """
        prefix = self._prefix()
        cells = slice(first * self.kv_heads, last * self.kv_heads)
        shape = (last - first, self.kv_heads)
        if self.is_uniform:
            size = self.longest_cell
            entries = slice(cells.start * size, cells.stop * size)
            keys, values = prefix.keys[entries], prefix.values[entries]
            positions = prefix.positions[entries].view(*shape, size).long()
            return (
                keys.view(*shape, size, keys.shape[-1]),
                values.view(*shape, size, values.shape[-1]),
                positions,
                torch.ones_like(positions, dtype=torch.bool),
            )
        offsets = prefix.offsets[cells.start : cells.stop + 1].long()
        counts = offsets.diff()
        columns = torch.arange(int(counts.max()), device=counts.device)
        valid = columns < counts[:, None]  # [cells, P]
        # A short cell's missing entries repeat an entry of the next one: finite, and never looked at.
        index = (offsets[:-1, None] + columns).clamp(max=prefix.keys.shape[0] - 1).flatten()

        def spread(flat: Tensor) -> Tensor:
            return flat[index].view(*shape, len(columns), *flat.shape[1:])

        return spread(prefix.keys), spread(prefix.values), spread(prefix.positions).long(), valid.view(*shape, -1)

    def bytes(self) -> Bytes:
        """Bytes of the layer's storages, by purpose."""
        prefix = _nbytes(self.keys, self.values)
        tail = _nbytes(self.tail_keys, self.tail_values)
        used = 0
        if self.tail_keys is not None and self.tail_values is not None:
            entry = (self.tail_keys.shape[-1] + self.tail_values.shape[-1]) * self.tail_keys.element_size()
            columns = self.batch * self.tail_length
            if self.tail_valid is not None:
                columns = int(self.tail_valid[:, : self.tail_length].sum())
            used = columns * self.kv_heads * entry
        metadata = _nbytes(self.offsets, self.positions, self.tail_positions, self.tail_valid)
        return Bytes(payload=prefix + used, slack=tail - used, metadata=metadata)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the layer owns, by name; what is not there is left out."""
        names = ("keys", "values", "offsets", "positions", "tail_keys", "tail_values", "tail_positions", "tail_valid")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def load_tensors(self, tensors: dict[str, Tensor], batch: int, kv_heads: int) -> None:
        """Take over the tensors that `tensors()` of another layer gave; the tail has no slack."""
        self.reset()
        self.batch, self.kv_heads = batch, kv_heads
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        self.tail_length = self.tail_capacity
        if self.offsets is not None:
            self._note_counts(self.offsets.diff())
        self._touch(self.bytes().total)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _held_rows(self, first: int, last: int) -> Held:
        pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        if self.keys is not None:
            pieces.append(self.padded_prefix(first, last))
        if self.tail_keys is not None and self.tail_length:
            pieces.append(self._tail_rows(first, last))
        if len(pieces) == 1:
            keys, values, positions, valid = pieces[0]
        else:
            keys, values, positions, valid = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
        return Held((first, last), keys, values, positions, valid)

    def _tail_rows(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tail = self._tail()
        keys = tail.keys[first:last, :, : self.tail_length]
        values = tail.values[first:last, :, : self.tail_length]
        positions = tail.positions[first:last, : self.tail_length].long()
        if self.tail_valid is not None:
            columns = self.tail_valid[first:last, : self.tail_length].all(0)
            if bool(columns[int(columns.int().argmax()) :].all()):  # padding on the left only: a slice, not a copy
                used = slice(int(columns.int().argmax()) if bool(columns.any()) else self.tail_length, None)
                keys, values, positions = keys[:, :, used], values[:, :, used], positions[:, used]
            else:
                keys, values, positions = keys[:, :, columns], values[:, :, columns], positions[:, columns]
        positions = positions[:, None].expand(-1, self.kv_heads, -1)
        return keys, values, positions, torch.ones_like(positions, dtype=torch.bool)

    def _make_room(self, keys: Tensor, values: Tensor, columns: int, reserve: int) -> None:
        # A buffer made in inference mode cannot be written to outside of it.
        frozen = self.tail_keys is not None and self.tail_keys.is_inference() and not torch.is_inference_mode_enabled()
        if columns <= self.tail_capacity and not self._tail_shared and not frozen:
            return
        capacity = self.tail_capacity
        if columns > capacity:
            capacity = max(columns, reserve, 2 * capacity, _FIRST_CAPACITY if self.keys is not None else 0)
        before = self.bytes().total
        old = self.tail_keys, self.tail_values, self.tail_positions, self.tail_valid
        batch, heads, used = self.batch, self.kv_heads, self.tail_length
        self.tail_keys = keys.new_empty(batch, heads, capacity, keys.shape[-1])
        self.tail_values = values.new_empty(batch, heads, capacity, values.shape[-1])
        self.tail_positions = torch.empty(batch, capacity, dtype=torch.int32, device=keys.device)
        if old[0] is not None and old[1] is not None and old[2] is not None:
            self.tail_keys[:, :, :used] = old[0][:, :, :used]
            self.tail_values[:, :, :used] = old[1][:, :, :used]
            self.tail_positions[:, :used] = old[2][:, :used]
        if old[3] is not None:
            self.tail_valid = torch.ones(batch, capacity, dtype=torch.bool, device=keys.device)
            self.tail_valid[:, :used] = old[3][:, :used]
        self._tail_shared = False
        self._touch(before + self.bytes().total)

    def _set_prefix(self, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor) -> None:
        self.keys, self.values, self.positions = keys, values, positions
        offsets = torch.zeros(len(counts) + 1, dtype=torch.int32, device=keys.device)
        offsets[1:] = counts.cumsum(0)
        self.offsets = offsets
        self._note_counts(counts)

    def _note_counts(self, counts: Tensor) -> None:
        self.longest_cell = int(counts.max())
        self.is_uniform = bool((counts == self.longest_cell).all())

    def _drop_tail(self) -> None:
        self.tail_keys: Tensor | None = None
        self.tail_values: Tensor | None = None
        self.tail_positions: Tensor | None = None
        self.tail_valid: Tensor | None = None
        self.tail_length = 0
        self._tail_shared = False

    def _prefix(self) -> _Prefix:
        if self.keys is None or self.values is None or self.offsets is None or self.positions is None:
            raise RuntimeError("this layer has no prefix")
        return _Prefix(self.keys, self.values, self.offsets, self.positions)

    def _tail(self) -> _Tail:
        if self.tail_keys is None or self.tail_values is None or self.tail_positions is None:
            raise RuntimeError("this layer has no tail")
        return _Tail(self.tail_keys, self.tail_values, self.tail_positions)

    def _touch(self, held: int) -> None:
        self.high_water = max(self.high_water, held)


@dataclass(frozen=True)
class _Prefix:
    keys: Tensor
    values: Tensor
    offsets: Tensor
    positions: Tensor


@dataclass(frozen=True)
class _Tail:
    keys: Tensor
    values: Tensor
    positions: Tensor


def _owned(tensor: Tensor) -> Tensor:
    """The tensor itself if its storage holds nothing else, else a copy (a fused projection's V is a view of Q, K, V)."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
