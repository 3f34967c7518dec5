"""The evictable layers of a KeepCache: what one layer does during a forward."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from kvkeep.attention import attend, attend_prompt
from kvkeep.calibrated import LayerStatistics
from kvkeep.hf.evictable import EvictableLayer
from kvkeep.hf.progress import Progress, running
from kvkeep.hf.rerotation import KeyRerotation, with_prefix
from kvkeep.hf.spans import Span, protected_entries
from kvkeep.hf.support import output_weight_of, rotary_of
from kvkeep.hf.text_queries import TextQueries
from kvkeep.observation import Observation, SecondPass
from kvkeep.policies.protocols import Judgement, PromptPolicy, chosen_masks
from kvkeep.store import Held, RaggedLayer
from kvkeep.store.prefix import Prefix


class KeepLayer(EvictableLayer):
    """A layer that is cut where a text ends.

    Args:
        index: of the layer in the model.
        ordinal: which of `layers` layers with this policy it is, from 0.
        layers: layers that share the policy's budget.
        policy: decides what stays.
        protect: position ranges that the caller protects, as slices `(start, end)`.
        progress: shared by all layers of the cache.
        statistics: what a calibration knows of the layer, by the places that policies name.
        rerotation: rotates kept keys anew after a cut; None: they keep the positions that they were made for.
    """

    store: RaggedLayer

    def __init__(
        self,
        *,
        index: int,
        ordinal: int,
        layers: int,
        policy: PromptPolicy,
        protect: Sequence[Span],
        progress: Progress,
        statistics: Mapping[str, LayerStatistics] | None = None,
        rerotation: KeyRerotation | None = None,
    ) -> None:
        super().__init__(index, progress)
        self.ordinal, self.layers = ordinal, layers
        self.policy = policy
        self.protect = protect
        self.statistics = statistics or {}
        self.rerotation = rerotation
        self.store = RaggedLayer()
        self.judged: list[Judgement] = []  # those that wait for other layers
        # What second passes have seen, `[B, H_kv, L]` by position, until the layer is judged.
        self.repeated: dict[SecondPass, Tensor] = {}
        self._queries = TextQueries(policy.needs().queries)
        self._waiting: tuple[nn.Module, float] | None = None  # module and scaling, while it waits for second passes
        self._moved: tuple[Prefix, Prefix] | None = None  # the store's prefix, and the one that attention reads

    # -- what transformers and the cache ask -----------------------------------------------------------------------

    def reset(self) -> None:
        """Hold nothing."""
        self.store.reset()
        self.judged.clear()
        self.repeated.clear()
        self._queries.clear()
        self._waiting = None
        self._moved = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        moved, self._moved = self._moved, None
        self.store.reorder(beam_idx)
        if moved is not None and self.store.prefix is not None:
            same, prefix = moved[1] is moved[0], self.store.prefix
            self._moved = prefix, prefix if same else replace(prefix, keys=moved[1].select(beam_idx).keys)
        self._queries.select(beam_idx)
        if moved is not None:
            self.count_state()

    def snapshot(self) -> int:
        """Columns of the tail: what was kept at the last cut stays as it is."""
        return self.store.tail_length

    def restore(self, snapshot: int) -> None:
        """Forget what came after a snapshot. A forward that only appended is undone, also half of one."""
        self.store.rewind(snapshot)

    def branch(self) -> None:
        """Be independent of the layer that this one was copied from."""
        self.store = self.store.fork()
        self.judged, self.repeated, self._queries = [], {}, self._queries.copy()

    def export(self) -> dict[str, Tensor]:
        """The entries as they go into a file, without slack."""
        used = self.store.fork()
        used.trim()
        return used.tensors()

    def load(self, tensors: Mapping[str, Tensor], batch: int, kv_heads: int) -> None:
        """Hold what `export` gave."""
        self.store.load_tensors(tensors, batch, kv_heads)

    # -- the forward -----------------------------------------------------------------------------------------------

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the new tokens, attend, and cut if the text ends here; arguments as for `EvictableLayer.attend`."""
        forward = running(self.progress)
        forward.touched = True
        alone = self.store.prefix is None and self.store.tail_length == 0
        positions = forward.positions.to(key.device)
        valid = None if forward.valid is None else forward.valid.to(key.device)
        self.store.append(key, value, positions, valid, forward.reserve)
        self.is_initialized = True
        del key, value  # the store has them; a cut must be able to free them
        output = self._attend_alone(query, valid, scaling) if alone else attend(query, self._readable(), scaling)
        if forward.cutting:
            self._queries.add(query, positions, valid)
            if forward.second_passes:
                self._wait(module, scaling)
            else:
                self._judge(module, scaling)
        elif forward.coming:
            self._queries.add(query, positions, valid)
            self._queries.forget_old()
        self.count_state()
        return output.transpose(1, 2).contiguous()

    def judge_waiting(self) -> None:
        """Judge, and cut where the policy decides layer by layer, now that the second passes are done."""
        if self._waiting is None:
            return
        module, scaling = self._waiting
        self._waiting = None
        self._judge(module, scaling)
        self.count_state()

    def count_state(self) -> None:
        """Tell the ledger what is remembered of the text beside its entries."""
        tensors = self._queries.tensors()
        if self._moved is not None and self._moved[1] is not self._moved[0]:
            tensors.append(self._moved[1].keys)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in [*tensors, *self.repeated.values()]}
        self.store.state_bytes = sum(storage.nbytes() for storage in held.values())
        self.record()

    def forget_queries(self) -> None:
        """Forget the queries of a text whose end was to come."""
        self._queries.clear()
        self.count_state()

    def cut(self, masks: Sequence[Tensor], held: Sequence[Held] = ()) -> None:
        """Keep what the masks name.

        Args:
            masks: in the order of `judged`, or of `held`.
            held: what was judged, where it is still at hand.
        """
        self._moved = None
        self.store.cut(held or self.store.held(self._lengths), masks)
        self.judged.clear()
        self.move_up()

    def move_up(self) -> None:
        """Rotate the keys of the prefix anew, if that was asked for and they are not there yet; tell the ledger."""
        prefix, ends = self.store.prefix, self._lengths
        if self.rerotation is None or prefix is None or len(ends) != self.store.batch:
            self._moved = None
        elif self._moved is None or self._moved[0] is not prefix:
            tail = self.store.tail_counts().tolist()
            at_cut = [length - count for length, count in zip(ends, tail, strict=True)]
            self._moved = (prefix, self.rerotation.moved_up(prefix, at_cut))
        self.count_state()

    def _readable(self) -> RaggedLayer:
        """The store as attention reads it."""
        if self.rerotation is None or self.store.prefix is None:
            return self.store
        if self._moved is None or self._moved[0] is not self.store.prefix:
            self.move_up()
        return self.store if self._moved is None else with_prefix(self.store, self._moved[1])

    def _attend_alone(self, query: Tensor, valid: Tensor | None, scaling: float) -> Tensor:
        """Attention of a text with nothing before it."""
        held = self.store.held(self._lengths)
        if valid is None and len(held) == 1:
            return attend_prompt(query, held[0].keys, held[0].values, scaling)
        output = torch.zeros_like(query)
        for rows in held:  # row by row, without padding
            first, last = rows.rows
            columns = slice(None) if valid is None else valid[first]
            output[first:last, :, columns] = attend_prompt(
                query[first:last, :, columns], rows.keys, rows.values, scaling
            )
        return output

    @property
    def _lengths(self) -> list[int]:
        forward = self.progress.forward
        return self.progress.lengths if forward is None else forward.lengths

    def _wait(self, module: nn.Module, scaling: float) -> None:
        """Put off what `_judge` does; meanwhile no more queries are held than the policy wants."""
        self._queries.forget_old(leave_shape=True)
        self._waiting = module, scaling

    def _judge(self, module: nn.Module, scaling: float) -> None:
        started = time.perf_counter()
        forward = running(self.progress)
        held = self.store.held(self._lengths)
        judgements = [self.policy.judge(self._observe(module, rows, scaling)) for rows in held]
        for judgement in judgements:
            self.progress.add_notes(judgement.notes)
        self.repeated.clear()
        if forward.coming:
            self._queries.forget_old()  # a chunk may be shorter than the window of queries that judges the next one
        else:
            self._queries.clear()
        if self.policy.scope == "layer":
            self.cut([chosen_masks(self.policy, [judgement])[0] for judgement in judgements], held)
        else:
            self.judged = judgements
        self.progress.evict_seconds += time.perf_counter() - started

    def _observe(self, module: nn.Module, held: Held, scaling: float) -> Observation:
        forward = self.progress.forward
        if forward is None:
            raise RuntimeError("no forward is running")
        first, last = held.rows
        needs = self.policy.needs()
        queries, query_positions = self._queries.of_rows(first, last)
        length = forward.lengths[first]
        protected, protected_positions = protected_entries(self.protect, held, forward.text_lengths[first])
        return Observation(
            queries=queries,
            query_positions=query_positions,
            keys=held.keys,
            values=held.values,
            positions=held.positions,
            valid=held.valid,
            scaling=scaling,
            length=length,
            budget=forward.budgets[first],
            layer=self.index,
            ordinal=self.ordinal,
            layers=self.layers,
            question=forward.questions[first] if forward.questions else None,
            protected=protected,
            protected_positions=protected_positions,
            rotary=rotary_of(forward.decoder, module) if needs.rotary else None,
            output_weight=output_weight_of(module, queries.shape[1]) if needs.output_weight else None,
            second_passes={
                # By position there, by entry here; a missing slot has some position or other.
                each: self.repeated[each][first:last].gather(2, held.positions.masked_fill(~held.valid, 0))
                for each in needs.second_passes
            },
            statistics={place: self.statistics[place].to(held.keys.device) for place in needs.statistics},
        )


def cut_together(layers: Sequence[KeepLayer], held: Sequence[Sequence[Held]] | None = None) -> None:
    """Cut the layers that have been judged and wait for one another, policy by policy.

    Args:
        layers: all evictable layers; those that were cut by themselves are left alone.
        held: what was judged of each, where the layer does not hold it itself.
    """
    while waiting := [layer for layer in layers if layer.judged]:
        policy = waiting[0].policy
        alike = [layer for layer in waiting if layer.policy == policy]
        judgements = [judgement for layer in alike for judgement in layer.judged]
        # Rows that came one by one share no budget: each is chosen for by itself, over all its layers.
        groups = len(alike[0].judged)
        masks: list[list[Tensor]] = [[] for _ in alike]
        for group in range(groups):
            chosen = chosen_masks(policy, judgements[group::groups])
            for kept, mask in zip(masks, chosen, strict=True):
                kept.append(mask)
        for layer, kept in zip(alike, masks, strict=True):
            layer.cut(kept, () if held is None else held[layers.index(layer)])
