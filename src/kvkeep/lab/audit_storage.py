"""One ranking, stored in different ways; and a ranking by the document's own rows.

ContourKV (arXiv 2608.25230): a policy that lets heads compete gains most where nobody makes it pay for the memory that
uniform tensors take. The same selection is therefore stored in each way that is in use, and each is weighed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.budget import POSITION_BYTES
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.dense import uniform_cache
from kvkeep.hf.second_pass import look_back_bytes, score_bytes
from kvkeep.hf.support import plan_model
from kvkeep.hf.weighing import CacheBytes, measure_bytes
from kvkeep.observation import Needs, Observation, SecondPass
from kvkeep.policies import Judgement, PromptPolicy
from kvkeep.policies.allocators import top_mask
from kvkeep.policies.protocols import Scope, chosen_masks
from kvkeep.results import Memory

# In the order in which they are shown.
STORAGES = {
    "not-enforced": "uniform tensors: every head of a layer holds as many entries as its widest cell, filled by rank",
    "capped": "uniform tensors: no cell holds more than the average, so that what wide cells lose nobody gets",
    "ragged": "every cell holds what the policy gave it, and nothing else is held",
    "masked": "everything is held; the attention is told to leave out what the policy would delete",
}


@dataclass(frozen=True)
class Stored:
    """A policy's selection, changed to what a way of storing it makes of it.

    Attributes:
        policy: ranks and selects.
        storage: `not-enforced`, `capped` or `ragged`.
        entries: that the policy is told to keep in a cell on average, whatever the cache may hold.
    """

    policy: PromptPolicy
    storage: str
    entries: int

    @property
    def scope(self) -> Scope:
        """The policy's."""
        return self.policy.scope

    def needs(self) -> Needs:
        """The policy's."""
        return self.policy.needs()

    def judge(self, observation: Observation) -> Judgement:
        """As the policy does it at its own budget."""
        return self.policy.judge(observation.for_cut(budget=self.entries))

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """What the policy chooses; widened to each layer's widest cell by the next in rank, or cut to the average."""
        chosen = chosen_masks(self.policy, judgements)
        if self.storage == "ragged":
            return chosen
        change = _widened if self.storage == "not-enforced" else _capped
        return [change(judgement, mask) for judgement, mask in zip(judgements, chosen, strict=True)]


def _widened(judgement: Judgement, mask: Tensor) -> Tensor:
    widest = mask.sum(-1).amax(-1, keepdim=True)  # [B, 1]
    ranked = judgement.ranked_scores().masked_fill(mask, torch.inf)  # what was chosen stays, in chunks too
    return top_mask(ranked, torch.minimum(judgement.available, widest))


def _capped(judgement: Judgement, mask: Tensor) -> Tensor:
    ranked = judgement.ranked_scores().masked_fill(~mask, -torch.inf)
    return top_mask(ranked, mask.sum(-1).clamp(max=judgement.budget)) & mask


@dataclass(frozen=True)
class DocumentRows:
    """A policy that ranks by the queries of the document alone, though the question stands behind it.

    The text is still cut when the question has been read, and the question's entries compete like all others; the
    newest positions that a policy protects are the question's. The paper's control: it tells what a ranking owes to the
    question from what it owes to the place of the cut.

    Attributes:
        policy: ranks and selects.
        question_tokens: at the end of the text; so many more queries must be gathered.
    """

    policy: PromptPolicy
    question_tokens: int

    @property
    def scope(self) -> Scope:
        """The policy's."""
        return self.policy.scope

    def needs(self) -> Needs:
        """The policy's needs before the question."""
        needs = self.policy.needs()
        return needs if not needs.queries else replace(needs, queries=needs.queries + self.question_tokens)

    def judge(self, observation: Observation) -> Judgement:
        """As the policy does it, without the question's queries."""
        end = observation.queries.shape[2] - self.question_tokens
        wanted = self.policy.needs().queries
        rows = slice(0 if wanted is None else max(0, end - wanted), max(0, end))
        document = replace(
            observation,
            queries=observation.queries[:, :, rows],
            query_positions=observation.query_positions[:, rows],
            question=None,
        )
        return self.policy.judge(document)

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """As the policy does it."""
        return self.policy.choose(judgements)


