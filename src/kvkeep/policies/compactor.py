"""Compactor: entries whose keys stand out from all others, and entries that their neighbourhood looks at."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.observation import Needs, Observation, smooth
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class Compactor(Scorer):
    """Leverage of the keys, and attention within chunks in both directions; needs no question.

    Chari and Van Durme 2025 (arXiv 2507.08143): `z(attention) + blending * z(leverage)`. Attention:
    each chunk's queries over the keys of the same chunk, earlier and later ones, summed over the queries, averaged over
    the group, times the norm of the value, smoothed over three neighbours. Leverage: `x (X'X + ridge)^-1 x` of the
    centred keys X before rotation, behind a random projection to `sketch` dimensions. z is over all heads of a row.
    Deviations from the authors' code in kvpress: dot products are scaled by `1/sqrt(D)`, a short last chunk has no
    padding that takes part, the projection comes from `seed`, rows of a batch do not mix, a head of no more than
    `sketch` dimensions is not projected, and the ridge grows with keys of very large norm. An entry of an earlier text,
    whose own queries are gone, counts as average in attention.

    Attributes:
        sinks: first entries that stay; neither they nor the recent ones take part in the statistics.
        recent: last entries that stay.
        chunk: positions of a chunk.
        sketch: dimensions of the projection.
        blending: weight of the leverage; None for the share of the text that goes.
        ridge: added to the diagonal of `X'X`.
        seed: of the projection.
    """

    sinks: int = 8
    recent: int = 4
    chunk: int = 256
    sketch: int = 48
    blending: float | None = None
    ridge: float = 0.01
    seed: int = 0
    name: ClassVar[str] = "compactor"

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "8 is the authors'")
        require(self.recent >= 0, "recent >= 0", f"recent={self.recent}", "4 is the authors'")
        require(self.chunk >= 1, "chunk >= 1", f"chunk={self.chunk}", "256 is the authors'")
        require(self.sketch >= 1, "sketch >= 1", f"sketch={self.sketch}", "48 is the authors'")
        require(self.ridge > 0, "ridge > 0", f"ridge={self.ridge}", "without one, few keys have no leverage")

    def needs(self) -> Needs:
        """All queries, and the rotation to undo."""
        return Needs(queries=None, rotary=True)

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The sinks and the recent entries."""
        return self.sinks, self.recent

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`."""
        counted = observation.valid & (observation.positions >= self.sinks) & ~observation.recent(self.recent)
        # A row of nothing but sinks and recent entries has no other sample of its keys.
        counted = torch.where(counted.flatten(1).any(1)[:, None, None], counted, observation.valid)
        attention, seen = observation.once((self, "attention"), lambda: self._attention(observation, counted))
        leverage = observation.once((self, "leverage"), lambda: self._leverage(observation, counted))
        blending = self.blending
        if blending is None:
            blending = max(0.0, 1 - observation.budget / observation.length)
        scores = (_standard(attention, seen) + blending * _standard(leverage, counted)).float()
        # What is protected by structure is above all others, where a small budget has to choose among it.
        highest = scores.masked_fill(~counted, -torch.inf).amax((1, 2), keepdim=True)
        return torch.where(counted, scores, highest)

    def _attention(self, observation: Observation, counted: Tensor) -> tuple[Tensor, Tensor]:
        """The attention that entries receive within their chunks `[B, H_kv, N]`, and which have a chunk to ask."""
        total, seen = observation.zeros(), torch.zeros_like(counted)
        at = observation.query_positions[0]  # the same in all rows, which have the same length
        asks = (at >= self.sinks) & (at < observation.length - self.recent)
        asks = asks if bool(asks.any()) else torch.ones_like(asks)
        places = (observation.positions - self.sinks).div(self.chunk, rounding_mode="floor")
        numbers = (at - self.sinks).div(self.chunk, rounding_mode="floor")
        for number in sorted(set(numbers[asks].tolist())):
            member = counted & (places == number)
            columns = member.flatten(0, 1).any(0).nonzero()[:, 0]
            if not len(columns):
                continue
            rows = (asks & (numbers == number)).nonzero()[:, 0]
            chunk = replace(
                observation,
                queries=observation.queries[:, :, rows],
                # As if they came last: they look at what is behind them, too.
                query_positions=torch.full_like(observation.query_positions[:, rows], observation.length),
                keys=observation.keys[:, :, columns],
                values=observation.values[:, :, columns],
                positions=observation.positions[:, :, columns],
                valid=member[:, :, columns],
                protected=None,
            )
            received = chunk.accumulated_attention()
            # A cell that holds nothing of the chunk has no softmax either.
            total[:, :, columns] += torch.where(member[:, :, columns], received, 0)
            seen |= member
        norms = observation.value_norms().masked_fill(~seen, 0)
        return smooth(total * norms, 3, valid=seen), seen

    def _leverage(self, observation: Observation, counted: Tensor) -> Tensor:
        """How far the other keys of a cell are from spanning each key, `[B, H_kv, N]` float64, 0 to 1."""
        if observation.rotary is None:
            raise PolicyError(
                expected="an observation with the rotary embedding of the layer",
                received=f"none in layer {observation.layer}",
                remedy="compactor needs a model with rotary positions",
            )
        batch, heads, held, size = observation.keys.shape
        # Cells hold different positions, so that each is rotated back like a row of its own.
        keys = observation.keys.float().masked_fill(~observation.valid[..., None], 0)
        places = observation.positions.masked_fill(~observation.valid, 0)
        keys = observation.rotary.unrotate(keys.flatten(0, 1)[:, None], places.flatten(0, 1))
        keys = keys.view(batch, heads, held, size).double().masked_fill(~counted[..., None], 0)
        count = counted.sum(-1)[..., None, None].clamp(min=1)
        keys = (keys - keys.sum(2, keepdim=True) / count).masked_fill(~counted[..., None], 0)
        if self.sketch < size:
            keys = keys @ self._projection(observation.layer, heads, size).to(keys)
        gram = keys.transpose(2, 3) @ keys  # [B, H_kv, k, k]
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        ridge = (1e-10 * diagonal.mean(-1, keepdim=True)).clamp(min=self.ridge)
        factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge.expand_as(diagonal)))
        solved = torch.cholesky_solve(keys.transpose(2, 3), factor)  # [B, H_kv, k, N]
        leverage: Tensor = (keys * solved.transpose(2, 3)).sum(-1).clamp(min=0)
        return leverage

    def _projection(self, layer: int, heads: int, size: int) -> Tensor:
        """Normally distributed `[H_kv, D, k]`, drawn on the CPU head by head."""
        drawn = []
        for head in range(heads):
            seed = self.seed * 1_000_003 + layer * 1009 + head
            generator = torch.Generator().manual_seed(seed % 2**63)
            drawn.append(torch.randn(size, self.sketch, generator=generator))
        return torch.stack(drawn) / math.sqrt(self.sketch)


def _standard(scores: Tensor, counted: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over what is counted of each row's `[H_kv, N]`, 0 elsewhere; float64."""
    scores = scores.double().masked_fill(~counted, 0)
    count = counted.sum((1, 2), keepdim=True)
    mean = scores.sum((1, 2), keepdim=True) / count.clamp(min=1)
    centred = (scores - mean).masked_fill(~counted, 0)
    deviation = (centred.square().sum((1, 2), keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / deviation.clamp(min=1e-6)
