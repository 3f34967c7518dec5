"""Random: the floor of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.policies.protocols import Scorer


@dataclass(frozen=True)
class Random(Scorer):
    """A random score for each layer, head and position; the same on every device and for every dtype.

    A position keeps its score for life, so that cutting again keeps what was kept as far as the budget allows.

    Attributes:
        seed: of the generator; any whole number.
    """

    seed: int = 0
    name: ClassVar[str] = "random"

    def score(self, observation: Observation) -> Tensor:
        """Uniform in [0, 1), `[B, H_kv, N]`."""
        heads = observation.keys.shape[1]
        # Drawn on the CPU, head by head: the values of one head and position depend on nothing else.
        rows = []
        for head in range(heads):
            seed = self.seed * 1_000_003 + observation.layer * 1009 + head
            generator = torch.Generator().manual_seed(seed % 2**63)  # torch takes no larger ones
            rows.append(torch.rand(observation.length, generator=generator))
        table = torch.stack(rows).to(observation.keys.device).expand(observation.keys.shape[0], -1, -1)
        return table.gather(2, observation.positions.masked_fill(~observation.valid, 0))
