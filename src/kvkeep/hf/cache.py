"""KeepCache: a transformers cache that keeps what a policy chooses and deletes the rest."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvkeep.budget import Budget, parse_bytes
from kvkeep.errors import BudgetError, CacheStateError, PolicyError, UnsupportedError
from kvkeep.hf import saving
from kvkeep.hf.attach import attach
from kvkeep.hf.layers import (
    Forward,
    KeepLayer,
    KeepSlidingLayer,
    Progress,
    Span,
    positions_in,
    refused_assisted_decoding,
)
from kvkeep.hf.policy_table import PolicyLike, policy_table
from kvkeep.hf.support import check_rotary, plan_model, rope_switch, unwrap
from kvkeep.policies import Full, policy_string
from kvkeep.policies.protocols import chosen_masks
from kvkeep.store import Ledger


@dataclass(frozen=True, eq=False)
class Mark:
    """A point that a cache can be rewound to; see `KeepCache.mark`."""

    columns: int
    lengths: tuple[int, ...]
    tails: tuple[int, ...]
    windows: tuple[tuple[Tensor | None, Tensor | None, int], ...]


class KeepCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A cache for `model.generate(past_key_values=...)` that holds a budget.

    The text of the first forward is the prompt: when it has been processed, the policy chooses what stays of it, and
    the rest is deleted. Tokens that follow stay (`ledger.uncut_entries`). Positions follow the tokens seen, not the
    entries held. Making a cache attaches kvkeep to the model (see `kvkeep.attached`); other caches on it work as
    before.

    Args:
        model: a transformers model that kvkeep supports, or a PEFT wrapper of one.
        policy: a name (`"snapkv[window=64]+ada"`), a policy, or a table by layer index with `"*"` for the others
            (`{0: "full", "*": "snapkv"}`; layers that are kept in full are paid from the same budget).
        compression_ratio: fraction of entries to remove, 0 <= r < 1; relative to the text's length.
        entries: or: entries per cell on average.
        bytes: or: bytes of the whole cache when it is cut, as a number or as text (`"64MiB"`).
        protect: ranges of positions that stay, as `(start, end)`; negative numbers and None as in a slice.
        question: positions `(start, end)` of the question, if it is part of the prompt; as for `protect`.
        prompt_tokens: length of the prompt where it arrives in chunks (`prefill_chunk_size`): the cut comes when that
            many tokens, padding included, have been processed.

    Raises:
        BudgetError: no budget, more than one, or one that cannot be kept.
        PolicyError: an unknown policy, part or option.
        UnsupportedError: a model that kvkeep has not checked.
    """

    def __init__(
        self,
        model: Any,
        policy: PolicyLike,
        *,
        compression_ratio: float | None = None,
        entries: int | None = None,
        bytes: int | str | None = None,
        protect: Sequence[Span] = (),
        question: Span | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        plans = plan_model(model)
        evictable = [plan for plan in plans if plan.window is None]
        self.policy = policy
        table = policy_table(policy, [plan.index for plan in evictable], len(plans))
        given = (compression_ratio, entries, bytes)
        if all(isinstance(p, Full) for p in table) and given == (None, None, None):
            compression_ratio = 0.0
        size = parse_bytes(bytes) if isinstance(bytes, str) else bytes
        self.budget = Budget(compression_ratio=compression_ratio, entries=entries, bytes=size)
        if prompt_tokens is not None and (not isinstance(prompt_tokens, int) or prompt_tokens < 1):
            raise BudgetError(
                expected="prompt_tokens as a whole number of at least 1",
                received=f"{prompt_tokens}",
                remedy="leave it out for one forward",
            )
        self.prompt_tokens = prompt_tokens
        self.protect = tuple(_span(span) for span in protect or ())
        self.question = None if question is None else _span(question)
        self._plans = plans
        self._progress = Progress()
        self._table = table
        if any(policy.needs().rotary for policy in table):
            check_rotary(unwrap(model))
        inner = attach(model)
        self._switch = rope_switch(inner)
        self._model = weakref.ref(inner)

        layers: list[Any] = []
        for plan in plans:
            if plan.window is not None:
                layers.append(KeepSlidingLayer(plan.window, self._progress))
                continue
            mine = table[evictable.index(plan)]
            peers = [other for other, p in zip(evictable, table, strict=True) if p == mine]
            layers.append(
                KeepLayer(
                    index=plan.index,
                    ordinal=peers.index(plan),
                    layers=len(peers),
                    policy=mine,
                    protect=self.protect,
                    progress=self._progress,
                )
            )
        super().__init__(layers=layers)
        self._wire()
        self._last_cut: Mark | None = None
        self._on_request = False
        self._start()

    def __bool__(self) -> bool:
        """True, but for models with longrope: Phi-3's `generate` drops a true cache, without a word, where the model
        changes its frequencies. `begin_forward` refuses such a text instead."""
        return self._switch is None

    # -- what users read -------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Entries and bytes, held and at the peak."""
        return self._ledger

    @property
    def notes(self) -> list[str]:
        """What the policy had to change to stay in the budget, in words."""
        return list(self._progress.notes)

    @property
    def evict_seconds(self) -> float:
        """Time spent so far on scoring, choosing and cutting, within the forwards."""
        return self._progress.evict_seconds

    @property
    def is_broken(self) -> bool:
        """Whether a forward ended in an exception and left the layers out of step."""
        return self._progress.forward is not None and self._progress.forward.touched

    @property
    def keep_layers(self) -> list[KeepLayer]:
        """The evictable layers."""
        return [layer for layer in self.layers if isinstance(layer, KeepLayer)]

    @property
    def sliding_layers(self) -> list[KeepSlidingLayer]:
        """The layers that keep a window of their own."""
        return [layer for layer in self.layers if isinstance(layer, KeepSlidingLayer)]

    @property
    def model(self) -> Any:
        """The model that the cache was made for, unwrapped; the cache does not keep it alive."""
        model = self._model()
        if model is None:
            raise CacheStateError(expected="a living model", received="one that was deleted", remedy="keep the model")
        return model

    def kept_positions(self, layer: int, row: int = 0, head: int = 0) -> Tensor:
        """Positions of the entries that a cell holds, ascending.

        Args:
            layer: index of an evictable layer in the model.
            row: of the batch.
            head: KV head.

        Raises:
            CacheStateError: there is no such cell.
        """
        stores = {each.index: each.store for each in self.keep_layers}
        if layer not in stores or not (0 <= row < stores[layer].batch and 0 <= head < stores[layer].kv_heads):
            held = next(iter(stores.values()))
            raise CacheStateError(
                expected=f"a layer of {list(stores)}, a row below {held.batch} and a KV head below {held.kv_heads}",
                received=f"layer {layer}, row {row}, head {head}",
                remedy="sliding-window layers are not evicted, and an empty cache holds no rows",
            )
        return stores[layer].cell(row, head)[2]

    # -- the walk of a forward -------------------------------------------------------------------------------------

    def begin_forward(
        self, decoder: nn.Module, shape: tuple[int, int], mask: Tensor | None, position_ids: Tensor | None
    ) -> None:
        """Called by the model's hook before the first layer: check everything that can be refused, then begin."""
        self._refuse_broken()
        if decoder is not self.model.get_decoder():
            raise CacheStateError(
                expected="the model that this cache was made for",
                received="another one",
                remedy="make a KeepCache for each model",
            )
        progress = self._progress
        rows, new = shape
        if new == 0 or rows == 0:
            raise CacheStateError(
                expected="at least one new token", received=f"an input of shape {shape}", remedy="pass a non-empty text"
            )
        if progress.lengths and rows != len(progress.lengths):
            raise UnsupportedError(
                expected=f"{len(progress.lengths)} rows, as the cache holds",
                received=f"{rows}",
                remedy="for beams or several return sequences pass a fresh cache",
            )
        device = next(decoder.parameters()).device
        before = progress.lengths or [0] * rows
        valid = self._new_valid(before, new, mask)
        steps = torch.ones(rows, new, dtype=torch.long) if valid is None else valid.cpu().long()
        positions = (torch.tensor(before)[:, None] + steps.cumsum(1) - 1).clamp(min=0)
        after = [length + int(count) for length, count in zip(before, steps.sum(1).tolist(), strict=True)]
        self._check_positions(position_ids, positions, steps)
        self._check_rope_switch(progress.columns, progress.columns + new)
        self._check_rope_switch(max(before), max(after))
        cutting = self._cuts_now(new)
        if cutting and min(after) == 0:
            raise CacheStateError(
                expected="at least one token in every row", received="a row of padding only", remedy="leave the row out"
            )
        # A prompt in chunks gets its room at once, and until its last chunk.
        waiting = not self._cuts and (not cutting or progress.columns > 0)
        progress.forward = Forward(
            decoder=decoder,
            positions=positions.to(device),
            valid=None if valid is None else valid.to(device),
            lengths=after,
            cutting=cutting,
            reserve=self.prompt_tokens or 0 if waiting else 0,
            budgets=self._budgets(after) if cutting else (),
            questions=self._questions(after) if cutting else (),
        )
        self._new_columns = new

    def finish_forward(self) -> None:
        """Called by the model's hook after the last layer: cut the layers that waited for one another, and commit."""
        progress = self._progress
        forward = progress.forward
        if forward is None:
            return
        while waiting := [layer for layer in self.keep_layers if layer.judged]:
            policy = waiting[0].policy
            layers = [layer for layer in waiting if layer.policy == policy]
            judgements = [judgement for layer in layers for _, judgement in layer.judged]
            # Rows that came one by one share no budget: each is chosen for by itself, over all its layers.
            groups = len(layers[0].judged)
            masks: list[list[Tensor]] = [[] for _ in layers]
            for group in range(groups):
                chosen = chosen_masks(policy, judgements[group::groups])
                for kept, mask in zip(masks, chosen, strict=True):
                    kept.append(mask)
            for layer, kept in zip(layers, masks, strict=True):
                layer.cut(kept)
        if forward.cutting:
            self._check_kept(forward.budgets)
        progress.lengths = forward.lengths
        progress.columns += self._new_columns
        if forward.cutting:
            self._cuts += 1
            self._cut_next = False
            self._marks.clear()
        progress.forward = None
        if forward.cutting:
            self._set_last_cut(self.mark())

    def _set_last_cut(self, mark: Mark) -> None:
        self._last_cut = mark
        for layer, (keys, values, _) in zip(self.sliding_layers, mark.windows, strict=True):
            layer.marked = (keys, values)

    def cut_next(self, cut: bool = True) -> None:
        """Judge everything that is held, old and new, at the end of the next forward; false takes that back."""
        self._cut_next = cut

    def cut_on_request(self) -> None:
        """Cut only where `cut_next` asks for it: the first text may be a question, which must stay whole."""
        self._on_request = True

    # -- going back ------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The present state, to `rewind` to. Valid for this cache and its forks, until the next cut or reordering, or
        until the cache is rewound or cropped to a point before it."""
        self._refuse_broken()
        self._refuse_unfinished()
        mark = Mark(
            columns=self._progress.columns,
            lengths=tuple(self._progress.lengths),
            tails=tuple(layer.store.tail_length for layer in self.keep_layers),
            windows=tuple(layer.snapshot() for layer in self.sliding_layers),
        )
        self._marks.add(mark)
        return mark

    def rewind(self, mark: Mark | None = None) -> None:
        """Go back to a mark, or to the last cut: another question finds the cache as the first one did.

        Raises:
            CacheStateError: nothing was cut yet, or the entries of the mark are gone.
        """
        if self._progress.forward is not None and self._progress.forward.cutting:
            self._refuse_broken()
        mark = mark if mark is not None else self._last_cut
        if mark is None or mark not in self._marks:
            raise CacheStateError(
                expected="a mark of this cache, taken since the last cut, with its entries still held",
                received="no cut yet"
                if mark is None
                else "a mark of another cache, or from before a cut, a reordering, a reset or a rewind further back",
                remedy="take a new mark() after the text has been ingested",
            )
        for layer, tail in zip(self.keep_layers, mark.tails, strict=True):
            layer.store.rewind(tail)
            if not mark.columns:
                layer.store.reset()  # empty again: the next text may have other rows
        for sliding, window in zip(self.sliding_layers, mark.windows, strict=True):
            sliding.restore(window)
        self._progress.columns, self._progress.lengths = mark.columns, list(mark.lengths)
        self._progress.forward = None  # a forward that only appended is undone, also half of one
        self._forget_later_marks()
        self._record_all()

    def fork(self) -> KeepCache:
        """An independent cache with the same content; kept entries are shared until one of the two writes."""
        self._refuse_broken()
        twin = copy.copy(self)
        twin._progress = copy.copy(self._progress)
        twin._progress.lengths = list(self._progress.lengths)
        twin._progress.notes = list(self._progress.notes)
        twin.layers = [copy.copy(layer) for layer in self.layers]
        for layer in twin.layers:
            layer.progress = twin._progress
        for layer in twin.keep_layers:
            layer.store = layer.store.fork()
            layer.judged, layer._queries = [], list(layer._queries)
        twin._marks = WeakSet(self._marks)
        twin._wire()
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepCache:
        """A fork: independent too, and what is shared is never written to."""
        return self.fork()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens: -n removes n, and a positive number is the length to come down to.

        Raises:
            CacheStateError: they reach back into what was cut, or a sliding window no longer holds what lies before.
        """
        self._refuse_broken()
        self._refuse_unfinished()
        progress = self._progress
        remove = -tokens_to_remove if tokens_to_remove <= 0 else progress.columns - tokens_to_remove
        if remove <= 0:
            return
        room = min((layer.store.tail_length for layer in self.keep_layers), default=0)
        slid = any(layer.cumulative_length >= layer.sliding_window for layer in self.sliding_layers)
        if remove > room or slid:
            raise CacheStateError(
                expected=f"at most {0 if slid else room} tokens to remove, those since the last cut"
                + (" while no sliding window is full" if slid else ""),
                received=f"{remove}",
                remedy="use rewind(), which goes back to the last cut exactly",
            )
        for layer in self.keep_layers:
            store = layer.store
            gone = store.tail_counts()
            store.rewind(store.tail_length - remove)
            gone = gone - store.tail_counts()
        for layer in self.sliding_layers:
            keys, values, seen = layer.snapshot()
            if keys is not None and values is not None:
                layer.restore((keys[:, :, :-remove].clone(), values[:, :, :-remove].clone(), seen - remove))
        progress.columns -= remove
        progress.lengths = [length - int(g) for length, g in zip(progress.lengths, gone.tolist(), strict=True)]
        self._forget_later_marks()
        self._record_all()

    def reset(self) -> None:
        """Hold nothing, as after construction; also the way out of a broken cache."""
        for layer in self.layers:
            layer.reset()
        self._progress.lengths, self._progress.columns = [], 0
        self._progress.forward = None
        self._progress.notes.clear()
        self._progress.evict_seconds = 0.0
        self._start()
        self._ledger.restart()

    # -- rows ------------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was (beam search)."""
        self._refuse_broken()
        super().reorder_cache(beam_idx)
        self._rows_changed(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._refuse_broken()
        super().batch_repeat_interleave(repeats)
        self._rows_changed([row for row in range(len(self._progress.lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some rows."""
        self._refuse_broken()
        super().batch_select_indices(indices)
        self._rows_changed(torch.arange(len(self._progress.lengths))[indices.cpu()].tolist())

    def activate_past_recording(self) -> None:
        """Refused: assisted decoding asks for it before the first forward."""
        raise refused_assisted_decoding()

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file that `KeepCache.load` reads in another process; see `saving.save`."""
        saving.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: Any, *, policy: PolicyLike | None = None) -> KeepCache:
        """Read a cache that `save` wrote, for the same model.

        Args:
            path: the file.
            model: the model that the cache was made with.
            policy: only for caches whose policy has no name.

        Raises:
            CacheStateError: not such a file, a damaged one, or one of another model.
        """
        return saving.load(cls, Path(path), model, policy)

    def export_progress(self) -> dict[str, Any]:
        """What the cache has seen, as JSON holds it; for `saving`."""
        return {
            "lengths": self._progress.lengths,
            "columns": self._progress.columns,
            "notes": self._progress.notes,
            "cuts": self._cuts,
            "last_cut": None
            if self._last_cut is None
            else {
                "columns": self._last_cut.columns,
                "lengths": self._last_cut.lengths,
                "tails": self._last_cut.tails,
                "seen": [seen for _, _, seen in self._last_cut.windows],
            },
        }

    def last_windows(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """What each sliding layer held at the last cut; for `saving`."""
        return [] if self._last_cut is None else [(keys, values) for keys, values, _ in self._last_cut.windows]

    def import_progress(
        self, progress: dict[str, Any], peak_bytes: int, windows: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> None:
        """Go on from what `export_progress` and `last_windows` gave; for `saving`."""
        self._progress.lengths, self._progress.columns = progress["lengths"], progress["columns"]
        self._progress.notes, self._cuts = progress["notes"], progress["cuts"]
        cut = progress["last_cut"]
        if cut is not None:
            pairs = zip(windows, cut["seen"], strict=True)
            mark = Mark(
                columns=cut["columns"],
                lengths=tuple(cut["lengths"]),
                tails=tuple(cut["tails"]),
                windows=tuple((keys, values, seen) for (keys, values), seen in pairs),
            )
            self._marks.add(mark)
            self._set_last_cut(mark)
        self._ledger.restart()
        self._ledger.peak_bytes = peak_bytes

    def refuse_unusable(self) -> None:
        """Raise where the cache is no whole text: after a failed forward, or in the middle of a prompt."""
        self._refuse_broken()
        self._refuse_unfinished()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._cuts = 0
        self._marks: WeakSet[Mark] = WeakSet()  # those that can be rewound to
        self._cut_next = False
        self._new_columns = 0
        self._last_cut = None

    def _wire(self) -> None:
        """Let each layer report to a new ledger; weakly, since a reference cycle would delay freeing."""
        progress, sliding = self._progress, self.sliding_layers
        self._ledger = Ledger(
            [layer.store for layer in self.keep_layers],
            lambda: progress.forward.lengths if progress.forward and progress.forward.touched else progress.lengths,
            [_weak_nbytes(layer) for layer in sliding],
        )
        ledger = weakref.ref(self._ledger)
        for index, layer in enumerate(self.keep_layers):
            layer.record = _recorder(ledger, Ledger.record, index)
        for index, layer in enumerate(sliding):
            layer.record = _recorder(ledger, Ledger.record_window, index)

    def _record_all(self) -> None:
        for layer in self.layers:
            layer.record()

    def _rows_changed(self, rows: list[int]) -> None:
        self._progress.lengths = [self._progress.lengths[row] for row in rows] if self._progress.lengths else []
        self._marks.clear()
        self._last_cut = None
        self._record_all()

    def _forget_later_marks(self) -> None:
        """After going back: what stood behind this point is gone, also if as many tokens come again."""
        for mark in [mark for mark in self._marks if mark.columns > self._progress.columns]:
            self._marks.discard(mark)

    def _refuse_broken(self) -> None:
        if self.is_broken:
            raise CacheStateError(
                expected="a cache whose last forward went through",
                received="one that an exception left with layers of different length",
                remedy="call cache.reset() and process the text again; cache.rewind() will do if nothing was being cut",
            )
        self._progress.forward = None  # one that was refused before a layer ran

    def _refuse_unfinished(self) -> None:
        if any(layer.remembers for layer in self.keep_layers):
            raise CacheStateError(
                expected=f"the whole prompt of {self.prompt_tokens} tokens",
                received=f"the first {self._progress.columns} of them, which are still to be judged",
                remedy="process the rest of the prompt first; a fork can be made at any time",
            )

    def _cuts_now(self, new: int) -> bool:
        if self._cut_next:
            return True
        if self._cuts or self._on_request:
            return False
        if self.prompt_tokens is None:
            return self._progress.columns == 0
        end = self._progress.columns + new
        if end > self.prompt_tokens:
            raise CacheStateError(
                expected=f"a prompt that ends at prompt_tokens={self.prompt_tokens}",
                received=f"a forward that reaches token {end}",
                remedy="set prompt_tokens to the length of input_ids, padding included",
            )
        return end == self.prompt_tokens

    def _new_valid(self, before: list[int], new: int, mask: Tensor | None) -> Tensor | None:
        """`[B, new]` which of the new tokens are no padding; None if all are."""
        if mask is None:
            return None
        seen = self._progress.columns
        if tuple(mask.shape) != (len(before), seen + new):
            raise UnsupportedError(
                expected=f"an attention mask of shape {(len(before), seen + new)}: tokens seen and new ones",
                received=f"{tuple(mask.shape)}",
                remedy="pass the mask of the whole text, the part that is cached included",
            )
        mask = mask.bool()
        if seen and mask[:, :seen].sum(1).tolist() != before:
            raise UnsupportedError(
                expected="a mask that agrees with the tokens in the cache",
                received="one that hides or shows tokens which were seen otherwise",
                remedy="pass the mask of the prompt with ones for what followed",
            )
        fresh = mask[:, seen:]
        return None if bool(fresh.all()) else fresh

    def _check_positions(self, position_ids: Tensor | None, positions: Tensor, steps: Tensor) -> None:
        """Positions must follow the logical length, or the column where padding counts; anything else is refused."""
        if position_ids is None or (position_ids.device.type != "cpu" and steps.shape[1] == 1):
            return  # no synchronisation with a device at every step of a generation
        given = position_ids.cpu()
        if given.ndim != 2 or given.shape[1] != steps.shape[1] or given.shape[0] not in (1, steps.shape[0]):
            raise UnsupportedError(
                expected=f"position_ids of shape {tuple(steps.shape)}",
                received=f"{tuple(given.shape)}",
                remedy="leave position_ids out",
            )
        real = steps.bool()
        columns = (self._progress.columns + torch.arange(steps.shape[1]))[None].expand_as(steps)
        given = given.expand_as(steps)
        if not (torch.equal(given[real], positions[real]) or torch.equal(given[real], columns[real])):
            raise UnsupportedError(
                expected=f"positions that go on from the {self._progress.columns} tokens seen",
                received=f"{given[0, :4].tolist()}...",
                remedy="pass new tokens only, without position_ids (a text that the cache has seen wants a fresh "
                "cache); packed sequences are not supported",
            )

    def _check_rope_switch(self, before: int, after: int) -> None:
        """Keys in the cache have one set of frequencies: all of a text stands on one side of the switch."""
        switch = self._switch
        if switch is not None and before <= switch <= after and (before or after == switch):
            raise UnsupportedError(
                expected=f"a text of fewer than {switch} tokens, answer included, or a prompt of more in one forward",
                received=f"{after - before} tokens after {before}",
                remedy="this model changes its rotary frequencies at that length (longrope), and the cached keys with "
                "them; shorten the text or the answer",
            )

    def _questions(self, lengths: list[int]) -> list[tuple[int, int]]:
        """Positions of the question in each row, none where it is hidden.

        Raises:
            BudgetError: the span is empty in a row, or lies outside of it.
        """
        if self.question is None:
            return []
        spans = []
        for length in lengths:
            start, end, _ = slice(*self.question).indices(length)
            outside = any(at is not None and not -length <= at <= length for at in self.question)
            if outside or start >= end:
                raise BudgetError(
                    expected=f"a question within the {length} tokens of each row, as (start, end)",
                    received=f"question={self.question}",
                    remedy="count from the end for rows of different length, such as question=(-12, None)",
                )
            spans.append((start, end))
        return spans

    def _check_kept(self, budgets: Sequence[int]) -> None:
        """A policy may share its budget as it likes; it may not exceed it.

        Raises:
            PolicyError: the layers of a policy hold more than its budget in some row.
        """
        waiting = [layer for layer in self.keep_layers if not isinstance(layer.policy, Full)]
        while waiting:
            policy = waiting[0].policy
            stores = [layer.store for layer in waiting if layer.policy == policy]
            waiting = [layer for layer in waiting if layer.policy != policy]
            held = torch.stack([store.cell_counts().sum(1).cpu() for store in stores]).sum(0)
            cells = sum(store.kv_heads for store in stores)
            allowed = [budget * cells for budget in budgets]
            if any(count > limit for count, limit in zip(held.tolist(), allowed, strict=True)):
                raise PolicyError(
                    expected=f"at most {allowed} entries in each row, the budget of {len(stores)} layers",
                    received=f"{held.tolist()} from {policy_string(policy)}",
                    remedy="choose no more than `judgement.budget` entries per cell on average",
                )

    def _budgets(self, lengths: list[int]) -> list[int]:
        """Entries per cell on average, row by row, for the layers whose policy evicts.

        Raises:
            BudgetError: layers kept in full, or protected entries, need more than the budget.
        """
        evictable = [plan for plan in self._plans if plan.window is None]
        reserved = sum(
            len(lengths) * plan.shape.kv_heads * plan.shape.entry_bytes * min(plan.window - 1, max(lengths))
            for plan in self._plans
            if plan.window is not None
        )
        average = self.budget.entries_per_cell(lengths, [plan.shape for plan in evictable], reserved)
        full = sum(isinstance(policy, Full) for policy in self._table)
        budgets = []
        for length, entries in zip(lengths, average, strict=True):
            if 0 < full < len(self._table):
                entries = (entries * len(self._table) - length * full) // (len(self._table) - full)
            elif full and entries < length:
                raise BudgetError(
                    expected=f"a budget of {length} entries per cell, all that policy 'full' keeps",
                    received=f"{entries} ({self.budget})",
                    remedy="choose a policy that evicts, or compression_ratio=0",
                )
            pinned = len(positions_in(self.protect, length))
            if entries < max(1, pinned):
                raise BudgetError(
                    expected=f"a budget of at least {max(1, pinned)} entries per cell"
                    + (f" for {pinned} protected positions" if pinned else "")
                    + (f" beside {full} layers that are kept in full" if full else ""),
                    received=f"{entries} ({self.budget} of a text of {length} tokens)",
                    remedy="raise the budget, protect less, or keep fewer layers in full",
                )
            budgets.append(entries)
        return budgets


def _span(span: Any) -> Span:
    if isinstance(span, range | slice) and span.step in (None, 1):
        return span.start, span.stop
    if isinstance(span, Sequence) and len(span) == 2 and all(isinstance(x, int | None) for x in span):
        return span[0], span[1]
    raise BudgetError(
        expected="a range of positions as (start, end), with whole numbers or None as in a slice",
        received=f"{span!r}",
        remedy="for example protect=[(0, 24), (-64, None)]",
    )


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
