"""SimLayerKV: lazy layers, which look at the first and the latest entries, keep only these; the others keep all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.observation import Needs, Observation
from kvkeep.policies.allocators import top_mask
from kvkeep.policies.protocols import Judgement, Scope, caller_protected, check_scores, require


@dataclass(frozen=True)
class SimLayer:
    """As many layers as the budget demands keep sinks and recent entries only, the laziest first; the others keep all.

    Zhang et al. 2024 (SimLayerKV, arXiv 2410.13846): a layer is lazy if most of the attention of the last queries goes
    to the first and the most recent entries. Deviations: the budget decides how many layers are lazy, where the paper
    compares that attention with a threshold and learns the size of the cache afterwards; sinks and recent entries are
    at most half of the budget when layers are counted, so that a small budget does not make all of them lazy; what
    whole layers leave of the budget goes to the recent entries of the lazy ones, all alike.

    Attributes:
        sinks: how many of the first entries a lazy layer keeps.
        recent: how many of the latest entries it keeps at least, where half of the budget holds them.
        queries: how many of the last queries tell how lazy a layer is.
    """

    sinks: int = 4
    recent: int = 1024
    queries: int = 1
    name: ClassVar[str] = "simlayer"
    scope: ClassVar[Scope] = "model"

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "4 is the paper's")
        require(self.recent >= 1, "recent >= 1", f"recent={self.recent}", "1024 is the paper's")
        require(self.queries >= 1, "queries >= 1", f"queries={self.queries}", "it counts the queries that judge")

    def needs(self) -> Needs:
        """The queries that judge."""
        return Needs(queries=self.queries)

    def judge(self, observation: Observation) -> Judgement:
        """The attention of the last queries; how much of it a lazy layer would keep, `choose` reads off it.

        Raises:
            BudgetError: the caller protects more entries than the budget holds.
        """
        protected = caller_protected(observation)
        scores = observation.window_attention(self.queries)
        check_scores(scores, observation, self.name)
        return Judgement.of(observation, scores, protected, notes=self._notes(observation))

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """All of a layer's entries, or of each of its cells the sinks and the latest ones; row by row."""
        masks = [judgement.valid.clone() for judgement in judgements]
        for row in range(judgements[0].valid.shape[0]):
            lazy, count = self._share([_row(judgement, row) for judgement in judgements])
            for layer in lazy:
                masks[layer][row] = self._latest(_row(judgements[layer], row), count)[0]
        return masks

    def _share(self, layers: Sequence[Judgement]) -> tuple[list[int], int]:
        """Which layers of a row are lazy, and how many entries each of their cells keeps."""
        held = [int(layer.available.sum()) for layer in layers]
        total = layers[0].budget * sum(layer.valid.shape[1] for layer in layers)
        least = self._least(layers[0].budget)
        small = [_cost(layer, least) for layer in layers]
        laziness = [float(_mass(layer, self._latest(layer, least))) for layer in layers]
        laziest = sorted(range(len(layers)), key=lambda i: (-laziness[i], i))
        lazy: list[int] = []
        while sum(held) - sum(held[i] - small[i] for i in lazy) > total:
            lazy.append(laziest[len(lazy)])
        room = total - sum(held[i] for i in laziest[len(lazy) :])
        low, high = least, layers[0].length  # the largest count that the room holds
        while low < high:
            middle = (low + high + 1) // 2
            if sum(_cost(layers[i], middle) for i in lazy) <= room:
                low = middle
            else:
                high = middle - 1
        return lazy, low

    def _least(self, budget: int) -> int:
        """Entries that a cell of a lazy layer keeps for sure."""
        return max(1, min(self.sinks + self.recent, budget // 2))

    def _latest(self, layer: Judgement, count: int) -> Tensor:
        """`[1, H_kv, N]` protected entries, sinks and the latest ones, `count` in each cell; sinks at most half."""
        ranks = layer.positions.double()
        ranks = ranks.masked_fill(layer.positions < min(self.sinks, count // 2), layer.length)  # above all positions
        ranks = ranks.masked_fill(layer.protected, math.inf).masked_fill(~layer.valid, -math.inf)
        return top_mask(ranks, _counts(layer, count))

    def _notes(self, observation: Observation) -> tuple[str, ...]:
        budget = observation.budget
        if budget >= observation.length or self._least(budget) == self.sinks + self.recent:
            return ()
        return (
            f"{self.name}: {self.sinks} sinks and {self.recent} recent entries shrank to {self._least(budget)} "
            f"when lazy layers were counted, half of the {budget} entries per cell",
        )


def _counts(layer: Judgement, count: int) -> Tensor:
    """`[1, H_kv]` entries of each cell: `count`, the protected ones if they are more, or all that it holds."""
    return torch.minimum(layer.pinned.clamp(min=count), layer.available)


def _cost(layer: Judgement, count: int) -> int:
    """Entries that a lazy layer keeps."""
    return int(_counts(layer, count).sum())


def _mass(layer: Judgement, kept: Tensor) -> Tensor:
    """Attention that stays, mean over the heads."""
    return layer.scores.double().masked_fill(~kept, 0).sum() / layer.valid.shape[1]


def _row(judgement: Judgement, row: int) -> Judgement:
    """One row of it."""
    rows = slice(row, row + 1)
    return replace(
        judgement,
        scores=judgement.scores[rows],
        positions=judgement.positions[rows],
        valid=judgement.valid[rows],
        protected=judgement.protected[rows],
    )
