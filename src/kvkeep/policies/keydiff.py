"""KeyDiff: keep the keys that differ from the average key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from kvkeep.observation import Observation
from kvkeep.policies.protocols import Scorer


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Negative cosine between a key and the mean of the normalised keys of its cell.

    Park et al. 2025 (arXiv 2504.15364), section 3.2. Deviation: one decision for the whole text instead of blocks of
    128; `Session` cuts after each piece, which comes to the paper's blocks.
    """

    name: ClassVar[str] = "keydiff"

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`, between -1 and 1."""
        keys = normalize(observation.keys.float(), dim=-1).masked_fill(~observation.valid[..., None], 0)
        anchor = keys.sum(2, keepdim=True) / observation.held[..., None, None]  # [B, H_kv, 1, D]
        return -(keys * normalize(anchor, dim=-1)).sum(-1)
