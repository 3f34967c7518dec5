"""The store of one layer under a cap that holds at every step: buffers of fixed size, written to in place.

    sinks    the first s tokens, each at its position
    window   the w newest tokens after them, as a ring: the token at position t stands at s + (t - s) % w
    slots    k entries in any order, with their positions and priorities

All cells of a row hold equally many entries, and what they hold is always the front of the buffers: a row that has
seen n tokens fills the first min(n, s + w + k) columns. Their order in memory does not matter to attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.store.memory import nbytes
from kvkeep.store.ragged import Bytes, RaggedLayer
from kvkeep.store.slot_buffers import Leaving, SlotBuffers, move, place, storages
from kvkeep.store.tail import Tail


class SlotLayer:
    """Keys and values of one layer, at most `sinks + window + slots` entries a cell. Owns its tensors.

    Args:
        sinks: s.
        window: w, at least 1.
        slots: k, at least 1.
        watched: whether entries in sinks and window have a priority, too.

    Attributes:
        batch: rows, 0 before the first token.
        kv_heads: KV heads.
        lengths: tokens that each row has seen, without padding.
        state: a policy's memory, `[B, ...]` by name; whoever changes it puts new tensors here and never writes to them.
        high_water: most bytes held at once since the ledger last took note; the ledger sets it back.
    """

    tail_length = 0  # what can be taken back without a mark: nothing, since steps overwrite
    lent_bytes = 0

    def __init__(self, sinks: int, window: int, slots: int, *, watched: bool = False) -> None:
        self.sinks, self.window, self.slots, self.watched = sinks, window, slots, watched
        self.batch = self.kv_heads = self.high_water = 0
        self.lengths: list[int] = []
        self.state: dict[str, Tensor] = {}
        self._buffers: SlotBuffers | None = None
        self._marks: weakref.WeakSet[SlotLayer] = weakref.WeakSet()
        self._view: RaggedLayer | None = None

    @property
    def capacity(self) -> int:
        """Entries that a cell has room for."""
        return self.sinks + self.window + self.slots

    def refit(self, sinks: int, window: int, slots: int) -> None:
        """Take another geometry, while nothing is held.

        Raises:
            CacheStateError: something is.
        """
        if self._buffers is not None:
            raise CacheStateError(expected="an empty layer", received="one with rows", remedy="reset it first")
        self.sinks, self.window, self.slots = sinks, window, slots

    def reset(self) -> None:
        """Hold nothing, as after construction."""
        self.batch = self.kv_heads = self.high_water = 0
        self.lengths, self.state = [], {}
        self._marks.clear()
        self._take_over(None)

    # -- writing ----------------------------------------------------------------------------------------------------

    def open(self, keys: Tensor, values: Tensor) -> None:
        """Make room for tokens such as these, `[B, H_kv, q, D]`, if there is none yet.

        Raises:
            CacheStateError: the layer holds another number of rows or heads.
        """
        batch, kv_heads = keys.shape[:2]
        if self.batch and (batch, kv_heads) != (self.batch, self.kv_heads):
            raise CacheStateError(
                expected=f"{self.batch} rows of {self.kv_heads} KV heads, as the layer holds",
                received=f"{batch} rows of {kv_heads}",
                remedy="reorder the rows of the cache first, or use a fresh one",
            )
        if self._buffers is not None:
            return
        self.batch, self.kv_heads, self.lengths = batch, kv_heads, [0] * batch
        shape = (batch, kv_heads, self.capacity)
        # Watched ones are read as a whole, also where a row has fewer entries than another.
        make, rated = (torch.zeros, self.capacity) if self.watched else (torch.empty, self.slots)
        self._take_over(
            SlotBuffers(
                keys=keys.new_empty(*shape, keys.shape[3]),
                values=values.new_zeros(*shape, values.shape[3]),
                positions=torch.empty(batch, kv_heads, self.slots, dtype=torch.int32, device=keys.device),
                priorities=make(batch, kv_heads, rated, dtype=torch.float32, device=keys.device),
            )
        )
        self.note_peak()

    def leaving(self, rows: slice, keys: Tensor, values: Tensor) -> Leaving:
        """The tokens that leave the window when new ones come; nothing is changed.

        Args:
            rows: of equal length; or of any length beyond sinks and window, for a single token.
            keys: `[R, H_kv, n, D]` of the new tokens.
            values: `[R, H_kv, n, D]`.
        """
        buffers, count, lengths = self._held(), keys.shape[2], self.lengths[rows]
        pairs = [(buffers.keys[rows], keys), (buffers.values[rows], values)]
        if len(set(lengths)) > 1:
            at = torch.tensor(lengths, device=keys.device)
            columns, some = self.column_of(at - self.window), torch.arange(len(lengths), device=keys.device)
            old = [held[some, :, columns].unsqueeze(2) for held, _ in pairs]
            watched = buffers.priorities[rows][some, :, columns].unsqueeze(2) if self.watched else None
            return Leaving(old[0], old[1], (at - self.window)[:, None], watched)
        first = max(self.sinks, lengths[0] - self.window)
        end = max(first, lengths[0] + count - self.window)
        positions = torch.arange(first, end, device=keys.device)
        old_positions = positions[: max(0, lengths[0] - first)]  # the others are new themselves
        columns = self.column_of(old_positions)
        new = slice(max(first, lengths[0]) - lengths[0], max(0, end - lengths[0]))
        found = [torch.cat([held[:, :, columns], fresh[:, :, new]], dim=2) for held, fresh in pairs]
        watched = None
        if self.watched:
            old_ones = buffers.priorities[rows][:, :, columns]
            watched = torch.cat([old_ones, old_ones.new_zeros(*old_ones.shape[:2], len(positions) - len(columns))], 2)
        return Leaving(found[0], found[1], positions.expand(len(lengths), -1), watched)

    def advance(
        self, rows: slice, keys: Tensor, values: Tensor, leaving: Leaving, taken: Tensor, priorities: Tensor
    ) -> None:
        """Take new tokens in, and move those that leave the window.

        Args:
            rows: as for `leaving`.
            keys: `[R, H_kv, n, D]` of the new tokens.
            values: `[R, H_kv, n, D]`.
            leaving: what `leaving` gave for them.
            taken: `[R, H_kv, m]` the slot that each of them takes, one after the other; -1 for those that are dropped.
                Free slots are taken in order.
            priorities: `[R, H_kv, m]` float32 that they have there.
        """
        buffers = self._own()
        moved = {"keys": leaving.keys, "values": leaving.values, "priorities": priorities}
        moved["positions"] = leaving.positions[:, None].expand_as(taken).to(torch.int32)
        for name, tensor in buffers.slots(self.sinks + self.window).items():
            move(tensor[rows], moved[name].to(tensor.dtype), taken)
        lengths, count = self.lengths[rows], keys.shape[2]
        if len(set(lengths)) > 1:
            columns = self.column_of(torch.tensor(lengths, device=keys.device))
            some = torch.arange(len(lengths), device=keys.device)
            buffers.keys[rows][some, :, columns] = keys[:, :, 0]
            buffers.values[rows][some, :, columns] = values[:, :, 0]
            if self.watched:
                buffers.priorities[rows][some, :, columns] = 0
        else:
            first, end = lengths[0], lengths[0] + count
            self._put(rows, slice(first, min(end, self.sinks)), keys, values, 0)
            newest = min(end, max(first, self.sinks, end - self.window))
            self._put(rows, self.column_of(torch.arange(newest, end, device=keys.device)), keys, values, newest - first)
        self.lengths[rows] = [length + count for length in lengths]

    def set_priorities(self, rows: slice, priorities: Tensor) -> None:
        """Give the first entries of some rows other priorities, `[R, H_kv, N]` float32; only where they are watched."""
        self._own().priorities[rows][:, :, : priorities.shape[2]] = priorities

    def note_peak(self, beside: int = 0) -> None:
        """There were `beside` bytes at the same time as what is held now."""
        self.high_water = max(self.high_water, beside + self.bytes().total)

    # -- going back, branching, rows --------------------------------------------------------------------------------

    def fork(self) -> SlotLayer:
        """An independent layer with the same content, shared until one of the two writes."""
        twin = SlotLayer(self.sinks, self.window, self.slots, watched=self.watched)
        twin.become(self)
        return twin

    def snapshot(self) -> SlotLayer:
        """The present content, for `become`. While it is kept, what it does not share counts as held."""
        twin = self.fork()
        self._marks.add(twin)
        return twin

    def become(self, other: SlotLayer) -> None:
        """Hold what another layer of the same geometry holds."""
        self.batch, self.kv_heads, self.lengths = other.batch, other.kv_heads, list(other.lengths)
        self.state = dict(other.state)
        self._take_over(other._buffers)

    def reorder(self, rows: Tensor) -> None:
        """Make row `i` what row `rows[i]` was; rows may repeat or be left out."""
        if self._buffers is None:
            return
        old = self.bytes().total
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        self.batch = len(self.lengths)
        self.state = {name: tensor[rows.to(tensor.device)] for name, tensor in self.state.items()}
        self._take_over(self._buffers.selected(rows))
        self.note_peak(old)

    def stack(self, layers: Sequence[SlotLayer]) -> None:
        """Hold the rows of several layers of this geometry, one after the other; they are copied."""
        parts = [layer._held().tensors() for layer in layers]
        self.batch, self.kv_heads = sum(layer.batch for layer in layers), layers[0].kv_heads
        self.lengths = [length for layer in layers for length in layer.lengths]
        self.state = {name: torch.cat([layer.state[name] for layer in layers]) for name in layers[0].state}
        self._take_over(SlotBuffers.of({name: torch.cat([part[name] for part in parts]) for name in parts[0]}))
        self.note_peak()

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def entry_bytes(self) -> int:
        """Bytes of one key and one value vector; 0 before the first token."""
        if self._buffers is None:
            return 0
        keys, values = self._buffers.keys, self._buffers.values
        return (keys.shape[-1] + values.shape[-1]) * keys.element_size()

    def filled(self, rows: slice = slice(None)) -> list[int]:
        """Entries that a cell of each row holds: the first so many columns."""
        return [self._filled_at(length) for length in self.lengths[rows]]

    def filled_slots(self, rows: slice = slice(None)) -> list[int]:
        """Slots of each row that are taken: the first so many."""
        return [self._slots_at(length) for length in self.lengths[rows]]

    def column_of(self, positions: Tensor) -> Tensor:
        """Columns of tokens that are in the window, by position."""
        return self.sinks + (positions - self.sinks) % self.window

    def entries(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Keys and values `[R, H_kv, N, D]` of the fullest of some rows, as views; the others have zeros as values."""
        buffers, count = self._held(), max(self.filled(rows))
        return buffers.keys[rows, :, :count], buffers.values[rows, :, :count]

    def positions(self, rows: slice) -> Tensor:
        """`[R, H_kv, N]` int64 of the same; meaningless where a row has fewer."""
        count = max(self.filled(rows))
        lengths = torch.tensor(self.lengths[rows], device=self._held().keys.device)[:, None]
        sinks = torch.arange(self.sinks, device=lengths.device).expand(len(lengths), -1)
        ring = torch.arange(self.window, device=lengths.device)
        newest = lengths - 1
        window = newest - (newest - self.sinks - ring) % self.window
        front = torch.cat([sinks, window], dim=1)[:, None].expand(-1, self.kv_heads, -1)
        return torch.cat([front, self._held().positions[rows].long()], dim=2)[:, :, :count]

    def priorities(self, rows: slice) -> Tensor:
        """`[R, H_kv, N]` float32 of the same; only where they are watched."""
        return self._held().priorities[rows, :, : max(self.filled(rows))]

    def contest(self, rows: slice, slots: int) -> tuple[Tensor, Tensor]:
        """Priorities and positions `[R, H_kv, slots]` of the first slots of some rows, as views."""
        parts = self._held().slots(self.sinks + self.window)
        return parts["priorities"][rows, :, :slots], parts["positions"][rows, :, :slots]

    def view(self, rows: slice = slice(None)) -> RaggedLayer:
        """The entries of some rows as the tail of a layer, which the newest token sees all of; nothing is copied."""
        buffers, filled = self._held(), self.filled(rows)
        whole = len(filled) == self.batch
        layer = self._view if whole else None
        if layer is None or layer.tail is None:
            layer = RaggedLayer()
            layer.batch, layer.kv_heads = len(filled), self.kv_heads
            nowhere = buffers.positions[rows, 0, :1].expand(-1, self.capacity)  # attention does not ask for them
            layer.tail = Tail(buffers.keys[rows], buffers.values[rows], nowhere, None, length=0, tokens=0)
            self._view = layer if whole else self._view
        layer.tail.length, layer.tail.tokens = max(filled), sum(filled)
        layer.tail.valid = None
        if len(set(filled)) > 1:
            columns = torch.arange(self.capacity, device=buffers.keys.device)
            layer.tail.valid = columns < torch.tensor(filled, device=columns.device)[:, None]
        return layer

    def cell_counts(self) -> Tensor:
        """`[B, H_kv]` int64 entries of each cell."""
        return torch.tensor(self.filled(), dtype=torch.int64)[:, None].expand(self.batch, self.kv_heads)

    def tail_counts(self) -> Tensor:
        """`[B]` int64 zeros: no entry waits for a cut."""
        return torch.zeros(self.batch, dtype=torch.int64)

    def cell(self, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys `[n, D]`, values `[n, D]` and positions `[n]` of one cell, in ascending order of position."""
        rows = slice(row, row + 1)
        keys, values = self.entries(rows)
        positions, order = self.positions(rows)[0, head].sort()
        return keys[0, head, order], values[0, head, order], positions

    def cell_positions(self, row: int, head: int) -> Tensor:
        """Positions `[n]` of one cell's entries, as `cell` gives them; keys and values are not touched."""
        return self.positions(slice(row, row + 1))[0, head].sort().values

    def bytes(self) -> Bytes:
        """Bytes of the layer's storages, by purpose; state counts what marks keep alive, too."""
        if self._buffers is None:
            return Bytes(state=storages(self._kept_by_marks()))
        reserved = nbytes(self._buffers.keys, self._buffers.values)
        payload = sum(self.filled()) * self.kv_heads * self.entry_bytes
        metadata = nbytes(self._buffers.positions, self._buffers.priorities)
        own = {place(tensor) for tensor in self._buffers.tensors().values()}
        beside = [*self.state.values(), *self._kept_by_marks()]
        return Bytes(payload, reserved - payload, metadata, storages(t for t in beside if place(t) not in own))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the layer owns, by name."""
        buffers = {} if self._buffers is None else self._buffers.tensors()
        return buffers | {f"state.{name}": tensor for name, tensor in self.state.items()}

    # -- files ------------------------------------------------------------------------------------------------------

    def export(self) -> dict[str, Tensor]:
        """What the layer holds, without slack, and `lengths [B]`; for `load_tensors`."""
        if self._buffers is None:
            return {}
        slots, count = max(self.filled_slots()), max(self.filled())
        cut = {"keys": count, "values": count, "positions": slots, "priorities": count if self.watched else slots}
        buffers = {name: tensor[:, :, : cut[name]] for name, tensor in self._buffers.tensors().items()}
        state = {f"state.{name}": tensor for name, tensor in self.state.items()}
        return buffers | state | {"lengths": torch.tensor(self.lengths, dtype=torch.int64)}

    def load_tensors(self, tensors: Mapping[str, Tensor], batch: int, kv_heads: int) -> None:
        """Take over what `export` gave.

        Raises:
            CacheStateError: it is not what a layer of this shape and geometry exports.
        """
        lengths = tensors.get("lengths", torch.zeros(0)).tolist()
        slots, count = (max(map(at, lengths), default=0) for at in (self._slots_at, self._filled_at))
        wanted = {"keys": count, "values": count, "positions": slots, "priorities": count if self.watched else slots}
        shapes = {name: (batch, kv_heads, columns) for name, columns in wanted.items()}
        agree = len(lengths) == batch
        agree = agree and all(name in tensors and tensors[name].shape[:3] == shape for name, shape in shapes.items())
        state = {name.removeprefix("state."): x for name, x in tensors.items() if name.startswith("state.")}
        agree = agree and all(tensor.shape[:1] == (batch,) for tensor in state.values())
        if not agree or not all(tensors[name].ndim == 4 for name in ("keys", "values")):
            raise CacheStateError(
                expected=f"the tensors of a layer of {batch} rows of {kv_heads} KV heads, {self.sinks} sinks, a window "
                f"of {self.window} and {self.slots} slots, which agree with one another",
                received=", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())),
                remedy="the file is damaged, or the policy is another one than it was saved with; save the cache again",
            )
        self.reset()
        self.open(tensors["keys"], tensors["values"])
        for name, tensor in self._held().tensors().items():
            tensor[:, :, : wanted[name]] = tensors[name]
        self.lengths, self.state = [int(length) for length in lengths], state
        self.note_peak()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _filled_at(self, length: int) -> int:
        return min(int(length), self.capacity)

    def _slots_at(self, length: int) -> int:
        return max(0, self._filled_at(length) - self.sinks - self.window)

    def _put(self, rows: slice, columns: slice | Tensor, keys: Tensor, values: Tensor, first: int) -> None:
        """Write the new tokens from `first` on into as many columns."""
        buffers = self._held()
        count = max(0, columns.stop - columns.start) if isinstance(columns, slice) else len(columns)
        if not count:
            return
        buffers.keys[rows][:, :, columns] = keys[:, :, first : first + count]
        buffers.values[rows][:, :, columns] = values[:, :, first : first + count]
        if self.watched:
            buffers.priorities[rows][:, :, columns] = 0

    def _held(self) -> SlotBuffers:
        if self._buffers is None:
            raise CacheStateError(
                expected="a layer that holds entries", received="an empty one", remedy="process a text first"
            )
        return self._buffers

    def _own(self) -> SlotBuffers:
        """The buffers, with nobody else who reads them."""
        buffers = self._held()
        # What was made in inference mode cannot be written to outside of it.
        frozen = not torch.is_inference_mode_enabled() and buffers.keys.is_inference()
        if len(buffers.owners) > 1 or frozen:
            old = self.bytes().total
            self._take_over(buffers.cloned())
            self.note_peak(old if frozen else 0)  # a shared one stays, and is counted where it is kept
        return self._held()

    def _take_over(self, buffers: SlotBuffers | None) -> None:
        if self._buffers is not None:
            self._buffers.owners.discard(self)
        self._buffers, self._view = buffers, None
        if buffers is not None:
            buffers.owners.add(self)

    def _kept_by_marks(self) -> list[Tensor]:
        return [tensor for mark in self._marks for tensor in mark.tensors().values()]
