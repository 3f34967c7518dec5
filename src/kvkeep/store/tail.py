"""The growing part of a layer's store: the tokens that came after the last cut, the same for all heads of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.store.memory import Layout, nbytes

# A full tail doubles while it is short; a longer one grows by so many columns, or by an eighth. Every step reads the
# whole tail anyway, so that copying it now and then costs little, while slack is memory that nobody uses.
_FIRST_CAPACITY, _GROWTH = 16, 128


def grown_capacity(capacity: int, columns: int) -> int:
    """Columns that a tail which has room for `capacity` gets, when it must hold `columns`."""
    return max(columns, capacity + max(min(capacity, _GROWTH), capacity // 8), _FIRST_CAPACITY)


@dataclass(eq=False)
class Tail:
    """Columns of tokens, the first `length` of which are in use; what lies behind is never read.

    Attributes:
        keys: `[B, H_kv, capacity, D]`.
        values: `[B, H_kv, capacity, D]`; zero at padding, since even a weight of zero would let a NaN through.
        positions: `[B, capacity]` int32.
        valid: `[B, capacity]` false at padding; None if there is none.
        length: columns in use.
        tokens: tokens in them, over all rows, without padding.
        shared: a fork has the same tensors, so whoever writes first copies them.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    valid: Tensor | None
    length: int
    tokens: int
    shared: bool = False

    @classmethod
    def adopt(cls, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor | None) -> Tail:
        """Take tokens over; without a copy where a tensor owns its memory."""
        if valid is not None:
            values = values.masked_fill(~valid[:, None, :, None], 0)
        tokens = positions.numel() if valid is None else int(valid.sum())
        positions = positions.to(torch.int32, copy=True)
        valid = None if valid is None else valid.clone()
        return cls(_owned(keys), _owned(values), positions, valid, keys.shape[2], tokens)

    @classmethod
    def allocate(cls, keys: Tensor, values: Tensor, capacity: int) -> Tail:
        """Room for tokens such as these, `[B, H_kv, q, D]`."""
        batch, heads = keys.shape[:2]
        return cls(
            keys=keys.new_empty(batch, heads, capacity, keys.shape[3]),
            values=values.new_empty(batch, heads, capacity, values.shape[3]),
            positions=torch.empty(batch, capacity, dtype=torch.int32, device=keys.device),
            valid=None,
            length=0,
            tokens=0,
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], batch: int, kv_heads: int) -> Tail | None:
        """What `tensors()` of a tail without slack gave; None if they are not there or do not agree."""
        try:
            keys, values, positions = (tensors[name] for name in ("tail_keys", "tail_values", "tail_positions"))
        except KeyError:
            return None
        valid = tensors.get("tail_valid")
        if keys.ndim != 4 or values.ndim != 4:
            return None
        columns = (batch, keys.shape[2])
        shapes = {keys.shape[:3], values.shape[:3], (batch, kv_heads, keys.shape[2])}
        if len(shapes) > 1 or positions.shape != columns or (valid is not None and valid.shape != columns):
            return None
        tail = cls(keys, values, positions, valid, length=keys.shape[2], tokens=0)
        tail.tokens = tail._count()
        return tail

    @property
    def nbytes(self) -> int:
        """Bytes of its storages."""
        return nbytes(*self.tensors().values())

    @cached_property
    def layout(self) -> Layout | None:
        """How keys and values lie; a tail that grows is another tail."""
        return Layout.of(self.keys, self.values)

    @property
    def capacity(self) -> int:
        """Columns that there is room for."""
        return self.keys.shape[2]

    @property
    def is_writable(self) -> bool:
        """Whether `write` may be called; else write to a `resized` copy."""
        # What was made in inference mode cannot be written to outside of it.
        frozen = not torch.is_inference_mode_enabled() and any(t.is_inference() for t in self.tensors().values())
        return not self.shared and not frozen

    @property
    def counts(self) -> Tensor:
        """`[B]` int64 tokens of each row, without padding."""
        if self.valid is not None:
            return self.valid[:, : self.length].sum(-1)
        return torch.full((self.keys.shape[0],), self.length, dtype=torch.int64, device=self.keys.device)

    def write(self, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor | None) -> None:
        """Add tokens `[B, H_kv, q, D]`, for which there must be room."""
        new = slice(self.length, self.length + keys.shape[2])
        self.keys[:, :, new] = keys
        self.values[:, :, new] = values
        self.positions[:, new] = positions
        if valid is not None:
            self.values[:, :, new].masked_fill_(~valid[:, None, :, None], 0)
            if self.valid is None:
                self.valid = torch.ones_like(self.positions, dtype=torch.bool)
        if self.valid is not None:
            self.valid[:, new] = True if valid is None else valid
        self.length = new.stop
        self.tokens += positions.numel() if valid is None else int(valid.sum())

    def rewind(self, length: int) -> None:
        """Forget the columns from `length` on."""
        self.length = length
        self.tokens = self._count()

    def resized(self, capacity: int) -> Tail:
        """A copy with room for `capacity` columns, at least those in use."""
        copy = Tail.allocate(self.keys, self.values, capacity)
        if self.valid is not None:
            copy.valid = torch.ones_like(copy.positions, dtype=torch.bool)
        used, copies = slice(self.length), copy.tensors()
        for name, tensor in self.tensors().items():
            if tensor.ndim == 4:
                copies[name][:, :, used] = tensor[:, :, used]
            else:
                copies[name][:, used] = tensor[:, used]
        copy.length, copy.tokens = self.length, self.tokens
        return copy

    def select(self, rows: Tensor) -> Tail:
        """A tail whose row `i` is this one's row `rows[i]`."""
        rows = rows.to(self.keys.device)
        valid = None if self.valid is None else self.valid[rows]
        picked = Tail(self.keys[rows], self.values[rows], self.positions[rows], valid, self.length, 0)
        picked.tokens = picked._count()
        return picked

    def share(self) -> Tail:
        """The same tokens for a fork; the first of the two to write makes a copy."""
        self.shared = True
        return replace(self)

    def row_positions(self, row: int) -> Tensor:
        """Positions `[n]` of a row's tokens, without padding."""
        return self.positions[row, self._columns(row, row + 1)]

    def _columns(self, first: int, last: int) -> slice | Tensor:
        """Columns that are padding in none of the rows `first` to `last`."""
        if self.valid is None:
            return slice(0, self.length)
        real = self.valid[first:last, : self.length].all(0)
        count = int(real.sum())
        contiguous = bool(real[self.length - count :].all())
        return slice(self.length - count, self.length) if contiguous else real.nonzero()[:, 0]

    def rectangle(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows `first` to `last`: keys, values `[B, H_kv, T, D]`, positions, valid `[B, H_kv, T]`.

        Columns that are padding in one of these rows are left out, so take rows with padding one by one. Views of keys
        and values where padding is on the left only.
        """
        columns = self._columns(first, last)
        positions = self.positions[first:last, columns].long()
        positions = positions[:, None].expand(-1, self.keys.shape[1], -1)
        valid = torch.ones_like(positions, dtype=torch.bool)
        return self.keys[first:last, :, columns], self.values[first:last, :, columns], positions, valid

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, slack included; what is not there is left out."""
        tensors = {"tail_keys": self.keys, "tail_values": self.values, "tail_positions": self.positions}
        return tensors if self.valid is None else tensors | {"tail_valid": self.valid}

    def _count(self) -> int:
        return self.keys.shape[0] * self.length if self.valid is None else int(self.counts.sum())


def _owned(tensor: Tensor) -> Tensor:
    """The tensor if its storage holds nothing else, else a copy (a fused projection's V is a view of Q, K, V)."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()
