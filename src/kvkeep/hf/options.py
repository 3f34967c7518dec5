"""What a caller asks of a cache, read and checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from kvkeep.budget import Budget
from kvkeep.errors import BudgetError, CacheStateError, PolicyError
from kvkeep.hf.caps import refuse_for_online
from kvkeep.hf.fitting import fitted
from kvkeep.hf.policy_table import PolicyLike, online_policy, policy_table
from kvkeep.hf.rerotation import check_rerotation
from kvkeep.hf.spans import Span
from kvkeep.hf.support import LayerPlan, check_rotary, plan_model, unwrap
from kvkeep.observation import Needs
from kvkeep.policies import Full, PromptPolicy, policy_string
from kvkeep.policies.online import OnlinePolicy


@dataclass(frozen=True, eq=False)
class CacheOptions:
    """The options of a KeepCache, as they were understood.

    Attributes:
        plans: the model's layers.
        online: the policy that holds a cap at every step, fitted to the model; None where texts are cut at their end.
        table: the policy of each evictable layer where texts are cut; empty under an online one.
        budget: of the whole cache.
        protect: ranges of positions that stay.
        question: positions of the question in the prompt; None where it is hidden.
        prompt_tokens: length of a prompt that comes in chunks.
        cut_chunks: cut such a prompt after each chunk.
        rerotate_keys: rotate kept keys anew after a cut.
        needs: what the policies of the table ask for, together.
    """

    plans: Sequence[LayerPlan]
    online: OnlinePolicy | None
    table: Sequence[PromptPolicy]
    budget: Budget
    protect: tuple[Span, ...]
    question: Span | None
    prompt_tokens: int | None
    cut_chunks: bool
    rerotate_keys: bool
    needs: Needs

    @classmethod
    def read(
        cls,
        model: Any,
        policy: PolicyLike,
        budget: Budget | None,
        *,
        protect: Sequence[Span],
        question: Span | None,
        prompt_tokens: int | None,
        cut_chunks: bool,
        rerotate_keys: bool,
    ) -> CacheOptions:
        """Read the arguments of `KeepCache`; see there for what they mean and what is refused."""
        plans = plan_model(model)
        evictable = [plan.index for plan in plans if plan.window is None]
        online = online_policy(policy)
        if online:
            refuse_for_online(online, question=question, cut_chunks=cut_chunks, rerotate_keys=rerotate_keys)
        table = [] if online else policy_table(policy, evictable, len(plans))
        keeps_all = not online and all(isinstance(p, Full) for p in table)
        budget = budget or Budget(compression_ratio=0.0 if keeps_all else None)
        online = fitted(online, model, plans, budget)
        prompt_tokens = read_prompt_tokens(prompt_tokens)
        spans = tuple(read_span(span) for span in protect or ())
        question = None if question is None else read_span(question)
        cut_chunks = read_cut_chunks(cut_chunks, prompt_tokens, question, table)
        needs = reduce(or_, (policy.needs() for policy in table), Needs())
        # A repetition goes further than the text.
        if needs.rotary or needs.second_passes or (online is not None and online.needs_rotary):
            check_rotary(unwrap(model))
        if rerotate_keys:
            check_rerotation(model)
        return cls(
            plans=plans,
            online=online,
            table=table,
            budget=budget,
            protect=spans,
            question=question,
            prompt_tokens=prompt_tokens,
            cut_chunks=cut_chunks,
            rerotate_keys=rerotate_keys,
            needs=needs,
        )


def read_span(span: Any) -> Span:
    """A range of positions as a caller writes it: `(start, end)`, a range or a slice.

    Raises:
        BudgetError: something else.
    """
    if isinstance(span, range | slice) and span.step in (None, 1):
        return span.start, span.stop
    if isinstance(span, Sequence) and len(span) == 2 and all(isinstance(x, int | None) for x in span):
        return span[0], span[1]
    raise BudgetError(
        expected="a range of positions as (start, end), with whole numbers or None as in a slice",
        received=f"{span!r}",
        remedy="for example protect=[(0, 24), (-64, None)]",
    )


def read_prompt_tokens(prompt_tokens: int | None) -> int | None:
    """The length of a prompt that arrives in chunks; None for one forward.

    Raises:
        BudgetError: no whole number, or one below 1.
    """
    if prompt_tokens is not None and (not isinstance(prompt_tokens, int) or prompt_tokens < 1):
        raise BudgetError(
            expected="prompt_tokens as a whole number of at least 1",
            received=f"{prompt_tokens}",
            remedy="leave it out for one forward",
        )
    return prompt_tokens


def read_cut_chunks(
    cut_chunks: bool, prompt_tokens: int | None, question: Span | None, table: Sequence[PromptPolicy]
) -> bool:
    """Whether a prompt is cut after each of its chunks.

    Args:
        cut_chunks: what the caller asks for.
        prompt_tokens: see `read_prompt_tokens`.
        question: a visible one.
        table: the policy of each evictable layer.

    Raises:
        CacheStateError: the length of the prompt is not known, or the question would come after the first cuts.
        PolicyError: a policy that must see the whole text.
    """
    if not cut_chunks:
        return False
    if prompt_tokens is None:
        raise CacheStateError(
            expected="prompt_tokens, the length of the prompt, beside cut_chunks=True",
            received="none",
            remedy="pass prompt_tokens=input_ids.shape[1]",
        )
    if question is not None:
        raise CacheStateError(
            expected="a question that every cut can see",
            received="cut_chunks=True, which cuts most of the text before a question at its end arrives",
            remedy="leave question out, or let the prompt be cut at its end",
        )
    refuse_whole_text(table)
    return True


def read_chunk_tokens(chunk_tokens: int | None, table: Sequence[PromptPolicy]) -> int | None:
    """The size of chunks that are cut one by one; None for whole texts.

    Args:
        chunk_tokens: what the caller asks for.
        table: the policy of each evictable layer.

    Raises:
        CacheStateError: no whole number of at least 1.
        PolicyError: a policy that must see the whole text.
    """
    if chunk_tokens is None:
        return None
    if not isinstance(chunk_tokens, int) or chunk_tokens < 1:
        raise CacheStateError(
            expected="chunk_tokens as a whole number of at least 1",
            received=f"{chunk_tokens!r}",
            remedy="for example chunk_tokens=512",
        )
    refuse_whole_text(table)
    return chunk_tokens


def refuse_whole_text(table: Sequence[PromptPolicy]) -> None:
    """Raise PolicyError where a policy must see a text to its end before it can choose."""
    whole = next((policy for policy in table if policy.needs().whole_text), None)
    if whole is not None:
        raise PolicyError(
            expected="a policy that can choose before the text has ended",
            received=f"{policy_string(whole)}, which judges by the queries of the whole text",
            remedy="use one whose row in `kvkeep policies` says `chunks`, such as snapkv, tova, keydiff, knorm, frc or "
            "streaming-llm; or let the text be cut at its end",
        )
