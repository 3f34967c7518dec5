"""Single layers of a real prompt, to evict from them outside of a forward; `kvpress_worker.py` does kvpress's half."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from harness import Milliseconds
from models import prefill
from torch import Tensor

import kvkeep
from kvkeep.observation import Needs, Observation
from kvkeep.policies import Judgement, Policy, PromptPolicy, Scorer, TopK, Uniform
from kvkeep.policies.protocols import chosen_masks
from kvkeep.store import RaggedLayer

QUERIES = 64  # the largest window that is compared


@dataclass(frozen=True, eq=False)
class Layer:
    """What a prompt leaves in a layer when its attention is done.

    Attributes:
        queries: `[1, H, Q, D]` the last ones, after rotation.
        keys: `[1, H_kv, L, D]`.
        values: `[1, H_kv, L, D]`.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def evict(self, policy: PromptPolicy, ratio: float) -> tuple[RaggedLayer, Milliseconds]:
        """Score, choose and gather, as kvkeep does between a layer's attention and the next layer."""
        store = self._stored()
        started = time.perf_counter()
        held = store.held([self.length])
        judgement = policy.judge(self._observation(held[0], policy, ratio))
        store.cut(held, chosen_masks(policy, [judgement]))
        return store, Milliseconds(1000 * (time.perf_counter() - started))

    def score(self, policy: PromptPolicy, ratio: float) -> tuple[Judgement, Milliseconds]:
        """Score, and choose nothing."""
        store = self._stored()
        started = time.perf_counter()
        judgement = policy.judge(self._observation(store.held([self.length])[0], policy, ratio))
        return judgement, Milliseconds(1000 * (time.perf_counter() - started))

    def _stored(self) -> RaggedLayer:
        store = RaggedLayer()
        store.append(self.keys, self.values, torch.arange(self.length)[None])
        return store

    def _observation(self, held: Any, policy: PromptPolicy, ratio: float) -> Observation:
        queries = self.queries[:, :, QUERIES - (policy.needs().queries or 0) :]
        return Observation(
            queries=queries,
            query_positions=torch.arange(self.length - queries.shape[2], self.length)[None],
            keys=held.keys,
            values=held.values,
            positions=held.positions,
            valid=held.valid,
            scaling=self.keys.shape[3] ** -0.5,
            length=self.length,
            budget=kvkeep.Budget(compression_ratio=ratio).entries_per_cell([self.length], [])[0],
        )


def layers_of(model: Any, tokens: Tensor, indices: Sequence[int]) -> list[Layer]:
    """Some layers of a prompt `[1, L]`, each with tensors of its own."""
    seen: dict[int, Layer] = {}
    policy = Policy(_Onlooker(frozenset(indices), seen), Uniform(), TopK())
    prefill(model, kvkeep.KeepCache(model, policy, compression_ratio=0.5), tokens)
    return [seen[index] for index in indices]


def as_file(layers: Sequence[Layer]) -> Mapping[str, Tensor]:
    """The tensors that kvpress's side is given."""
    names = ("queries", "keys", "values")
    return {name: torch.stack([getattr(layer, name) for layer in layers]) for name in names}


@dataclass(frozen=True)
class _Onlooker(Scorer):
    """Takes down what it sees of some layers; its scores mean nothing."""

    wanted: frozenset[int]
    seen: dict[int, Layer] = field(compare=False)
    name: ClassVar[str] = "onlooker"

    def needs(self) -> Needs:
        return Needs(queries=QUERIES)

    def score(self, observation: Observation) -> Tensor:
        if observation.layer in self.wanted:
            tensors = (observation.queries, observation.keys, observation.values)
            queries, keys, values = (t.clone(memory_format=torch.contiguous_format) for t in tensors)
            self.seen[observation.layer] = Layer(queries, keys, values)
        return observation.zeros()
