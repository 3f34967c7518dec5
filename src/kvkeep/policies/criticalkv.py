"""CriticalKV: part of the budget goes to attention, the rest to attention times what the value does to the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.observation import Needs, Observation
from kvkeep.policies.allocators import masses, top_mask
from kvkeep.policies.protocols import Judgement, Selector, require

# Values are projected in blocks of so many entries: a projection is as wide as the model's hidden states.
_BLOCK = 1024


@dataclass(frozen=True)
class Critical(Selector):
    """One part of a cell goes to the highest scores, the rest to scores times the norm of the projected values.

    Feng et al. 2025 (CriticalKV, arXiv 2502.03805), algorithm 1: the second stage ranks by `(score + epsilon)` times
    the L1 norm of `W_O v`, averaged over the query heads of a group, which bounds how much of the attention's output is
    lost with an entry. It goes with every scorer and allocator: `criticalkv` is `snapkv+critical`, `adacriticalkv` is
    `snapkv+ada+critical`. As in the authors' press for kvpress, protected entries count in the first stage. Deviations:
    the first stage is a part of what the allocator gave the cell, whoever that is; scores below zero, as negative
    norms, are counted from the lowest of the cell, since a large value would lower them otherwise.

    Attributes:
        first: part of a cell's entries that the score alone decides, at least one of them unless it is 0.
        epsilon: added to the score, so that a large value counts even where attention is nil.
    """

    first: float = 0.5
    epsilon: float = 1e-4
    name: ClassVar[str] = "critical"

    def __post_init__(self) -> None:
        require(0 <= self.first <= 1, "0 <= first <= 1", f"first={self.first}", "0.5 is the paper's; 1 is topk")
        require(0 <= self.epsilon < 1, "0 <= epsilon < 1", f"epsilon={self.epsilon}", "1e-4 is the authors'")

    def needs(self) -> Needs:
        """The output projection."""
        return Needs(output_weight=True)

    def weights(self, observation: Observation) -> Tensor:
        """The norms of the projected values, `[B, H_kv, N]`."""
        return observation.once((Critical, "norms"), lambda: projected_norms(observation))

    def select(self, judgement: Judgement, counts: Tensor) -> Tensor:
        """Exactly `counts` entries of each cell."""
        if judgement.weights is None:
            raise PolicyError(
                expected="a judgement with the norms of the projected values",
                received=f"none in layer {judgement.layer}",
                remedy="let a Policy with this selector judge: it asks the selector for its weights",
            )
        first = (counts.double() * self.first + 1e-9).floor().long()
        if self.first:
            first = torch.minimum(first.clamp(min=1), counts)
        taken = top_mask(judgement.ranked_scores(), torch.maximum(first, judgement.pinned))
        rest = (masses(judgement) + self.epsilon) * judgement.weights
        return top_mask(rest.masked_fill(~judgement.valid, -torch.inf).masked_fill(taken, torch.inf), counts)


def projected_norms(observation: Observation) -> Tensor:
    """L1 norm of what each value adds to the hidden states, `|W_O v|`: mean over the group, `[B, H_kv, N]` float32.

    Raises:
        PolicyError: the observation comes without the output projection.
    """
    if observation.output_weight is None:
        raise PolicyError(
            expected="an observation with the output projection of the layer",
            received=f"none in layer {observation.layer}",
            remedy="declare Needs(output_weight=True)",
        )
    norms = observation.zeros()
    weight = observation.output_weight.detach().float()  # [H, hidden, D]
    for start in range(0, norms.shape[2], _BLOCK):
        values = observation.values[:, :, start : start + _BLOCK].detach().float()
        block = norms[:, :, start : start + _BLOCK]
        for head in range(weight.shape[0]):
            cell = head // observation.group
            block[:, cell] += (values[:, cell] @ weight[head].T).abs().sum(-1)
    return norms.div_(observation.group)
