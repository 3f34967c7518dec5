"""H2O, online: at every step the entry goes that has received least attention, but for recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.policies.online import WatchingPolicy
from kvkeep.policies.protocols import require


@dataclass(frozen=True)
class OnlineH2O(WatchingPolicy):
    """Attention accumulated since an entry came; half of the cap goes to the most recent entries.

    Zhang et al. 2023 (arXiv 2306.14048), algorithm 1. Deviations: the mean over the query heads of a group; the entry
    goes just before the next token comes, so that the cap holds within the step, too.

    Attributes:
        recent: share of the cap that the most recent entries take.
    """

    recent: float = 0.5
    name: ClassVar[str] = "online-h2o"

    def __post_init__(self) -> None:
        require(0 <= self.recent < 1, "0 <= recent < 1", f"recent={self.recent}", "the paper's is 0.5")

    def protects(self, entries: int) -> tuple[int, int]:
        """The most recent entries, at least the current token."""
        return 0, max(1, int(self.recent * entries))

    def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
        """The sum so far."""
        return priorities + attention.sum(2)
