"""StreamingLLM, online: the first few entries and the newest ones, at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.policies.online import Arrivals, State, StaticPolicy, quarter
from kvkeep.policies.protocols import require


@dataclass(frozen=True)
class OnlineStreamingLLM(StaticPolicy):
    """Attention sinks and the newest tokens; looks at no tensor.

    Xiao et al. 2023 (arXiv 2309.17453), section 3. Deviation: keys keep the rotation of their original positions, where
    the paper re-indexes positions inside the cache.

    Attributes:
        sinks: how many of the first entries stay.
    """

    sinks: int = 4
    name: ClassVar[str] = "online-streaming-llm"

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "4 is the paper's")

    def protects(self, entries: int) -> tuple[int, int]:
        """The sinks; the window's width changes nothing, since the slots hold the newest tokens before it."""
        return self.sinks, quarter(entries)

    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        """The later, the higher."""
        later = arrivals.leaving_positions.float()[:, None]
        return later.expand(-1, arrivals.keys.shape[1], -1), state
