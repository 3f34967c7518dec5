"""The layers of a KeepCache under an online policy: a cap at every step, also while a text is read or written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.attention import attend, attend_prompt
from kvkeep.attention.masked import Interval, attend_intervals, attend_watched
from kvkeep.hf.caps import Cap
from kvkeep.hf.evictable import EvictableLayer
from kvkeep.hf.progress import Progress, running
from kvkeep.hf.support import rotary_of
from kvkeep.hf.watching import FullCells, read_watched
from kvkeep.observation import Rotary
from kvkeep.policies.online import (
    Arrivals,
    Cells,
    StaticPolicy,
    WatchingPolicy,
    check_priorities,
)
from kvkeep.policies.running import departures, first_takers, take_slot, take_slots
from kvkeep.store import SlotLayer
from kvkeep.store.slot_buffers import Leaving

# Tokens of a chunk that are read at once. Each sees what was held before them and one another: more of them waste
# scores that are hidden, fewer waste calls.
_BLOCK = 256
_WATCHED = 128  # of full cells under a policy that watches: the weights of all of them are kept, hidden ones as zeros


@dataclass(frozen=True, eq=False)
class _Chunk:
    """New tokens of some rows.

    Attributes:
        rows: of equal length; or of any length beyond sinks and window, for a single token.
        query: `[R, H, n, D]`.
        key: `[R, H_kv, n, D]`.
        value: `[R, H_kv, n, D]`.
        scaling: factor on the dot products.
        rotary: of the layer, if the policy asks for it.
    """

    rows: slice
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    rotary: Rotary | None

    def part(self, start: int, stop: int) -> _Chunk:
        """Some of the tokens."""
        query, key, value = (tensor[:, :, start:stop] for tensor in (self.query, self.key, self.value))
        return _Chunk(self.rows, query, key, value, self.scaling, self.rotary)


class OnlineLayer(EvictableLayer):
    """A layer that never holds more than its cap.

    Args:
        index: of the layer in the model.
        cap: what a cell may hold, and the policy that says who leaves.
        progress: shared by all layers of the cache.
    """

    store: SlotLayer

    def __init__(self, index: int, cap: Cap, progress: Progress) -> None:
        super().__init__(index, progress)
        self.policy = cap.policy
        self.cap = cap
        self._made_for = 1
        at = cap.geometries(1)[index]
        self.store = SlotLayer(at.sinks, at.window, at.slots, watched=isinstance(cap.policy, WatchingPolicy))

    def prepare(self, rows: int) -> None:
        """Fit an empty store to a cap that depends on the number of rows, one in bytes."""
        self._made_for = rows
        at = self.cap.geometries(rows)[self.index]
        self.store.refit(at.sinks, at.window, at.slots)

    # -- what transformers and the cache ask -----------------------------------------------------------------------

    def reset(self) -> None:
        """Hold nothing."""
        self.store.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        if len(beam_idx) > self._made_for:
            self.cap.check_rows(len(beam_idx), self._made_for)
        self.store.reorder(beam_idx)

    def stack(self, layers: Sequence[OnlineLayer]) -> None:
        """Hold the rows of other layers with the same policy and cap, one after the other; they are copied."""
        self._made_for = sum(layer.store.batch for layer in layers)
        self.store.stack([layer.store for layer in layers])

    def snapshot(self) -> SlotLayer:
        """The present entries; they are copied by the next step, and count as held as long as they are kept."""
        return self.store.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Hold the entries of a snapshot."""
        self.store.become(snapshot)

    def branch(self) -> None:
        """Be independent of the layer that this one was copied from."""
        self.store = self.store.fork()

    def export(self) -> dict[str, Tensor]:
        """The entries as they go into a file."""
        return self.store.export()

    def load(self, tensors: Mapping[str, Tensor], batch: int, kv_heads: int) -> None:
        """Hold what `export` gave."""
        if not batch:  # saved before its first text, which tells how many rows share a cap in bytes
            return
        self.prepare(batch)
        self.store.load_tensors(tensors, batch, kv_heads)

    # -- the forward -----------------------------------------------------------------------------------------------

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Let entries go as new ones come, and attend to what is held with each; see `EvictableLayer.attend`.

        Rows of different length, or with padding among the new tokens, come one by one, but for single tokens behind
        sinks and window.
        """
        forward = running(self.progress)
        forward.touched = True
        key, value = key.detach(), value.detach()
        self._open(key, value)
        rotary = rotary_of(forward.decoder, module) if self.policy.needs_rotary else None
        valid = None if forward.valid is None else forward.valid.to(key.device)
        if valid is None and self._together(query.shape[2]):
            output = self._read(_Chunk(slice(0, self.store.batch), query, key, value, scaling, rotary))
        else:
            output = query.new_zeros(*query.shape[:3], value.shape[3])
            for row in range(self.store.batch):
                rows = slice(row, row + 1)
                columns = slice(None) if valid is None else valid[row]
                new = [tensor[rows, :, columns] for tensor in (query, key, value)]
                if new[0].shape[2]:
                    output[rows, :, columns] = self._read(_Chunk(rows, new[0], new[1], new[2], scaling, rotary))
        self.record()
        return output.transpose(1, 2).contiguous()

    def _open(self, key: Tensor, value: Tensor) -> None:
        """Room for the first tokens, and the policy's memory."""
        if not self.store.batch:
            self.prepare(key.shape[0])
            self.store.open(key, value)
            sizes = key.shape[3], value.shape[3]
            cells = Cells(key.shape[0], key.shape[1], *sizes, key.dtype, key.device, self.index)
            self.store.state = dict(self.policy.begin(cells))
            self.is_initialized = True
        self.store.open(key, value)  # refuses other rows
        self.store.note_peak(beside=(key.numel() + value.numel()) * key.element_size())

    def _together(self, count: int) -> bool:
        """Whether all rows can be read at once."""
        lengths = self.store.lengths
        ahead = count == 1 and min(lengths) >= self.store.sinks + self.store.window
        return ahead or len(set(lengths)) == 1

    def _read(self, chunk: _Chunk) -> Tensor:
        """Take in new tokens, as many at once as gives the same as one by one: `[R, H, n, D]`."""
        outputs, start, count = [], 0, chunk.query.shape[2]
        while start < count:
            stop = start + self._block(chunk.rows, count - start)
            outputs.append(self._advance(chunk.part(start, stop)))
            start = stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _block(self, rows: slice, rest: int) -> int:
        store = self.store
        room = store.capacity - max(store.lengths[rows])
        if isinstance(self.policy, WatchingPolicy):  # nobody leaves while there is room
            return min(rest, room, _BLOCK) if room > 0 else min(rest, _WATCHED)
        return min(rest, room if room == store.capacity else _BLOCK)

    def _advance(self, chunk: _Chunk) -> Tensor:
        leaving = self.store.leaving(chunk.rows, chunk.key, chunk.value)
        if isinstance(self.policy, WatchingPolicy):
            full = self.store.lengths[chunk.rows][0] >= self.store.capacity
            if full and chunk.query.shape[2] > 1:
                return self._advance_in_steps(self.policy, chunk, leaving)
            return self._advance_watching(self.policy, chunk, leaving)
        return self._advance_static(self.policy, chunk, leaving)

    def _advance_static(self, policy: StaticPolicy, chunk: _Chunk, leaving: Leaving) -> Tensor:
        """Priorities first; then single tokens see what is left, and chunks what is held with each of them."""
        started = time.perf_counter()
        store, rows, count = self.store, chunk.rows, chunk.query.shape[2]
        arrivals = Arrivals(
            keys=chunk.key,
            values=chunk.value,
            positions=self._positions(chunk),
            leaving_keys=leaving.keys,
            leaving_values=leaving.values,
            leaving_positions=leaving.positions,
            layer=self.index,
            rotary=chunk.rotary,
        )
        read = policy.step if count == 1 else policy.priorities
        priorities, state = read(arrivals, self._state(rows))
        check_priorities(priorities, tuple(leaving.keys.shape[:3]), policy, self.index)
        self._keep_state(rows, state)
        # A graph that hung on what is held would grow with every step.
        priorities = self._pinned(priorities.detach(), leaving.positions[:, None])
        taken = self._take_slots(rows, priorities)
        begins = not store.lengths[rows][0]
        if count == 1 or begins:
            store.advance(rows, chunk.key, chunk.value, leaving, taken, priorities)
            self._count_time(started)
            if count == 1:
                return attend(chunk.query, store.view(rows), chunk.scaling)
            # A first chunk is no longer than there is room: see `_block`.
            return attend_prompt(chunk.query, chunk.key, chunk.value, chunk.scaling)
        entries = self._intervals(chunk, leaving, taken)
        self._count_time(started)
        output = attend_intervals(chunk.query, entries, chunk.scaling)
        started = time.perf_counter()
        store.advance(rows, chunk.key, chunk.value, leaving, taken, priorities)
        self._count_time(started)
        return output

    def _advance_watching(self, policy: WatchingPolicy, chunk: _Chunk, leaving: Leaving) -> Tensor:
        """Who leaves is known from the tokens before; so a chunk here either finds room, or is a single token."""
        started = time.perf_counter()
        store, rows, count = self.store, chunk.rows, chunk.query.shape[2]
        at = self._positions(chunk)
        if leaving.priorities is None:
            raise RuntimeError("a store that does not keep all priorities")
        taken = self._take_slots(rows, self._pinned(leaving.priorities, leaving.positions[:, None]))
        store.advance(rows, chunk.key, chunk.value, leaving, taken, leaving.priorities)
        keys, values = store.entries(rows)
        hidden = None
        if count > 1:
            hidden = store.positions(rows)[:, :, None] > at[:, None, :, None]
        elif len(set(store.filled(rows))) > 1:
            filled = torch.tensor(store.filled(rows), device=keys.device)
            hidden = (torch.arange(keys.shape[2], device=keys.device) >= filled[:, None])[:, None, None]
        self._count_time(started)
        output, weights = attend_watched(chunk.query, keys, values, hidden, chunk.scaling)
        started = time.perf_counter()
        priorities = policy.observe(store.priorities(rows), weights.detach())
        check_priorities(priorities, tuple(keys.shape[:3]), policy, self.index)
        store.set_priorities(rows, priorities.detach())
        self._count_time(started)
        return output

    def _advance_in_steps(self, policy: WatchingPolicy, chunk: _Chunk, leaving: Leaving) -> Tensor:
        """Many tokens of full cells: who leaves is known when they have been read."""
        store, rows = self.store, chunk.rows
        keys, values = store.entries(rows)
        _, positions = store.contest(rows, store.slots)
        cells = FullCells(
            keys,
            values,
            store.priorities(rows),
            positions.long(),
            store.sinks,
            store.window,
            store.lengths[rows][0],
        )
        given = (chunk.query, chunk.key, chunk.value, chunk.scaling)
        pinned = self._pinned if self.cap.spans else None
        found = read_watched(policy, cells, *given, pinned, self.index)
        if leaving.priorities is None:
            raise RuntimeError("a store that does not keep all priorities")
        started = time.perf_counter() - found.seconds
        store.advance(rows, chunk.key, chunk.value, leaving, found.taken, leaving.priorities)
        store.set_priorities(rows, found.priorities)
        self._count_time(started)
        return found.output

    def _take_slots(self, rows: slice, incoming: Tensor) -> Tensor:
        """The slot that each leaving token takes, `[R, H_kv, m]`, from their priorities."""
        store, count = self.store, incoming.shape[2]
        filled = store.filled_slots(rows)
        if len(set(filled)) == 1:
            held, positions = store.contest(rows, filled[0])
            held = self._pinned(held, positions)
            cells = incoming.flatten(0, 1), held.flatten(0, 1), positions.flatten(0, 1)
            if count == 1 and filled[0] == store.slots:
                taken = take_slot(cells[0][:, 0], cells[1], cells[2])[:, None]
            else:
                taken = take_slots(cells[0], store.slots, cells[1], cells[2])
            return taken.view(incoming.shape)
        # Single tokens of rows of which some still have free slots.
        held, positions = store.contest(rows, store.slots)
        held = self._pinned(held, positions)
        taken = take_slot(incoming[..., 0].flatten(), held.flatten(0, 1), positions.flatten(0, 1)).view(incoming.shape)
        free = torch.tensor(filled, device=taken.device)[:, None, None]
        return torch.where(free < store.slots, free, taken)

    def _intervals(self, chunk: _Chunk, leaving: Leaving, taken: Tensor) -> list[Interval]:
        """Which tokens of a chunk see which entry; rows of equal length."""
        store, count = self.store, chunk.query.shape[2]
        keys, values = store.entries(chunk.rows)
        length, cells = store.lengths[chunk.rows][0], taken.flatten(0, 1)
        first = count - taken.shape[2]  # the token that pushes the first one out
        gone = first + departures(cells)
        gone_before = gone.new_full((len(cells), keys.shape[2]), count)
        gone_new = gone.new_full((len(cells), count), count)
        old = int((leaving.positions[0] < length).sum())
        gone_before[:, store.column_of(leaving.positions[0, :old])] = gone[:, :old]
        slots = store.filled_slots(chunk.rows)[0]
        if slots:
            gone_before[:, -slots:] = first + first_takers(cells, store.slots)[:, :slots]
        behind = max(0, store.sinks - length)  # the first new tokens may be sinks
        gone_new[:, behind : behind + taken.shape[2] - old] = gone[:, old:]
        shape = keys.shape[:2]
        return [
            Interval(keys, values, None, gone_before.view(*shape, -1)),
            Interval(chunk.key, chunk.value, torch.arange(count, device=gone.device), gone_new.view(*shape, -1)),
        ]

    def _positions(self, chunk: _Chunk) -> Tensor:
        """`[R, n]` int64 of the new tokens."""
        lengths = torch.tensor(self.store.lengths[chunk.rows], device=chunk.key.device)
        return lengths[:, None] + torch.arange(chunk.key.shape[2], device=chunk.key.device)

    def _pinned(self, priorities: Tensor, positions: Tensor) -> Tensor:
        """Priorities that nobody reaches for what the caller protects; there are always more slots than those."""
        pinned = self.cap.pinned(positions)
        return priorities if pinned is None else priorities.masked_fill(pinned, torch.inf)

    def _state(self, rows: slice) -> dict[str, Tensor]:
        state = self.store.state
        return state if self._all(rows) else {name: tensor[rows] for name, tensor in state.items()}

    def _keep_state(self, rows: slice, state: Mapping[str, Tensor]) -> None:
        """Put the memory of some rows among that of the others, which may be shared and so is not written to."""
        if not self._all(rows):
            old = self.store.state
            state = {
                name: torch.cat([old[name][: rows.start], tensor, old[name][rows.stop :]])
                for name, tensor in state.items()
            }
        self.store.state = {name: tensor.detach() for name, tensor in state.items()}

    def _all(self, rows: slice) -> bool:
        return bool(rows.stop - rows.start == self.store.batch)

    def _count_time(self, started: float) -> None:
        self.progress.evict_seconds += time.perf_counter() - started
