"""SnapKV: the end of the text tells which of its entries matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Needs, Observation, smooth
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Attention that each entry receives from the last queries, smoothed over its neighbours.

    Li et al. 2024 (arXiv 2404.14469), section 4. Deviations: the mean over the window instead of the sum (ranks are
    the same); the mean over the query heads of a group, since a KV head keeps one set of entries; the window itself is
    kept by structure.

    Attributes:
        window: how many of the last queries judge, and how many of the last entries stay.
        kernel: how many neighbours are pooled, odd.
        pool: `avg` (as in the authors' code) or `max` (as in their experiments).
    """

    window: int = 32
    kernel: int = 7
    pool: str = "avg"
    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        require(self.window >= 1, "window >= 1", f"window={self.window}", "it counts the queries that judge")
        odd = self.kernel >= 1 and self.kernel % 2 == 1
        require(odd, "an odd kernel", f"kernel={self.kernel}", "1 pools nothing")
        require(self.pool in ("avg", "max"), "pool avg or max", f"pool={self.pool}", "the paper's code uses avg")

    def needs(self) -> Needs:
        """The window's queries."""
        return Needs(queries=self.window)

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The window."""
        return 0, self.window

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`."""
        attention = observation.window_attention(self.window)
        # Neighbours of the kept window must not profit from the attention that the window pays to itself.
        attention = attention.masked_fill(observation.protected_or_none(), 0)
        return smooth(attention, self.kernel, self.pool, observation.valid)
