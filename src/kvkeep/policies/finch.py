"""Finch: the question chooses what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Needs, Observation
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class Finch(Scorer):
    """Attention from the question's queries, each weighted by the number of entries that it sees.

    Corallo and Papotti 2024 (arXiv 2408.00167), section 3. A softmax over more entries gives each of them less; the
    weight makes early and late questions comparable. Deviations: keys keep their positions, where the paper rotates
    them anew; where the question is hidden, the last `window` queries stand for it.

    Attributes:
        window: queries that judge when no question is visible.
    """

    window: int = 32
    name: ClassVar[str] = "finch"

    def __post_init__(self) -> None:
        require(self.window >= 1, "window >= 1", f"window={self.window}", "it counts the queries that judge")

    def needs(self) -> Needs:
        """The queries of the whole text, since the length of the question is not known before."""
        return Needs(queries=None)

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The question, or what stands for it."""
        return 0, self._window(observation)

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`."""
        rows = observation.attention_rows(self._window(observation))  # [B, H_kv, W, N]
        at = observation.query_positions[:, None, -rows.shape[2] :, None]  # [B, 1, W, 1]
        seen = observation.valid[:, :, None] & (observation.positions[:, :, None] <= at)
        return (rows * seen.sum(-1, keepdim=True)).mean(2)

    def _window(self, observation: Observation) -> int:
        if observation.question is None or observation.question[0] >= observation.length:  # it is still to come
            return min(self.window, observation.length)
        return observation.length - observation.question[0]
