"""LagKV: keep what differs from the text that follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.policies.protocols import Scorer, require

_LARGEST = 1e9  # a reference may span next to nothing; its squares still fit into float32


@dataclass(frozen=True)
class LagKV(Scorer):
    """How unevenly the channels of a key and a value lie in the range of the partition that follows; needs no query.

    Liang et al. 2025 (arXiv 2504.04704): the entries after the sinks are divided into partitions of `lag`;
    a channel is scaled by its least and largest value in the next partition; the standard deviation over the channels,
    softmax within the partition, the mean of key and value; the rank within the partition is the score, so that every
    partition keeps the same share. The last whole partition and what follows it, the tail, have no reference and stay.

    Deviations: the tail stays by structure, and so on at most half of the budget; what is left of it is ranked by
    recency, as a partition of its own (the authors keep the whole tail, 128 to 255 entries, whatever the budget is). A
    text without a partition before its tail is ranked by recency altogether, as in kvpress. Partitions follow one
    another along the entries that a cell holds, so that a later cut works on what is there. A channel that is constant
    in the reference counts as zero, where the formula divides by zero.

    Attributes:
        sinks: how many of the first entries stay.
        lag: entries in a partition.
        across: compare entries of different partitions by their softmax instead of their ranks.
    """

    sinks: int = 4
    lag: int = 128
    across: bool = False
    name: ClassVar[str] = "lagkv"

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "4 is the usual number")
        require(self.lag >= 2, "lag >= 2", f"lag={self.lag}", "128 is the authors'")

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The sinks, and the tail of a text that has something before it."""
        body = max(0, observation.length - self.sinks)
        return self.sinks, self.lag + body % self.lag if body >= 2 * self.lag else 0

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`, between 0 and 1."""
        return observation.once(self, lambda: self._score(observation))

    def _score(self, observation: Observation) -> Tensor:
        sinks = observation.valid & (observation.positions < self.sinks)
        body = observation.valid & ~sinks
        # The body of each cell without gaps: place i of it is in partition i // lag.
        order = (~body).long().argsort(dim=-1, stable=True)
        count = body.sum(-1, keepdim=True)  # [B, H_kv, 1]
        tail = (count // self.lag - 1).clamp(min=0) * self.lag  # where it begins
        place = torch.arange(order.shape[-1], device=order.device)
        recency = (place - tail) / (count - tail).clamp(min=1)  # in the tail, from 0 up
        if self.across:
            recency = recency * (2 / self.lag)  # on average as much as an entry of a partition has
        scores = recency.float()
        partitions = int(tail.max()) // self.lag
        if partitions:
            early = self._partition_scores(observation, order, partitions)
            head = scores[..., : early.shape[-1]]
            scores[..., : early.shape[-1]] = torch.where(place[: early.shape[-1]] < tail, early, head)
        back = torch.empty_like(scores).scatter_(-1, order, scores)
        return back.masked_fill(~body, 0).masked_fill(sinks, 1)

    def _partition_scores(self, observation: Observation, order: Tensor, partitions: int) -> Tensor:
        """Of the first partitions, `[B, H_kv, partitions * lag]`; meaningless where a cell has no such partition."""
        batch, heads, _, size = observation.keys.shape
        index = order[..., : (partitions + 1) * self.lag, None].expand(-1, -1, -1, size)
        key, value = (
            self._lag_relative(x.gather(2, index).float().view(batch, heads, partitions + 1, self.lag, size))
            for x in (observation.keys.detach(), observation.values.detach())
        )
        scores = (key + value) / 2  # [B, H_kv, partitions, lag]
        if not self.across:
            # Of equal ones the earlier ranks higher.
            scores = (self.lag - 1 - scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)) / self.lag
        return scores.flatten(2)

    def _lag_relative(self, x: Tensor) -> Tensor:
        """The spread over the channels `[B, H_kv, P, lag]`, for keys or values `[B, H_kv, P + 1, lag, D]`."""
        reference = x[:, :, 1:]
        low, high = reference.amin(3, keepdim=True), reference.amax(3, keepdim=True)
        scaled = ((x[:, :, :-1] - low) / (high - low)).clamp(-_LARGEST, _LARGEST)
        return scaled.masked_fill(high == low, 0).std(-1).softmax(-1)
