"""How good a scorer's choice is, beside the best choice that its budget allows and the plainest one.

Shapes: `C` cells of a layer, `S` positions, `T = S - w` of them with a target.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvkeep.learn.config import LearnError
from kvkeep.learn.ranking import evict_at, recall, static_priority
from kvkeep.policies.online import Geometry


@dataclass(frozen=True)
class Choice:
    """What a layer's cells hold of a text, in the mean over cells.

    Attributes:
        recall: share of the slots of the oracle, which ranks by the target, that the scorer fills alike at the end of
            the text (KVpop, arXiv 2607.05061, section 5: 81 % for its models).
        kept_mass: share of the future attention of all entries that have left the window which those that are held
            have, in the mean over the end and three earlier points.
        oracle_mass: the same of the oracle.
        recent_mass: the same of the newest entries: StreamingLLM.
    """

    recall: float
    kept_mass: float
    oracle_mass: float
    recent_mass: float

    @classmethod
    def of(cls, priorities: Tensor, target: Tensor, log_gamma: Tensor, geometry: Geometry, length: int) -> Choice:
        """Measure static priorities `[1, C, T]` against a target `[1, C, T]`.

        Args:
            priorities: of the scorer.
            target: the logarithm of the future attention.
            log_gamma: `[C]`, by which the oracle ranks, too.
            geometry: of the cells.
            length: S.

        Raises:
            LearnError: a text that fits into the cells.
        """
        if length <= geometry.held:
            raise LearnError(
                expected=f"a text of more than {geometry.held} tokens",
                received=f"{length}",
                remedy="nothing is evicted from shorter ones",
            )
        student = evict_at(priorities, geometry, length)
        oracle = evict_at(static_priority(target, log_gamma), geometry, length)
        recent = evict_at(torch.arange(target.shape[-1]).float().expand_as(target), geometry, length)
        points = torch.tensor(
            sorted({round(geometry.held + share * (length - 1 - geometry.held) / 3) for share in range(4)})
        )
        masses = [kept_mass(evicted, target, points, geometry).mean().item() for evicted in (student, oracle, recent)]
        end = torch.tensor([length - 1])
        return cls(recall(student, oracle, end, geometry).mean().item(), *masses)

    @classmethod
    def mean(cls, choices: list[Choice]) -> Choice:
        """Over layers and texts."""
        return cls(**{f.name: sum(getattr(c, f.name) for c in choices) / len(choices) for f in fields(cls)})


def kept_mass(evicted: Tensor, target: Tensor, queries: Tensor, geometry: Geometry) -> Tensor:
    """The share of future attention that is held, of what has left the window.

    Args:
        evicted: `[..., S]` from `ranking.evict_at`.
        target: `[..., T]` logarithm of the future attention.
        queries: `[N]` positions at which to look.
        geometry: sinks and the window do not count, they are always held.

    Returns:
        `[..., N]`; 1 where no entry has left the window yet.
    """
    mass = target.exp()
    shares = []
    for query in queries.tolist():
        left = slice(geometry.sinks, max(geometry.sinks, query - geometry.window + 1))
        held = evicted[..., left] > query
        total = mass[..., left].sum(-1)
        shares.append(torch.where(total > 0, (mass[..., left] * held).sum(-1) / total, 1.0))
    return torch.stack(shares, dim=-1)
