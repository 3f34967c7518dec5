"""H2O: heavy hitters and recent entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Needs, Observation
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class H2O(Scorer):
    """Attention accumulated over all queries of the text; half of the budget goes to the most recent entries.

    Zhang et al. 2023 (arXiv 2306.14048), section 4. Deviations: decided once for the text, where the paper drops one
    entry at each step; the mean over the query heads of a group. The sum favours early entries, as in the paper.

    Attributes:
        recent: share of the budget that the most recent entries take, at most a half.
    """

    recent: float = 0.5
    name: ClassVar[str] = "h2o"

    def __post_init__(self) -> None:
        require(0 <= self.recent <= 0.5, "0 <= recent <= 0.5", f"recent={self.recent}", "the paper's is 0.5")

    def needs(self) -> Needs:
        """The queries of the whole text."""
        return Needs(queries=None)

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The most recent entries."""
        return 0, int(self.recent * observation.budget)

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`."""
        return observation.accumulated_attention()
