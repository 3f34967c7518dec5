"""What is taken down while a model reads: moments of its queries, and attention that goes back to a first reading.

Both are policies without an opinion: a KeepCache shows them every layer, whatever the architecture, and drops the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.observation import Needs, Observation
from kvkeep.policies import Judgement
from kvkeep.policies.protocols import Scope


@dataclass
class Moments:
    """Sums over vectors, in float64, from which mean and covariance follow.

    Attributes:
        count: vectors so far.
        total: `[H, D]` their sum.
        squares: `[H, D, D]` sum of their outer products.
    """

    count: int
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, heads: int, size: int) -> Moments:
        """Of no vector yet."""
        zeros = torch.zeros(heads, size, size, dtype=torch.float64)
        return cls(0, zeros[..., 0].clone(), zeros)

    def add(self, vectors: Tensor) -> None:
        """Add `[H, n, D]`."""
        wide = vectors.detach().double().cpu()
        self.count += wide.shape[1]
        self.total += wide.sum(1)
        self.squares += wide.transpose(1, 2) @ wide

    @property
    def mean(self) -> Tensor:
        """`[H, D]`."""
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """`[H, D, D]`, divided by the number of vectors."""
        mean = self.mean
        return self.squares / self.count - mean[:, :, None] * mean[:, None, :]

    def main_directions(self) -> Tensor:
        """`[H, D]` the first right singular vector of each head's vectors (not centred), with the sign that makes
        their mean projection positive: an eigenvector of the sum of outer products."""
        directions: Tensor = torch.linalg.eigh(self.squares).eigenvectors[..., -1]
        return directions * torch.where((directions * self.total).sum(-1, keepdim=True) < 0, -1.0, 1.0)


@dataclass(frozen=True)
class Watch(ABC):
    """A policy without an opinion, which looks at every layer that it is shown; its children say what they note."""

    name: ClassVar[str] = "watch"
    scope: ClassVar[Scope] = "layer"

    def needs(self) -> Needs:
        """All queries, and the rotation to undo."""
        return Needs(queries=None, rotary=True)

    @abstractmethod
    def note(self, observation: Observation) -> None:
        """Look at a layer."""

    def judge(self, observation: Observation) -> Judgement:
        """All entries alike."""
        self.note(observation)
        return Judgement.of(observation, observation.zeros(), observation.protected_or_none())

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """The first entry, so that nothing piles up."""
        return [judgement.positions == 0 for judgement in judgements]


@dataclass(frozen=True)
class QueryWatch(Watch):
    """Takes the moments of the queries, before and after rotation.

    Attributes:
        sinks: first positions that are left out: they are no sample of what comes later.
        before: by layer, before rotation.
        after: by layer, after rotation.
    """

    sinks: int
    before: dict[int, Moments] = field(default_factory=dict, compare=False)
    after: dict[int, Moments] = field(default_factory=dict, compare=False)

    def note(self, observation: Observation) -> None:
        """Add the queries of a layer."""
        if observation.rotary is None:
            raise PolicyError(
                expected="an observation with the rotary embedding of the layer",
                received=f"none in layer {observation.layer}",
                remedy="calibrate a model with rotary positions",
            )
        rotated = observation.queries.float()
        plain = observation.rotary.unrotate(rotated, observation.query_positions)
        for moments, queries in ((self.before, plain), (self.after, rotated)):
            one = moments.setdefault(observation.layer, Moments.of(queries.shape[1], queries.shape[3]))
            for row in queries[:, :, self.sinks :]:
                one.add(row)


@dataclass(frozen=True)
class CopyWatch(Watch):
    """Takes the attention that words pay to their own first reading, while a passage is read for the second time.

    Attributes:
        distance: tokens between a word and its first reading.
        found: by layer, for each text `[H]` float64.
    """

    distance: int
    found: dict[int, list[Tensor]] = field(default_factory=dict, compare=False)

    def needs(self) -> Needs:
        """The queries of the second reading."""
        return Needs(queries=self.distance)

    def note(self, observation: Observation) -> None:
        """Add what the heads of a layer do."""
        self.found.setdefault(observation.layer, []).append(copied_attention(observation, self.distance))


def copied_attention(observation: Observation, distance: int) -> Tensor:
    """Attention of the last `distance` queries on the same words `distance` tokens before, and the words behind these.

    A head that copies looks at the word that followed; one that matches looks at the word itself. Both need entries
    from far away.

    Args:
        observation: a first prompt of one row, whose last `2 * distance` tokens are a passage read twice.
        distance: tokens of the passage, at least 2.

    Returns:
        `[H]` float64, mean over the queries but the last one, whose follower was not read before; 0 to 1.
    """
    count, group = observation.queries.shape[2], observation.group
    at = observation.query_positions[0, :-1]  # [Q - 1]
    keys = observation.keys[0].float()
    hidden = observation.positions[0, 0] > at[:, None]  # [Q - 1, N]
    twin = torch.stack([at - distance, at - distance + 1], dim=-1)  # [Q - 1, 2]; a first prompt holds every position
    shares = []
    for head in range(observation.queries.shape[1]):
        queries = observation.queries[0, head, : count - 1].float() * observation.scaling
        logits = (queries @ keys[head // group].T).masked_fill_(hidden, -torch.inf)
        shares.append(logits.softmax(-1).gather(1, twin).sum(-1).double().mean())
    return torch.stack(shares).cpu()
