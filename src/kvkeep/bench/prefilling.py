"""Where the caches of a sample come from: one prefill that is cut for all of them, or a prefill for each.

The shared prefill holds the dense keys and values of all layers, and the queries of every policy, until the sample is
done. Above a limit, and for policies that cannot be cut from outside, each cache reads the text by itself and holds no
more than its own peak. What it holds in the end is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.bench.settings import is_online
from kvkeep.budget import Budget
from kvkeep.errors import BudgetError
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.planning import plan_cache
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.shared_prompt import SharedPrompt, shared_prompt_bytes
from kvkeep.hf.support import CACHE_ARGUMENT, plan_model
from kvkeep.policies import parse_prompt_policy

NamedCut = tuple[str, Budget]


@dataclass(frozen=True)
class Text:
    """What is read before a cut.

    Attributes:
        ids: its tokens.
        question: positions `(start, end)` of the question, where policies may see it.
        repeat_prompt: asks for its repetition.
    """

    ids: Sequence[int]
    question: tuple[int, int] | None
    repeat_prompt: RepeatPrompt


class Prefill:
    """The caches of one text.

    Args:
        model: a supported model.
        text: that they read.
        cuts: policies and budgets that will be asked for.
        memory_limit: bytes that the shared prefill may hold; None for no limit.
    """

    def __init__(self, model: Any, text: Text, cuts: Sequence[NamedCut], memory_limit: int | None = None) -> None:
        self._model, self._text = model, text
        policies = shareable(cuts)
        self.is_shared = bool(policies) and fits(shared_prompt_bytes(model, policies, len(text.ids)), memory_limit)
        self._shared = (
            SharedPrompt(model, text.ids, policies, question=text.question, repeat_prompt=text.repeat_prompt)
            if self.is_shared
            else None
        )

    def cut(self, policy: str, budget: Budget) -> tuple[KeepCache, float]:
        """The cache of a policy at a budget, and the seconds of its prefill."""
        if self._shared is not None and not is_online(policy):
            return self._shared.cut(policy, budget), self._shared.prefill_seconds
        return self._alone(policy, budget)

    def groups(self, cuts: Sequence[NamedCut], most: int) -> Iterator[Sequence[NamedCut]]:
        """Which of the cuts are held at once: as many as may decode together, or one where memory is short.

        A policy that holds a cap while it generates is by itself too: others do not share its walk.
        """
        together = [cut for cut in cuts if not is_online(cut[0])]
        size = most if self.is_shared else 1
        for first in range(0, len(together), size):
            yield together[first : first + size]
        for cut in cuts:
            if is_online(cut[0]):
                yield [cut]

    def _alone(self, policy: str, budget: Budget) -> tuple[KeepCache, float]:
        text = self._text
        # A policy that holds a cap takes every token as it comes: it is not told which ones are the question.
        question = None if is_online(policy) else text.question
        cache = KeepCache(self._model, policy, budget=budget, question=question, repeat_prompt=text.repeat_prompt)
        ids = torch.tensor([list(text.ids)], dtype=torch.long, device=self._model.device)
        started = time.perf_counter()
        with torch.no_grad():
            self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        return cache, time.perf_counter() - started - cache.evict_seconds


def shareable(cuts: Sequence[NamedCut]) -> list[str]:
    """The policies that can be cut from a text which was processed once for all of them."""
    return [policy for policy, _ in cuts if not is_online(policy)]


def fits(needed: int, limit: int | None) -> bool:
    """Whether so many bytes are within a limit, if there is one."""
    return limit is None or needed <= limit


def check_memory(model: Any, text: Text, cuts: Sequence[NamedCut], limit: int, what: str) -> None:
    """Refuse a text of which not even one cache can be made within a limit.

    Args:
        model: a supported model.
        text: that would be read.
        cuts: policies and budgets.
        limit: bytes.
        what: names the text in the error.

    Raises:
        BudgetError: with both numbers.
    """
    length = len(text.ids)
    cuts = [cut for cut in cuts if not is_online(cut[0])]  # a cap is small beside the full cache, which is always there
    shared = shared_prompt_bytes(model, shareable(cuts), length)
    if fits(shared, limit):
        return
    alone = {
        (policy, budget): bytes_alone(model, policy, budget, length, text.repeat_prompt) for policy, budget in cuts
    }
    (policy, budget), most = max(alone.items(), key=lambda item: item[1])
    if not fits(most, limit):
        whose = f"{policy} at {budget} needs" if most < shared else "all policies together need"
        raise BudgetError(
            expected=f"a memory limit of at least {min(most, shared):,} bytes, which {whose} for the {length:,} tokens "
            f"of {what}",
            received=f"{limit:,} bytes",
            remedy="raise the limit or shorten the texts; the full cache is always among those that are measured",
        )


def bytes_alone(model: Any, policy: str, budget: Budget, length: int, repeat_prompt: RepeatPrompt) -> int:
    """The most that one cache holds while it reads a text: its planned peak, and the queries of the layer at hand."""
    parsed = parse_prompt_policy(policy)
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    wanted = parsed.needs().queries
    queries = length if wanted is None else min(wanted, length)
    vector = max(plan.shape.entry_bytes for plan in plan_model(model)) // 2
    beside: int = queries * heads * vector
    return plan_cache(model, parsed, budget, length, repeat_prompt).peak_bytes + beside
