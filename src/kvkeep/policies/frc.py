"""FRC: the policy that CacheCraft's search found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Needs, Observation, smooth
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class FRC(Scorer):
    """Recent attention, attention density and the strongest head, mixed with fixed weights; one set per layer.

    CacheCraft 2026 (arXiv 2608.14555), section 5: `0.55 local + 0.30 density + 0.15 max-head`, each divided by its
    largest value, on chunks of 20 positions (the policy `frc`; `frc+topk` is the token-wise form). Given by the paper:
    the weights, the window of 32, the width of the density. Not given and chosen here: `queries`.

    Attributes:
        queries: how many of the last queries give the global attention.
        window: how many of them give the local attention.
        local: weight of the local attention.
        density: weight of the density, the global attention averaged over neighbouring positions.
        max_head: weight of the global attention of the head that looks most.
    """

    queries: int = 64
    window: int = 32
    local: float = 0.55
    density: float = 0.30
    max_head: float = 0.15
    name: ClassVar[str] = "frc"

    def __post_init__(self) -> None:
        require(
            1 <= self.window <= self.queries,
            "1 <= window <= queries",
            f"window={self.window}, queries={self.queries}",
            "the local attention is a part of the global one",
        )

    def needs(self) -> Needs:
        """The queries of the global attention."""
        return Needs(queries=self.queries)

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`, the same for all heads."""
        per_head = observation.window_attention(self.queries)
        local = observation.pool_heads(observation.window_attention(self.window))
        strongest = observation.pool_heads(per_head, "max")
        width = density_width(observation.length)
        dense = smooth(observation.pool_heads(per_head), width, valid=observation.valid)
        score: Tensor = (
            self.local * by_largest(local) + self.density * by_largest(dense) + self.max_head * by_largest(strongest)
        )
        return score


def density_width(length: int) -> int:
    """Positions that the density of a text is averaged over, odd: `max(3, min(33, 2 floor(length / 64) + 1))`."""
    return max(3, min(33, 2 * (length // 64) + 1))


def by_largest(feature: Tensor) -> Tensor:
    """Divide `[B, H_kv, N]` by its largest magnitude in each row; a feature of zeros stays zero."""
    largest = feature.abs().amax((1, 2), keepdim=True)
    return feature / largest.clamp(min=1e-30)