def ragged_memory(cache: KeepCache, scope: Scope, passes: Iterable[SecondPass] = ()) -> Memory:
    """What a cut cache of one text holds; its peak is that of the text alone.

    Args:
        cache: right after its cut.
        scope: of the policy that cut it.
        passes: that it makes the model repeat the text for.
    """
    after = [layer.store.bytes().total for layer in cache.keep_layers]
    peak = peak_bytes(cache, scope, after, POSITION_BYTES, passes)
    return Memory(**(cache.ledger.to_dict() | {"peak_bytes": peak}))


def uniform_memory(cache: KeepCache, scope: Scope, passes: Iterable[SecondPass] = ()) -> Memory:
    """What the same entries weigh in uniform tensors, which are made and weighed; padding is slack.

    Args:
        cache: right after its cut.
        scope: of the policy that cut it.
        passes: as for `ragged_memory`.
    """
    weighed = measure_bytes(uniform_cache(cache))
    layers = _evictable(cache, weighed)
    ledger = cache.ledger
    payload = sum(
        int(layer.store.prefix_counts().sum()) * layer.store.entry_bytes for layer in cache.keep_layers
    )  # as tensors show it
    return Memory(
        **(
            ledger.to_dict()
            | _parts(ledger.full_bytes, payload=payload, slack=sum(layers) - payload)
            | {"peak_bytes": peak_bytes(cache, scope, layers, passes=passes)}
        )
    )


def masked_memory(full: KeepCache, dense: Any, kept: dict[int, Tensor]) -> Memory:
    """What a whole cache weighs beside the masks that hide a part of it, which are metadata.

    Args:
        full: a KeepCache that keeps everything; tells lengths.
        dense: the same entries in a DynamicCache.
        kept: the masks, one byte an entry.
    """
    payload = sum(_evictable(full, measure_bytes(dense)))
    masks = measure_bytes(kept).total
    held = _parts(full.ledger.full_bytes, payload=payload, metadata=masks)
    peak = payload + masks + full.ledger.window_bytes
    return Memory(**(full.ledger.to_dict() | held | {"peak_bytes": peak}))


def peak_bytes(
    cache: KeepCache,
    scope: Scope,
    after: Sequence[int],
    position_bytes: int = 0,
    passes: Iterable[SecondPass] = (),
) -> int:
    """The most held at once while one text is processed and cut.

    A policy that decides layer by layer holds one dense layer beside what it keeps of it and of those before. One that
    waits for all layers holds all of them dense, then cuts one by one. While a text is repeated all layers are dense,
    and one of them is held a second time, with the numbers that the passes have found so far.

    Args:
        cache: of the text.
        scope: of the policy.
        after: bytes of each evictable layer after its cut.
        position_bytes: that a dense layer holds for each token beside keys and values.
        passes: that the text is repeated for.
    """
    repeats = list(passes)
    length = cache.lengths[0]
    left = list(after)
    held = peak = 0
    waiting: list[tuple[int, int]] = []
    for plan in plan_model(cache.model):
        if plan.window is not None:
            held += plan.window_bytes(length)
            peak = max(peak, held)
            continue
        dense, small = length * (plan.shape.kv_heads * plan.shape.entry_bytes + position_bytes), left.pop(0)
        if scope == "model" or repeats:
            held += dense
            waiting.append((dense, small))
            peak = max(peak, held)
        else:
            peak = max(peak, held + dense + small)
            held += small
    if repeats:
        shapes = [plan.shape for plan in plan_model(cache.model) if plan.window is None]
        beside = max(look_back_bytes(shape, length, cache.repeat_prompt, each) for shape in shapes for each in repeats)
        scores = len(repeats) * sum(score_bytes(shape, length) for shape in shapes)
        peak, held = held + beside + scores, held + scores
    for dense, small in waiting:
        peak = max(peak, held + small)
        held += small - dense
    return peak


def _evictable(cache: KeepCache, weighed: CacheBytes) -> list[int]:
    """Keys and values of each evictable layer in a DynamicCache."""
    by_name = {layer.name: layer.keys_values for layer in weighed.layers}
    return [by_name[f"layers[{layer.index}]"] for layer in cache.keep_layers]


def _parts(full_bytes: int, *, payload: int, slack: int = 0, metadata: int = 0) -> dict[str, int | float]:
    held = payload + slack + metadata
    return {
        "held_bytes": held,
        "payload_bytes": payload,
        "slack_bytes": slack,
        "metadata_bytes": metadata,
        "state_bytes": 0,
        "fraction": held / full_bytes,
    }
