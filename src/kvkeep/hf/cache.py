"""KeepCache: a transformers cache that keeps what a policy chooses and deletes the rest."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvkeep.budget import Budget, read_budget
from kvkeep.errors import CacheStateError, UnsupportedError
from kvkeep.hf import saving
from kvkeep.hf.attach import attach
from kvkeep.hf.budgets import cell_budgets, check_kept
from kvkeep.hf.calibrations import calibrations_of
from kvkeep.hf.caps import Cap
from kvkeep.hf.cropping import crop_layers
from kvkeep.hf.evictable import EvictableLayer
from kvkeep.hf.intake import check_ids, question_spans, read_tokens
from kvkeep.hf.layers import KeepLayer, cut_together
from kvkeep.hf.making import make_layers
from kvkeep.hf.marks import Mark, Marks, Window
from kvkeep.hf.options import CacheOptions, read_chunk_tokens
from kvkeep.hf.policy_table import PolicyLike
from kvkeep.hf.progress import Forward, Progress
from kvkeep.hf.recording import new_ledger
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.rerotation import with_second_keys
from kvkeep.hf.schedule import Schedule
from kvkeep.hf.second_pass import check_second_passes, repeat_text
from kvkeep.hf.seen_tokens import SeenTokens
from kvkeep.hf.sliding import KeepSlidingLayer, refused_assisted_decoding
from kvkeep.hf.spans import Span
from kvkeep.hf.stacking import stack_caches
from kvkeep.hf.support import rope_switch, unwrap
from kvkeep.observation import SecondPass
from kvkeep.store import Ledger


class KeepCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A cache for `model.generate(past_key_values=...)` that holds a budget.

    The text of the first forward is the prompt: when it has been processed, the policy chooses what stays of it, and
    the rest is deleted. Tokens that follow stay (`ledger.uncut_entries`). Positions follow the tokens seen, not the
    entries held. Making a cache attaches kvkeep to the model (see `kvkeep.attached`); other caches on it work as
    before.

    Args:
        model: a transformers model that kvkeep supports, or a PEFT wrapper of one.
        policy: a name (`"snapkv[window=64]+ada"`), a policy, or a table by layer index with `"*"` for the others
            (`{0: "full", "*": "snapkv"}`; layers that are kept in full are paid from the same budget). An online policy
            (`"online-streaming-llm"`) holds its cap at every step, also while tokens are generated.
        compression_ratio: fraction of entries to remove, 0 <= r < 1; relative to the text's length.
        entries: or: entries per cell on average.
        bytes: or: bytes of the whole cache when it is cut, as a number or as text (`"64MiB"`).
        budget: or: any of the three as a `Budget`.
        protect: ranges of positions that stay, as `(start, end)`; negative numbers and None as in a slice.
        question: positions `(start, end)` of the question, if it is part of the prompt; as for `protect`.
        prompt_tokens: length of the prompt where it arrives in chunks (`prefill_chunk_size`): the cut comes when that
            many tokens, padding included, have been processed.
        cut_chunks: cut such a prompt after each chunk, so that no more than the budget and one chunk is ever held. The
            budget is that of the whole prompt. What stays differs from a cut at the end, since a chunk is judged
            without those that follow.
        repeat_prompt: for policies that make the model repeat the text (`kvzip`): what asks it to, as
            `RepeatPrompt.of(tokenizer)` makes it. Without one the bare tokens are read once more. A `Session` sees to
            it by itself.
        rerotate_keys: after a cut, rotate the kept keys so that those of each cell stand one behind the other, up to
            the next token; see `rerotation`. They are held twice, and a budget in bytes counts both. Kept positions
            still tell which tokens stay.

    Raises:
        BudgetError: no budget, more than one, or one that cannot be kept.
        PolicyError: an unknown policy, part or option; with `cut_chunks`, one that must see the whole text.
        UnsupportedError: a model that kvkeep has not checked; with `rerotate_keys`, rotary positions of another kind
            than default, linear and llama3.
        ModelFileError: a policy that judges by a calibration of the model, and none there.
    """

    _seen: SeenTokens
    _marks: Marks

    def __init__(
        self,
        model: Any,
        policy: PolicyLike,
        *,
        compression_ratio: float | None = None,
        entries: int | None = None,
        bytes: int | str | None = None,
        budget: Budget | None = None,
        protect: Sequence[Span] = (),
        question: Span | None = None,
        prompt_tokens: int | None = None,
        cut_chunks: bool = False,
        repeat_prompt: RepeatPrompt | None = None,
        rerotate_keys: bool = False,
    ) -> None:
        given = read_budget(budget, compression_ratio=compression_ratio, entries=entries, bytes=bytes)
        options = CacheOptions.read(
            model,
            policy,
            given,
            protect=protect,
            question=question,
            prompt_tokens=prompt_tokens,
            cut_chunks=cut_chunks,
            rerotate_keys=rerotate_keys,
        )
        self.policy = policy
        self.budget, self.protect, self.question = options.budget, options.protect, options.question
        self.rerotate_keys = options.rerotate_keys
        self.repeat_prompt = repeat_prompt or RepeatPrompt()
        self.second_pass_seconds: dict[SecondPass, float] = {}
        self._plans, self._table, self._online = options.plans, options.table, options.online
        self._passes = options.needs.second_passes
        self._schedule = Schedule(options.prompt_tokens, options.cut_chunks, never=self.is_online)
        self._progress = Progress()
        known = calibrations_of(unwrap(model), options.needs.statistics)
        self._cap: Cap | None = None
        if self._online:
            self._cap = Cap(self._online, self.budget, self._plans, unwrap(model).dtype, self.protect)
        inner = attach(model)
        self._switch = rope_switch(inner)
        self._model = weakref.ref(inner)
        super().__init__(layers=make_layers(inner, options, self._cap, known, self._progress))
        self._ledger = new_ledger(self.evictable_layers, self.sliding_layers, self._progress)
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
    def lengths(self) -> list[int]:
        """Logical length of each row: tokens seen, without padding."""
        return list(self._progress.lengths)

    @property
    def evict_seconds(self) -> float:
        """Time spent so far on scoring, choosing and cutting, second passes included, within the forwards."""
        return self._progress.evict_seconds

    @property
    def repeats_texts(self) -> bool:
        """Whether a policy makes the model repeat each text before it is cut."""
        return bool(self._passes)

    @property
    def is_broken(self) -> bool:
        """Whether a forward ended in an exception and left the layers out of step."""
        return self._progress.forward is not None and self._progress.forward.touched

    @property
    def is_online(self) -> bool:
        """Whether a cap holds at every step, instead of a cut where a text ends."""
        return self._online is not None

    @property
    def prompt_tokens(self) -> int | None:
        """Length of a prompt that comes in chunks."""
        return self._schedule.prompt_tokens

    @property
    def cut_chunks(self) -> bool:
        """Whether such a prompt is cut after each chunk."""
        return self._schedule.cut_chunks

    @property
    def evictable_layers(self) -> list[EvictableLayer]:
        """The layers that a policy may evict entries of."""
        return [layer for layer in self.layers if isinstance(layer, EvictableLayer)]

    @property
    def keep_layers(self) -> list[KeepLayer]:
        """The same, of a cache that is cut where a text ends.

        Raises:
            UnsupportedError: an online policy holds a cap in them.
        """
        if self._online:
            raise UnsupportedError(
                expected="a cache that is cut where a text ends",
                received=f"one under {self._online.name}, which holds a cap at every step",
                remedy="use a policy of the kind `prompt`, see `kvkeep policies`",
            )
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
        stores = {each.index: each.store for each in self.evictable_layers}
        if layer not in stores or not (0 <= row < stores[layer].batch and 0 <= head < stores[layer].kv_heads):
            held = next(iter(stores.values()))
            raise CacheStateError(
                expected=f"a layer of {list(stores)}, a row below {held.batch} and a KV head below {held.kv_heads}",
                received=f"layer {layer}, row {row}, head {head}",
                remedy="sliding-window layers are not evicted, and an empty cache holds no rows",
            )
        return stores[layer].cell_positions(row, head)

    # -- the walk of a forward -------------------------------------------------------------------------------------

    def begin_forward(
        self,
        decoder: nn.Module,
        shape: tuple[int, int],
        mask: Tensor | None,
        position_ids: Tensor | None,
        ids: Tensor | None = None,
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
        tokens = read_tokens(progress, shape, mask, position_ids, self._switch)
        new = shape[1]
        if self._cap and not progress.columns:
            self._cap.geometries(shape[0])  # a budget in bytes may be too small for so many rows
        cutting, coming = self._schedule.plan(progress.columns, new)
        empty = min(tokens.lengths) == 0
        if coming and empty:
            cutting = False  # a row that has not begun; the next chunk is cut with this one
        if cutting and empty:
            raise CacheStateError(
                expected="at least one token in every row", received="a row of padding only", remedy="leave the row out"
            )
        if self._passes:
            check_ids(ids, self._seen.columns, progress.columns)
            if cutting:
                check_second_passes(self._passes, self.repeat_prompt, tokens.lengths, self._switch)
        device = next(decoder.parameters()).device
        forward = Forward(
            decoder=decoder,
            positions=tokens.positions.to(device),
            valid=None if tokens.valid is None else tokens.valid.to(device),
            lengths=tokens.lengths,
            cutting=cutting,
            coming=coming,
            reserve=self._schedule.reserve(progress.columns, cutting),
            ids=ids if self._passes else None,
            second_passes=self._passes if cutting else frozenset(),
        )
        if cutting:
            plans = with_second_keys(self._plans) if self.rerotate_keys else self._plans
            whole = cell_budgets(self.budget, forward.text_lengths, plans, self._table, self.protect)
            forward.budgets = [min(budget, length) for budget, length in zip(whole, tokens.lengths, strict=True)]
            forward.questions = question_spans(self.question, tokens.lengths)
        progress.forward = forward
        self._new_columns = new

    def finish_forward(self) -> None:
        """Called by the model's hook after the last layer: cut the layers that waited for one another, and commit."""
        progress = self._progress
        forward = progress.forward
        if forward is None:
            return
        if forward.ids is not None:
            self._seen.add(forward.ids, forward.valid)
        if forward.second_passes:
            self._repeat(forward)
        if not self._online:
            cut_together(self.keep_layers)
        if forward.cutting:
            check_kept(self.keep_layers, forward.budgets)
        progress.lengths = forward.lengths
        progress.columns += self._new_columns
        self._schedule.note(forward.cutting, forward.coming)
        if forward.cutting:
            self._marks.clear()
        progress.forward = None
        if forward.cutting and not forward.coming:
            self._set_last_cut(self.mark())

    def _repeat(self, forward: Forward) -> None:
        """Run the second passes over all that is held, and judge what waited for them."""
        started = time.perf_counter()
        self.second_pass_seconds = repeat_text(
            forward.decoder, self.layers, self._seen, self.repeat_prompt, forward.second_passes
        )
        self._progress.evict_seconds += time.perf_counter() - started
        for layer in self.keep_layers:
            layer.judge_waiting()

    def _set_last_cut(self, mark: Mark) -> None:
        self._marks.last_cut = mark
        for layer, (keys, values, _) in zip(self.sliding_layers, mark.windows, strict=True):
            layer.marked = (keys, values)

    def cut_next(self, cut: bool = True, *, coming: int = 0) -> None:
        """Judge everything that is held, old and new, at the end of the next forward; false takes that back.

        Args:
            cut: or not.
            coming: tokens of the same text in later forwards, which are cut too: the budget is that of the whole text.
        """
        self._schedule.requested = coming if cut else None

    def end_text(self) -> None:
        """Let a text of which more was to come end here, such as after an interruption. What is held stays."""
        self._refuse_broken()
        if self._schedule.cuts and self._schedule.coming:
            self._schedule.coming = 0
            for layer in self.keep_layers:
                layer.forget_queries()
            self._set_last_cut(self.mark())

    def cut_on_request(self) -> None:
        """Cut only where `cut_next` asks for it: the first text may be a question, which must stay whole."""
        self._schedule.on_request = True

    def read_chunk_tokens(self, chunk_tokens: int | None) -> int | None:
        """See `options.read_chunk_tokens`, for the policies of this cache."""
        return read_chunk_tokens(chunk_tokens, self._table)

    # -- going back ------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The present state, to `rewind` to. Valid for this cache and its forks, until the next cut or reordering, or
        until the cache is rewound or cropped to a point before it."""
        self._refuse_broken()
        self._schedule.refuse_unfinished(self._progress.columns)
        mark = Mark.of(self._progress, self.evictable_layers, self.sliding_layers)
        self._marks.add(mark)
        return mark

    def rewind(self, mark: Mark | None = None) -> None:
        """Go back to a mark, or to the last cut: another question finds the cache as the first one did.

        Raises:
            CacheStateError: nothing was cut yet, or the entries of the mark are gone.
        """
        if self._progress.forward is not None and self._progress.forward.cutting:
            self._refuse_broken()
        mark = mark if mark is not None else self._marks.last_cut
        if mark is None or mark not in self._marks:
            none = "no mark, and an online policy makes no cut to go back to" if self._online else "no cut yet"
            raise CacheStateError(
                expected="a mark of this cache, taken since the last cut, with its entries still held",
                received=none
                if mark is None
                else "a mark of another cache, or from before a cut, a reordering, a reset or a rewind further back",
                remedy="take a new mark() after the text has been ingested",
            )
        mark.restore(self._progress, self.evictable_layers, self.sliding_layers)
        self._seen.truncate(mark.columns)
        self._schedule.coming = 0
        self._marks.forget_after(mark.columns)
        self._record_all()

    def fork(self) -> KeepCache:
        """An independent cache with the same content; kept entries are shared until one of the two writes."""
        self._refuse_broken()
        twin = copy.copy(self)
        twin._schedule = copy.copy(self._schedule)
        twin._progress = copy.copy(self._progress)
        twin._progress.lengths = list(self._progress.lengths)
        twin._progress.notes = list(self._progress.notes)
        twin.layers = [copy.copy(layer) for layer in self.layers]
        for layer in twin.layers:
            layer.progress = twin._progress
        for layer in twin.evictable_layers:
            layer.branch()
        twin._seen = self._seen.copy()
        twin._marks = self._marks.copy()
        twin._ledger = new_ledger(twin.evictable_layers, twin.sliding_layers, twin._progress)
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
        self._schedule.refuse_unfinished(self._progress.columns)
        progress = self._progress
        remove = -tokens_to_remove if tokens_to_remove <= 0 else progress.columns - tokens_to_remove
        if remove <= 0:
            return
        remedy = "use rewind(), which goes back to the last cut exactly"
        if self._online:
            remedy = "take a mark() first and rewind to it"
        gone = crop_layers(self.evictable_layers, self.sliding_layers, remove, remedy)
        progress.columns -= remove
        self._seen.truncate(progress.columns)
        progress.lengths = [length - count for length, count in zip(progress.lengths, gone, strict=True)]
        self._marks.forget_after(progress.columns)
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
        """Repeat each row `repeats` times, at least once."""
        self._refuse_broken()
        if repeats < 1:
            raise _no_rows(f"{repeats} repeats of each row")
        super().batch_repeat_interleave(repeats)
        self._rows_changed([row for row in range(len(self._progress.lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some rows, by number or by a mask."""
        self._refuse_broken()
        held = len(self._progress.lengths)
        try:
            rows = torch.arange(held)[indices.cpu()].tolist()
        except IndexError:
            raise _no_rows(f"rows {indices.tolist()} of {held}") from None
        if held and not rows:
            raise _no_rows(f"none of {held} rows")
        super().batch_select_indices(indices)
        self._rows_changed(rows)

    @classmethod
    def stack(cls, caches: Sequence[KeepCache]) -> KeepCache:
        """The rows of several caches of one model as one cache, to decode together; the entries are copied.

        Rows may come from different texts, policies and budgets. They keep what they hold: the new cache is not cut
        again.

        Args:
            caches: at least one, each of which holds a text.

        Raises:
            CacheStateError: no caches, an empty one, or caches of different models.
            UnsupportedError: rows of different length, for models with sliding-window layers.
        """
        return stack_caches(cls, caches)

    def begin_with(
        self,
        lengths: Sequence[int],
        columns: int,
        windows: Sequence[Window] = (),
        *,
        notes: Sequence[str] = (),
        seconds: float = 0.0,
        ids: Tensor | None = None,
    ) -> None:
        """Go on from entries that were put into the layers' stores by somebody else, as after a cut.

        Args:
            lengths: logical length of each row.
            columns: tokens seen, padding included.
            windows: what sliding layers hold; none if they have it already.
            notes: what the policy had to change.
            seconds: that the cut took.
            ids: `[B, columns]` the tokens, for policies that repeat them at a later cut.
        """
        if ids is not None and self._passes:
            self._seen.add(ids, None)
        for layer, window in zip(self.sliding_layers if windows else (), windows, strict=True):
            layer.restore(window)
        for layer in self.evictable_layers:
            layer.is_initialized = True
        self._progress.lengths, self._progress.columns = list(lengths), columns
        self._progress.add_notes(notes)
        self._progress.evict_seconds += seconds
        self._schedule.cuts += 1
        self._move_up()
        self._ledger.restart()
        if not self._online:  # a mark keeps a copy of what it goes back to
            self._set_last_cut(self.mark())

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
            "cuts": self._schedule.cuts,
            "seen": torch.stack(self._seen.rows()).tolist() if self._seen.columns else None,
            "repeat_prompt": asdict(self.repeat_prompt) if self._passes else None,
            "last_cut": None if self._marks.last_cut is None else self._marks.last_cut.to_dict(),
        }

    def last_windows(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """What each sliding layer held at the last cut; for `saving`."""
        mark = self._marks.last_cut
        return [] if mark is None else [(keys, values) for keys, values, _ in mark.windows]

    def import_progress(
        self, progress: dict[str, Any], peak_bytes: int, windows: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> None:
        """Go on from what `export_progress` and `last_windows` gave; for `saving`."""
        self._progress.lengths, self._progress.columns = progress["lengths"], progress["columns"]
        self._progress.notes, self._schedule.cuts = progress["notes"], progress["cuts"]
        if self._passes and progress.get("seen"):
            ids = torch.tensor(progress["seen"], dtype=torch.int32)
            self._seen.add(ids, ids >= 0)
            self.repeat_prompt = RepeatPrompt(**{name: tuple(x) for name, x in progress["repeat_prompt"].items()})
        if progress["last_cut"] is not None:
            mark = Mark.from_dict(progress["last_cut"], windows)
            self._marks.add(mark)
            self._set_last_cut(mark)
        self._move_up()
        self._ledger.restart()
        self._ledger.peak_bytes = peak_bytes

    def refuse_unusable(self) -> None:
        """Raise where the cache is no whole text: after a failed forward, or in the middle of a prompt."""
        self._refuse_broken()
        self._schedule.refuse_unfinished(self._progress.columns)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._schedule.restart()
        self._marks = Marks()
        self._new_columns = 0
        self._seen = SeenTokens()

    def _move_up(self) -> None:
        for layer in self.keep_layers if self.rerotate_keys else ():
            layer.move_up()

    def _record_all(self) -> None:
        for layer in self.layers:
            layer.record()

    def _rows_changed(self, rows: list[int]) -> None:
        self._progress.lengths = [self._progress.lengths[row] for row in rows] if self._progress.lengths else []
        self._marks = Marks()
        self._seen.select(rows)
        self._record_all()

    def _refuse_broken(self) -> None:
        if self.is_broken:
            back = (
                "(mark) will do if a mark was taken before" if self._online else "() will do if nothing was being cut"
            )
            raise CacheStateError(
                expected="a cache whose last forward went through",
                received="one that an exception left with layers of different length",
                remedy=f"call cache.reset() and process the text again; cache.rewind{back}",
            )
        self._progress.forward = None  # one that was refused before a layer ran


def _no_rows(received: str) -> CacheStateError:
    return CacheStateError(
        expected="at least one row that the cache holds",
        received=received,
        remedy="to hold nothing call cache.reset(); rows are there once a text has been processed",
    )
