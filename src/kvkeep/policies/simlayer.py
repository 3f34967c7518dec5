"""SimLayerKV: lazy layers, which look at the first and the latest entries, keep only these; the others keep all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Needs, Observation
from kvkeep.policies.ends import Ends, part_of
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
        notes = self._ends.notes(self.name, observation, "lazy layers")
        return Judgement.of(observation, scores, protected, notes=notes)

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """All of a layer's entries, or of each of its cells the sinks and the latest ones; row by row."""
        masks = [judgement.valid.clone() for judgement in judgements]
        budget = judgements[0].budget
        for row in range(judgements[0].valid.shape[0]):
            layers = [part_of(judgement, row) for judgement in judgements]
            least = self._ends.least(budget)
            laziness = [float(_mass(layer, self._ends.of(layer, least))) for layer in layers]
            total = budget * sum(layer.valid.shape[1] for layer in layers)
            lazy, count = self._ends.share(layers, laziness, total)
            for index in lazy:
                masks[index][row] = self._ends.of(layers[index], count)[0]
        return masks

    @property
    def _ends(self) -> Ends:
        return Ends(self.sinks, self.recent)


def _mass(layer: Judgement, kept: Tensor) -> Tensor:
    """Attention that stays, mean over the heads."""
    return layer.scores.double().masked_fill(~kept, 0).sum() / layer.valid.shape[1]
