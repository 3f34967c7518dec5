"""One prefill from which many policies and budgets are cut: what each of them would have seen is kept meanwhile.

A comparison of policies asks all of them about the same text. The text is processed once; the dense keys and values,
and the queries that the policies judge by, stay until the object is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch

from kvkeep.budget import Budget
from kvkeep.errors import PolicyError
from kvkeep.hf.budgets import cell_budgets, check_kept
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.intake import question_spans
from kvkeep.hf.layers import KeepLayer, cut_together
from kvkeep.hf.planning import plan_cache
from kvkeep.hf.policy_table import PolicyLike, policy_table
from kvkeep.hf.recorder import Recorder
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.second_pass import read_alike, score_bytes
from kvkeep.hf.spans import Span, protected_entries
from kvkeep.hf.support import CACHE_ARGUMENT, LayerPlan, plan_model
from kvkeep.observation import Needs, Observation
from kvkeep.policies.protocols import chosen_masks
from kvkeep.store import Held
from kvkeep.store.memory import nbytes


class SharedPrompt:
    """A text that was processed once, to be cut as often as wanted.

    Args:
        model: a supported model.
        ids: the text's tokens.
        policies: those that `cut` will be asked for; what they need is gathered.
        question: positions `(start, end)` of the question, where the text ends with it and policies may see it.
        repeat_prompt: as for `KeepCache`.

    Attributes:
        length: tokens of the text.
        prefill_seconds: of the forward, without second passes.

    Raises:
        PolicyError: an unknown policy.
        CacheStateError: no tokens.
    """

    def __init__(
        self,
        model: Any,
        ids: Sequence[int],
        policies: Iterable[PolicyLike],
        *,
        question: Span | None = None,
        repeat_prompt: RepeatPrompt | None = None,
    ) -> None:
        self.model = model
        self.repeat_prompt = repeat_prompt
        self._ids = torch.tensor([list(ids)], dtype=torch.long)
        self.length = len(ids)
        self.question = question
        self._needs = _needs_of(policies, plan_model(model))
        recorder = Recorder(self._needs)
        # Whatever the recorder keeps is dropped with this cache; the windows of sliding layers are taken from it.
        cache = KeepCache(model, recorder, entries=1, question=question, repeat_prompt=repeat_prompt)
        started = time.perf_counter()
        with torch.no_grad():
            inputs = self._ids.to(model.device)
            model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        self.prefill_seconds = time.perf_counter() - started - cache.evict_seconds
        self._pass_seconds = cache.second_pass_seconds
        self._windows = [layer.snapshot() for layer in cache.sliding_layers]
        self._observed = recorder.observations
        self._by_queries: dict[int | None, list[Observation]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept: keys, values, queries, and what second passes gave; attention summaries come on top.

        `shared_prompt_bytes` tells them before.
        """
        tensors = (t for o in self._observed for t in (o.keys, o.values, o.queries, *o.second_passes.values()))
        return sum(nbytes(t) for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())

    def cut(self, policy: PolicyLike, budget: Budget | None = None, *, protect: Sequence[Span] = ()) -> KeepCache:
        """The cache that `KeepCache(model, policy, budget=budget)` holds after this text.

        Its ledger's peak is what the text alone would have needed, by `plan_cache`, where one policy governs all
        layers; the shared prefill is not counted. A second pass is run once; its time counts for each policy that
        needs it, with what others that read alike wanted of it.

        Args:
            policy: one of those that were announced, or one that needs no more than they.
            budget: as for `KeepCache`; None for policy "full".
            protect: as for `KeepCache`.

        Raises:
            BudgetError: as for `KeepCache`.
            PolicyError: a policy that needs what was not gathered.
        """
        cache = KeepCache(
            self.model,
            policy,
            budget=budget,
            protect=protect,
            question=self.question,
            repeat_prompt=self.repeat_prompt,
        )
        layers = cache.keep_layers
        missing = next((layer.policy for layer in layers if not self._has(layer.policy.needs())), None)
        if missing is not None:
            raise PolicyError(
                expected="a policy that was announced when the text was processed",
                received=f"{missing}, which needs {missing.needs()}; gathered were {self._needs}",
                remedy="name it in SharedPrompt(policies=...)",
            )
        started = time.perf_counter()
        whole = cell_budgets(
            cache.budget, [self.length], plan_model(self.model), [layer.policy for layer in layers], cache.protect
        )
        spans = question_spans(cache.question, [self.length])
        held, notes = [], list[str]()
        for index, layer in enumerate(layers):
            observation = self._observation(index, layer, whole[0], spans[0] if spans else None)
            rows = Held((0, 1), observation.keys, observation.values, observation.positions, observation.valid)
            judgement = layer.policy.judge(observation)
            if layer.policy.scope == "layer":
                layer.cut(chosen_masks(layer.policy, [judgement]), [rows])
            else:
                layer.judged = [judgement]
            notes.extend(judgement.notes)
            held.append([rows])
        cut_together(layers, held)
        check_kept(layers, whole)
        passes = {each for layer in layers for each in layer.policy.needs().second_passes}
        # Passes that one reading served count all of it, each of them.
        seconds = time.perf_counter() - started
        seconds += sum(max(self._pass_seconds[each] for each in alike) for alike in read_alike(passes))
        cache.begin_with([self.length], self.length, self._windows, notes=notes, seconds=seconds, ids=self._ids)
        if all(layer.policy == layers[0].policy for layer in layers):
            alone = plan_cache(self.model, layers[0].policy, cache.budget, self.length, self.repeat_prompt)
            cache.ledger.peak_bytes = alone.peak_bytes
        return cache

    def _has(self, needs: Needs) -> bool:
        return (needs | self._needs) == self._needs

    def _observation(self, index: int, layer: KeepLayer, budget: int, question: tuple[int, int] | None) -> Observation:
        needed = layer.policy.needs().queries
        if needed not in self._by_queries:
            self._by_queries[needed] = [_with_queries(observation, needed) for observation in self._observed]
        protected, count = protected_entries(layer.protect, self._observed[index], self.length)
        return self._by_queries[needed][index].for_cut(
            budget=budget,
            ordinal=layer.ordinal,
            layers=layer.layers,
            question=question,
            protected=protected,
            protected_positions=count,
        )


