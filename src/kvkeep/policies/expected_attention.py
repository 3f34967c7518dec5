"""ExpectedAttention: the attention that queries still to come are expected to pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.calibrated import OF_TEXT
from kvkeep.errors import PolicyError
from kvkeep.observation import Needs, Observation, Rotary
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Attention of a normally distributed future query, times the norm of the value.

    Devoto et al. 2025 (arXiv 2510.00636), section 3: queries before rotation are taken as N(mu, Sigma), rotated by the
    average over the positions to come; the expected weight of key k is `exp(mu.k/sqrt(D) + k.Sigma.k/(2D))`,
    normalised over the entries. The mean over the query heads of a group, times `|v|`.

    With statistics of the model instead of the text's own, no query of the text is looked at, and a text may be cut
    chunk by chunk.

    Attributes:
        future: how many positions to come are averaged over.
        sinks: first entries that stay; they are left out of the statistics.
        covariance: use Sigma, not only mu.
        value_norm: multiply by the norm of the value.
        epsilon: added to the attention before that, so that a large value counts even where attention is nil.
        statistics: `text`: mu and Sigma of the text's own queries; `model`: those that `kvkeep calibrate` wrote for the
            model; or the path of its file.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    statistics: str = OF_TEXT
    name: ClassVar[str] = "expected-attention"

    def __post_init__(self) -> None:
        require(self.future >= 1, "future >= 1", f"future={self.future}", "512 is the paper's")
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "4 is the paper's")
        require(bool(self.statistics.strip()), "a place for statistics", "none", "text, model, or the path of a file")

    def needs(self) -> Needs:
        """All queries, and the rotation to undo; or the model's statistics, and the rotation to apply."""
        if self.statistics == OF_TEXT:
            return Needs(queries=None, rotary=True)
        return Needs(rotary=True, statistics=frozenset({self.statistics}))

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The sinks."""
        return self.sinks, 0

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`."""
        return observation.once(self, lambda: self._score(observation))

    def _score(self, observation: Observation) -> Tensor:
        mean, covariance = self._future_queries(observation)  # [B, H, D], [B, H, D, D]
        batch, kv_heads, _, size = observation.keys.shape
        keys = observation.keys.float()
        counted = observation.valid & (observation.positions >= self.sinks)
        counted |= observation.valid & ~counted.any(-1, keepdim=True)  # a cell of nothing but sinks
        mean = mean.view(batch, kv_heads, observation.group, size)
        logits = torch.matmul(mean, keys.transpose(2, 3)) * observation.scaling  # [B, H_kv, G, N]
        if self.covariance:
            spread = covariance.view(batch, kv_heads, observation.group, size, size)
            for member in range(observation.group):
                quadratic = (torch.matmul(keys, spread[:, :, member]) * keys).sum(-1)  # k.Sigma.k, [B, H_kv, N]
                logits[:, :, member] += quadratic * (observation.scaling**2 / 2)
        attention = logits.masked_fill(~counted[:, :, None], -torch.inf).softmax(-1).mean(2)
        return (attention + self.epsilon) * observation.value_norms() if self.value_norm else attention

    def _future_queries(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the queries to come, at the average rotation of the next positions."""
        if observation.rotary is None:
            raise PolicyError(
                expected="an observation with the rotary embedding of the layer",
                received=f"none in layer {observation.layer}",
                remedy="expected-attention needs a model with rotary positions",
            )
        mean, covariance = self._queries(observation, observation.rotary)
        ahead = torch.arange(observation.length, observation.length + self.future, device=observation.keys.device)
        rotation = observation.rotary.mean_rotation(ahead, mean.shape[-1]).float()
        return mean @ rotation.T, rotation @ covariance @ rotation.T

    def _queries(self, observation: Observation, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Mean and covariance of queries before rotation."""
        if self.statistics != OF_TEXT:
            known, batch = observation.calibrated(self.statistics), observation.keys.shape[0]
            return known.query_mean.expand(batch, -1, -1), known.query_covariance.expand(batch, -1, -1, -1)
        queries = rotary.unrotate(observation.queries.float(), observation.query_positions)
        # A sink is no sample of what comes; but a text shorter than the sinks has nothing else. All rows of an
        # observation have the same length, and so the same number of sinks among their queries.
        first = int((observation.query_positions[0] < self.sinks).sum())
        queries = queries[:, :, first if first < queries.shape[2] else 0 :]
        mean = queries.mean(2)
        centred = queries - mean[:, :, None]
        return mean, torch.matmul(centred.transpose(2, 3), centred) / queries.shape[2]
