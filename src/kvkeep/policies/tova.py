"""TOVA: keep what the last token looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Needs, Observation
from kvkeep.policies.protocols import Scorer


@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention of the last query, averaged over all heads of the layer: one set of entries per layer.

    Oren et al. 2024 (arXiv 2401.06104), section 3. Deviations: decided once for the text, where the paper drops one
    entry at each step; the last entry stays.
    """

    name: ClassVar[str] = "tova"

    def needs(self) -> Needs:
        """The last query."""
        return Needs(queries=1)

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The last entry."""
        return 0, 1

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`, the same for all heads."""
        return observation.pool_heads(observation.window_attention(1))
