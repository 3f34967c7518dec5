"""The features of a `PrefillContext`, computed from what a layer was observed to hold.

Each is reduced over the layer's KV heads to one number a position, since a program chooses the same positions for all
heads. A head that does not hold a position any more gives it no attention, and no part in the mean of norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.evolve.context import CHUNK_LENGTH, SINKS, WINDOW, PrefillContext
from kvkeep.observation import Observation, smooth
from kvkeep.policies.frc import density_width


def contexts_of(observation: Observation, queries: int) -> list[PrefillContext]:
    """See `kvkeep.evolve.context.contexts_of`."""
    if observation.rotary is None:
        raise PolicyError(
            expected="an observation with the rotary embedding of the layer",
            received=f"none in layer {observation.layer}",
            remedy="programs need a model with rotary positions",
        )
    with torch.no_grad():
        cells = {
            "local": observation.window_attention(WINDOW),
            "attention": observation.window_attention(queries),
            "key_norm": observation.key_norms(),
            "key_change": _key_changes(observation),
            "value_norm": observation.value_norms(),
        }
        return [
            _context(observation, _Row.of(observation, cells, row), queries) for row in range(observation.keys.shape[0])
        ]


@dataclass(frozen=True, eq=False)
class _Row:
    """One row of an observation, over the positions that at least one of its heads holds.

    Attributes:
        positions: `[L]` int64, ascending.
        held: `[H_kv, L]` which heads hold them.
        cells: `[H_kv, L]` float32 numbers by name, zero where a head does not hold the position.
    """

    positions: Tensor
    held: Tensor
    cells: dict[str, Tensor]

    @classmethod
    def of(cls, observation: Observation, cells: dict[str, Tensor], row: int) -> _Row:
        """Of `cells`, `[B, H_kv, N]`, what lies at valid entries."""
        heads = observation.keys.shape[1]
        valid = observation.valid[row]  # [H_kv, N]
        head = torch.arange(heads, device=valid.device)[:, None].expand_as(valid)[valid]
        at = observation.positions[row][valid]
        present = torch.zeros(observation.length, dtype=torch.bool, device=valid.device)
        present[at] = True
        positions, column = present.nonzero()[:, 0], (present.cumsum(0) - 1)[at]
        held = torch.zeros(heads, len(positions), dtype=torch.bool, device=valid.device)
        held[head, column] = True
        spread = {}
        for name, values in cells.items():
            spread[name] = torch.zeros(held.shape, dtype=torch.float32, device=valid.device)
            spread[name][head, column] = values[row][valid]
        return cls(positions, held, spread)

    def mean_attention(self, name: str) -> Tensor:
        """`[L]` over all heads; one that does not hold the position looks at it with nothing."""
        return self.cells[name].mean(0)

    def mean_held(self, name: str) -> Tensor:
        """`[L]` over the heads that hold the position."""
        return self.cells[name].sum(0) / self.held.sum(0)


def _context(observation: Observation, row: _Row, queries: int) -> PrefillContext:
    positions, length = row.positions, observation.length
    attention = row.cells["attention"]  # [H_kv, L]
    mean = row.mean_attention("attention")
    strongest = attention.amax(0)
    chunk_mean, chunk_rank = _chunks(mean, positions)
    start, end = observation.question or (0, 0)
    features = {
        "local_attention": row.mean_attention("local"),
        "global_attention": mean,
        "neighbor_attn_density": smooth(mean[None, None], density_width(length))[0, 0],
        "max_head_attention": strongest,
        "head_consistency": _consistency(attention),
        "head_concentration": _divided(strongest.double(), attention.double().sum(0)),
        "key_norm": row.mean_held("key_norm"),
        "key_change_norm": row.mean_held("key_change"),
        "chunk_attention_mean": chunk_mean,
        "chunk_rank": chunk_rank,
        "position": positions,
        "relative_position": positions.double() / max(1, length - 1),
        "recency": (length - 1 - positions).double() / length,
        "sink_mask": positions < SINKS,
        "recent_mask": positions >= length - WINDOW,
        "question_mask": (positions >= start) & (positions < end),
        "value_norm": row.mean_held("value_norm"),
    }
    arrays: dict[str, Any] = {name: feature.float().cpu().numpy() for name, feature in features.items()}
    return PrefillContext(
        **arrays,
        L=len(positions),
        K=min(observation.budget, len(positions)),
        H=observation.queries.shape[1],
        Q=min(queries, observation.queries.shape[2]),
        layer=observation.layer,
    )


def _consistency(attention: Tensor) -> Tensor:
    """`[L]`: one less the standard deviation over the heads, over their mean; 1 where no head looks."""
    wide = attention.double()  # squares of a small attention are nothing in float32
    return 1 - _divided(wide.std(0, correction=0), wide.mean(0))


def _divided(part: Tensor, whole: Tensor) -> Tensor:
    """Zero where the whole is zero."""
    return torch.where(whole > 0, part / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0)


def _chunks(attention: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """For each position the mean of its chunk, and the share of the other chunks whose mean is less; both `[L]`.

    Chunks begin at multiples of their length in the text; those that hold no position do not count.
    """
    chunk = torch.div(positions, CHUNK_LENGTH, rounding_mode="floor")
    sizes = chunk.bincount()
    held = sizes > 0
    means = torch.zeros(len(sizes), dtype=torch.float64, device=positions.device)
    means.scatter_add_(0, chunk, attention.double()).div_(sizes.clamp(min=1))
    below = torch.searchsorted(means[held].sort().values, means)  # how many are less: equal ones share a rank
    others = int(held.sum()) - 1
    rank = below.double() / others if others else torch.ones_like(means)
    return means[chunk], rank[chunk]


def _key_changes(observation: Observation) -> Tensor:
    """`[B, H_kv, N]`: how far each key lies from that of the cell's entry before it, both without rotation.

    With it, the angle between two positions would be most of the distance. Zero for the first entry of a cell.
    """
    if observation.rotary is None:
        raise RuntimeError("contexts are made where there is a rotary embedding")
    heads, size = observation.keys.shape[1], observation.keys.shape[3]
    order = (~observation.valid).long().argsort(dim=-1, stable=True)  # missing entries to the end
    changes = observation.zeros()
    for head in range(heads):  # one by one: cells may hold different positions, and their keys need room in float32
        first = order[:, head]  # [B, N]
        keys = observation.keys[:, head].float().gather(1, first[..., None].expand(-1, -1, size))
        plain = observation.rotary.unrotate(keys[:, None], observation.positions[:, head].gather(1, first))[:, 0]
        changes[:, head, 1:] = torch.linalg.vector_norm(plain.diff(dim=1), dim=-1)
    return torch.zeros_like(changes).scatter_(-1, order, changes)
