"""Q-Filters: keys that point where the model's queries point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.calibrated import OF_MODEL
from kvkeep.observation import Needs, Observation
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class QFilter(Scorer):
    """The projection of each key on the direction that the queries of its head share.

    Godey et al. 2025 (Q-Filters, arXiv 2503.02812), section 3: queries of a head spread around one direction, so that
    the projection of a key on it estimates how much attention the key will be paid. The direction is the first right
    singular vector of a sample of queries, with the sign that makes their mean projection positive, averaged over the
    heads of a group; `kvkeep calibrate` computes it. Deviations: no window of recent entries, as in kvpress; the
    authors' code keeps one.

    Attributes:
        statistics: `model`: those that `kvkeep calibrate` wrote for the model; or the path of its file.
    """

    statistics: str = OF_MODEL
    name: ClassVar[str] = "qfilter"

    def __post_init__(self) -> None:
        require(bool(self.statistics.strip()), "a place for statistics", "none", "model, or the path of a file")

    def needs(self) -> Needs:
        """The filters."""
        return Needs(statistics=frozenset({self.statistics}))

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`."""
        filters = observation.calibrated(self.statistics).filters  # [H_kv, D]
        scores: Tensor = (observation.keys.float() @ filters[None, :, :, None])[..., 0]
        return scores.masked_fill(~observation.valid, 0)
