"""Caches of contexts under one policy, and a count of those of which something was really evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.errors import CacheStateError, ResultsError
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import Full, parse_policy, policy_string
from kvkeep.policies.online import OnlinePolicy

Short = Literal["count", "refuse"]


@dataclass
class Counts:
    """What became of the contexts so far.

    Attributes:
        contexts: that were read.
        evicted: of which a cell holds fewer entries than there were.
        held_bytes: over all contexts, right after their cut.
        full_bytes: of the full caches of the same contexts.
    """

    contexts: int = 0
    evicted: int = 0
    held_bytes: int = 0
    full_bytes: int = 0


class Caches:
    """Reads contexts and cuts them.

    Args:
        model: a supported model.
        policy: as on the command line.
        budget: None for policy full.
        repeat_prompt: for policies that make the model repeat a text.
        short: what to do about a context that is too short to evict from: "count" it, or "refuse" it.
    """

    def __init__(
        self, model: Any, policy: str, budget: Budget | None, repeat_prompt: RepeatPrompt, short: Short = "count"
    ) -> None:
        parsed = parse_policy(policy)
        self.policy, self.counts = policy_string(parsed), Counts()
        self.is_online = isinstance(parsed, OnlinePolicy)
        self._keeps_all = isinstance(parsed, Full)
        self.budget = Budget(compression_ratio=0.0) if self._keeps_all else budget
        self._model, self._repeat_prompt, self._short = model, repeat_prompt, short
        self.new()  # refuses what makes no sense before anything is run

    def new(self) -> KeepCache:
        """An empty cache."""
        return KeepCache(self._model, self.policy, budget=self.budget, repeat_prompt=self._repeat_prompt)

    def read(self, ids: Sequence[int]) -> KeepCache | None:
        """The cache of a context after its cut; None where there is nothing to read.

        Raises:
            CacheStateError: the context is too short to evict from, and such contexts are refused.
        """
        if not ids:
            self._count(None, 0)
            return None
        cache = self.new()
        self.forward(cache, ids, logits=1)
        self.count(cache)
        return cache

    def forward(self, cache: KeepCache | None, ids: Sequence[int], logits: int) -> Tensor:
        """Log-probabilities `[logits, vocabulary]`, float32, behind the last `logits` of some tokens."""
        inputs = torch.tensor([list(ids)], dtype=torch.long, device=self._model.device)
        held = {} if cache is None else {CACHE_ARGUMENT: cache}
        with torch.no_grad():
            output = self._model(input_ids=inputs, use_cache=cache is not None, logits_to_keep=logits, **held)
        predicted: Tensor = output.logits[0].float().log_softmax(-1)
        return predicted

    def count(self, cache: KeepCache) -> None:
        """Add a context that has just been cut to the counts."""
        self._count(cache, cache.lengths[0])

    def check(self, before: Counts) -> None:
        """Refuse results that a policy has had no part in.

        Args:
            before: the counts when the requests came.

        Raises:
            ResultsError: there were contexts, and nothing was evicted from any of them.
        """
        contexts = self.counts.contexts - before.contexts
        if contexts and self.counts.evicted == before.evicted and not self._keeps_all:
            raise ResultsError(
                expected=f"contexts that {self.policy} at {self.budget} can evict from",
                received=f"{contexts} contexts, all of which were kept whole",
                remedy="use longer contexts (more few-shot examples), a tighter budget, or policy=full",
            )

    def describe(self) -> dict[str, Any]:
        """Policy, budget and counts, as they go into the harness's results."""
        counts = self.counts
        return {
            "policy": self.policy,
            "budget": {} if self.budget is None else self.budget.describe(),
            "protocol": "query-aware",  # a prompt of the harness ends with what it asks
            "contexts": counts.contexts,
            "evicted_share": counts.evicted / counts.contexts if counts.contexts else None,
            "held_fraction": counts.held_bytes / counts.full_bytes if counts.full_bytes else None,
        }

    def _count(self, cache: KeepCache | None, length: int) -> None:
        ledger = None if cache is None else cache.ledger.to_dict()
        evicted = ledger is not None and ledger["entries"] < ledger["entries_full"]
        if self._short == "refuse" and not evicted and not self._keeps_all:
            raise CacheStateError(
                expected=f"a context that is long enough for {self.policy} at {self.budget} to evict from",
                received=f"one of {length} tokens, the last of which waits for the continuation",
                remedy="use more few-shot examples or a tighter budget; short_contexts=count reports their share",
            )
        self.counts.contexts += 1
        self.counts.evicted += evicted
        if ledger is not None:
            self.counts.held_bytes += ledger["held_bytes"]
            self.counts.full_bytes += ledger["full_bytes"]