def shared_prompt_bytes(model: Any, policies: Iterable[PolicyLike], length: int) -> int:
    """What `SharedPrompt.nbytes` will be; nothing is run, and `planning.empty_model` will do.

    Args:
        model: a supported model.
        policies: as for `SharedPrompt`.
        length: tokens of the text.
    """
    plans = plan_model(model)
    needs = _needs_of(policies, plans)
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    queries = length if needs.queries is None else min(needs.queries, length)
    total = 0
    for shape in (plan.shape for plan in plans if plan.window is None):
        entries = length * shape.kv_heads * shape.entry_bytes
        total += entries + queries * heads * shape.entry_bytes // 2  # a query is as large as a key
        total += len(needs.second_passes) * score_bytes(shape, length)
    return total


def _needs_of(policies: Iterable[PolicyLike], plans: Sequence[LayerPlan]) -> Needs:
    """What all of them ask for."""
    layers = [plan.index for plan in plans if plan.window is None]
    tables = [policy_table(policy, layers, len(plans)) for policy in policies]
    return reduce(or_, (policy.needs() for table in tables for policy in table), Needs())


def _with_queries(observation: Observation, count: int | None) -> Observation:
    """The same entries, judged by the last `count` queries; None for all of them."""
    have = observation.queries.shape[2]
    if count is None or count >= have:
        return replace(observation)
    last = slice(have - count, have)
    return replace(
        observation, queries=observation.queries[:, :, last], query_positions=observation.query_positions[:, last]
    )
