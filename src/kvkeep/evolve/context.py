"""What an evolved program sees of a layer: seventeen numbers for each position, and five for the whole.

CacheCraft 2026 (arXiv 2608.14555) gives a program a frozen context of 17 features and 5 scalars. It names the families
and gives the exact formula of some; docs/evolve.md says for each feature which formula is used here and whose it is.

This file needs numpy alone: the process in which programs run reads it, and torch would cost that process a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import PolicyError

if TYPE_CHECKING:
    from kvkeep.observation import Observation

QUERIES = 64  # of the global attention; the paper does not state how many
WINDOW = 32  # queries of the local attention, and positions that count as recent
CHUNK_LENGTH = 20
SINKS = 4

# Float32 arrays of length L.
FEATURES = (
    "local_attention",
    "global_attention",
    "neighbor_attn_density",
    "max_head_attention",
    "head_consistency",
    "head_concentration",
    "key_norm",
    "key_change_norm",
    "chunk_attention_mean",
    "chunk_rank",
    "position",
    "relative_position",
    "recency",
    "sink_mask",
    "recent_mask",
    "question_mask",
    "value_norm",
)

SCALARS = ("L", "K", "H", "Q", "layer")

Feature = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PrefillContext:
    """One layer of one text: what a program may look at to choose K of L positions, the same for all heads.

    Index i of every feature is the i-th position that the layer holds. After a first prompt that is position i. Where
    earlier cuts have left some positions only, `position` tells which, and no other number depends on the missing ones.
    All features are read-only and finite. The formulas stand in docs/evolve.md.

    Attributes:
        local_attention: attention received from the last 32 queries, mean over queries and heads.
        global_attention: attention received from the last Q queries, mean over queries and heads.
        neighbor_attn_density: the global attention, averaged over neighbouring positions.
        max_head_attention: the global attention of the head that looks most.
        head_consistency: 1 where all heads look alike; less, and even below 0, where they differ.
        head_concentration: share of the head that looks most in what all heads look.
        key_norm: Euclidean norm of the key, mean over heads.
        key_change_norm: distance of the key, without its rotation, from the one before it, mean over heads.
        chunk_attention_mean: mean of the global attention over the position's chunk of 20.
        chunk_rank: rank of that chunk's mean among all chunks, 0 the worst, 1 the best.
        position: in the text, from 0.
        relative_position: 0 at the start of the text, 1 at its end.
        recency: distance from the end of the text, over its length: 0 at the last position.
        sink_mask: 1 for the first 4 positions.
        recent_mask: 1 for the last 32 positions.
        question_mask: 1 inside the question where it is visible, else 0.
        value_norm: Euclidean norm of the value, mean over heads.
        L: positions to choose from.
        K: positions that may stay, 1 <= K <= L.
        H: query heads of the layer.
        Q: queries behind the global attention.
        layer: index of the layer in the model.

    Raises:
        PolicyError: a feature of the wrong length or with a number that is not finite, or a K out of range.
    """

    local_attention: Feature
    global_attention: Feature
    neighbor_attn_density: Feature
    max_head_attention: Feature
    head_consistency: Feature
    head_concentration: Feature
    key_norm: Feature
    key_change_norm: Feature
    chunk_attention_mean: Feature
    chunk_rank: Feature
    position: Feature
    relative_position: Feature
    recency: Feature
    sink_mask: Feature
    recent_mask: Feature
    question_mask: Feature
    value_norm: Feature
    L: int
    K: int
    H: int
    Q: int
    layer: int

    def __post_init__(self) -> None:
        for name in SCALARS:
            object.__setattr__(self, name, int(getattr(self, name)))
        if not 1 <= self.K <= self.L:
            raise PolicyError(
                expected="a context with 1 <= K <= L",
                received=f"K={self.K}, L={self.L}",
                remedy="where everything may stay, there is nothing to choose",
            )
        for name in FEATURES:
            feature = np.ascontiguousarray(getattr(self, name), dtype=np.float32)
            if feature.shape != (self.L,) or not np.isfinite(feature).all():
                raise PolicyError(
                    expected=f"{self.L} finite numbers as {name}",
                    received=f"an array of shape {feature.shape}" if feature.shape != (self.L,) else "NaN or infinity",
                    remedy="contexts_of(observation) makes contexts from what a layer holds",
                )
            # Over bytes, which never change: an array that owns its memory could be made writable again.
            object.__setattr__(self, name, np.frombuffer(feature.tobytes(), dtype=np.float32))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Features as they are, scalars as int64 arrays without dimensions, by name; for `np.savez` and pipes."""
        arrays: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in FEATURES}
        return arrays | {name: np.asarray(getattr(self, name), dtype=np.int64) for name in SCALARS}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> PrefillContext:
        """The context that `to_arrays` was asked of; what else stands in the mapping is ignored.

        Raises:
            PolicyError: a name is missing, or the numbers are none of a context.
        """
        missing = [name for name in (*FEATURES, *SCALARS) if name not in arrays]
        if missing:
            raise PolicyError(
                expected="all features and scalars of a context",
                received=f"none of {', '.join(missing)}",
                remedy="take what PrefillContext.to_arrays gave",
            )
        given: dict[str, Any] = {name: arrays[name] for name in (*FEATURES, *SCALARS)}
        return cls(**given)

    def restricted(self, indices: NDArray[np.integer[Any]], K: int) -> PrefillContext:
        """The same text with fewer positions to choose from.

        Args:
            indices: those that remain, ascending.
            K: how many of them may stay.
        """
        features: dict[str, Any] = {name: getattr(self, name)[indices] for name in FEATURES}
        return PrefillContext(**features, L=len(indices), K=K, H=self.H, Q=self.Q, layer=self.layer)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled array would own its memory, and be writable.
        return PrefillContext.from_arrays, (self.to_arrays(),)


def contexts_of(observation: Observation, queries: int = QUERIES) -> list[PrefillContext]:
    """What a program sees of an observed layer, one context for each row.

    A position is in a row's context if at least one of its heads holds it; padding and missing entries are in none.

    Args:
        observation: with the last `queries` queries and the rotary embedding.
        queries: how many of the last queries give the global attention, where there are as many.

    Raises:
        PolicyError: the observation has no queries or no rotary embedding.
    """
    from kvkeep.evolve import features  # needs torch

    return features.contexts_of(observation, queries)
