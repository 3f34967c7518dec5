"""What a program does, told by the sets that it keeps on the probe: traits that an archive is ordered by, and a hash.

Two programs whose text differs may keep the same entries; their hash is the same, and only one of them is evaluated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kvkeep.evolve.context import PrefillContext
from kvkeep.evolve.program import Indices, seed_program

LAST = 64


@dataclass(frozen=True)
class Traits:
    """How a program chooses, a mean over contexts.

    Attributes:
        overlap: Jaccard index with the set of the seed `snapkv-like`: shared positions over all that either keeps.
        run_length: mean length of unbroken runs of kept positions.
        recent: share of the kept positions that lie among the last 64 of the text.
        mass: share of the global attention that the kept positions receive.
    """

    overlap: float
    run_length: float
    recent: float
    mass: float

    def to_dict(self) -> dict[str, float]:
        """As JSON holds it."""
        return asdict(self)


def traits_of(
    contexts: Sequence[PrefillContext], selections: Sequence[Indices], yardstick: Sequence[Indices]
) -> Traits:
    """The traits of what was kept.

    Args:
        contexts: at least one.
        selections: what the program kept in each.
        yardstick: what `snapkv-like` keeps in each.
    """
    rows = []
    for context, kept, other in zip(contexts, selections, yardstick, strict=True):
        shared = len(np.intersect1d(kept, other))
        attention = context.global_attention.astype(np.float64)
        total = float(attention.sum())
        rows.append(
            (
                shared / (len(kept) + len(other) - shared),
                len(kept) / (1 + int((np.diff(np.sort(kept)) > 1).sum())),
                float((kept >= context.L - LAST).mean()),
                float(attention[kept].sum()) / total if total > 0 else 0.0,
            )
        )
    return Traits(*(float(mean) for mean in np.mean(rows, axis=0)))


def behaviour_of(selections: Sequence[Indices]) -> str:
    """SHA-256 of what was kept in each context, in hex; the order of indices does not matter."""
    hasher = hashlib.sha256()
    for kept in selections:
        hasher.update(np.sort(np.asarray(kept, dtype=np.int64)).tobytes() + b"/")
    return hasher.hexdigest()


def snapkv_sets(contexts: Sequence[PrefillContext]) -> list[Indices]:
    """What the seed `snapkv-like` keeps in each context; it is our own program, and runs in this process."""
    functions = seed_program("snapkv-like").functions()
    return [functions.select_tokens_to_keep(functions.score_tokens(context), context) for context in contexts]
