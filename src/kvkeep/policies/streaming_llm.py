"""StreamingLLM: the first few entries and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """Attention sinks and recency; looks at no tensor.

    Xiao et al. 2023 (arXiv 2309.17453), section 3. Deviation: keys keep the rotation of their original positions,
    where the paper re-indexes positions inside the cache.

    Attributes:
        sinks: how many of the first entries stay.
    """

    sinks: int = 4
    name: ClassVar[str] = "streaming-llm"

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "4 is the paper's")

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The sinks."""
        return self.sinks, 0

    def score(self, observation: Observation) -> Tensor:
        """The later, the higher, `[B, H_kv, N]`."""
        return observation.positions.float()
