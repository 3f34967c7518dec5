"""A policy without an opinion, which keeps what it was shown: for those who judge a text later, or more than once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.observation import Needs, Observation
from kvkeep.policies import Judgement
from kvkeep.policies.protocols import Scope
from kvkeep.store.memory import nbytes


@dataclass(frozen=True)
class Recorder:
    """Keeps the observation of each layer of one text.

    Attributes:
        asks: what the adapter must gather.
        keeps: whether all entries stay in the cache, for a forward that follows; else the first of each cell does.
        observations: what it was shown, in the order of the layers.
    """

    asks: Needs
    keeps: bool = False
    observations: list[Observation] = field(default_factory=list, compare=False)
    name: ClassVar[str] = "recorder"
    scope: ClassVar[Scope] = "layer"

    def needs(self) -> Needs:
        """See `PromptPolicy`."""
        return self.asks

    def judge(self, observation: Observation) -> Judgement:
        """See `PromptPolicy`.

        Raises:
            CacheStateError: more than one text.
        """
        if observation.keys.shape[0] != 1:
            raise CacheStateError(expected="one text", received="a batch", remedy="read each text by itself")
        queries = observation.queries
        if nbytes(queries) > queries.numel() * queries.itemsize:  # a view would keep those of the whole text alive
            observation = replace(observation, queries=queries.clone(memory_format=torch.contiguous_format))
        self.observations.append(observation)
        protected = observation.valid if self.keeps else observation.protected_or_none()
        return Judgement.of(observation, observation.zeros(), protected)

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """See `PromptPolicy`."""
        return [judgement.valid if self.keeps else judgement.positions == 0 for judgement in judgements]
