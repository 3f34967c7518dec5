"""KNorm: keys of small norm attract attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.policies.protocols import Scorer


@dataclass(frozen=True)
class KNorm(Scorer):
    """The smaller the norm of its key, the longer an entry stays.

    Devoto et al. 2024 (arXiv 2406.11430), section 3.
    """

    name: ClassVar[str] = "knorm"

    def score(self, observation: Observation) -> Tensor:
        """The negative norm of each key, `[B, H_kv, N]`."""
        return -observation.key_norms()
