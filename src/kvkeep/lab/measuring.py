"""All that the laboratory measures of one row, at every budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvkeep.lab.instance import Floats, Instance, forced_error
from kvkeep.lab.penalty import free_error, grown_sets, penalty
from kvkeep.lab.selection import (
    BUDGETS,
    balance,
    best_set,
    candidates,
    closable_share,
    group_vote,
    imbalance,
    kappa,
    least_dropped_mass,
    top_mass,
)


@dataclass(frozen=True)
class RowMeasures:
    """What one row loses at one budget.

    Attributes:
        entries: s.
        dropped_mass: of the top-mass set.
        imbalance: `Phi`, of the top-mass set.
        top_error: forced error of the top-mass set.
        best_error: `E_S^pool`, the least forced error over subsets of the candidates.
        balanced_error: forced error of the balancing selector's set.
        swaps: that it made.
        free_error: `E_F^FW`.
        vote_error: forced error of the set that the row's group votes for; None for a row alone.
    """

    entries: int
    dropped_mass: float
    imbalance: float
    top_error: float
    best_error: float
    balanced_error: float
    swaps: int
    free_error: float
    vote_error: float | None = None

    @property
    def closable_share(self) -> float:
        """`c`, 0 to 1."""
        return closable_share(self.top_error, self.best_error)

    @property
    def kappa(self) -> float:
        """Top-mass's error over the best one; may be infinite."""
        return kappa(self.top_error, self.best_error)

    @property
    def penalty(self) -> float:
        """`pi`; may be infinite."""
        return penalty(self.best_error, self.free_error)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def measure(
    instance: Instance, budgets: Sequence[int] = BUDGETS, group_mass: Floats | None = None
) -> list[RowMeasures]:
    """Measure a row at every budget.

    Args:
        instance: the row.
        budgets: numbers of keys, each less than N.
        group_mass: `[N]` masses summed over the heads of the row's group.

    Raises:
        InstanceError: a budget that leaves nothing to choose.
    """
    found = []
    grown = grown_sets(instance, budgets)
    for entries in budgets:
        top, pool = top_mass(instance, entries), candidates(instance, entries)
        best, balanced = best_set(instance, entries, pool), balance(instance, entries, pool)
        free = free_error(instance, entries, (top, best.kept, balanced.kept), grown[entries])
        voted = None if group_mass is None else forced_error(instance, group_vote(group_mass[None], entries))
        found.append(
            RowMeasures(
                entries=entries,
                dropped_mass=least_dropped_mass(instance, entries),
                imbalance=imbalance(instance, entries),
                top_error=forced_error(instance, top),
                best_error=best.error,
                balanced_error=balanced.error,
                swaps=balanced.steps,
                free_error=free.error,
                vote_error=voted,
            )
        )
    return found
