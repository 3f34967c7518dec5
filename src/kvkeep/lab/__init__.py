"""ContourKV's laboratory: how far from the best possible a choice of keys is, on real rows of attention.

`instance` and `selection` judge sets, `penalty` frees the weights, `rows` captures attention, `ceiling` makes the
paper's table. Needs the extra `bench`; charts need `report`.
"""

from kvkeep.lab.instance import Instance, InstanceError, dropped_mass, forced_error
from kvkeep.lab.measuring import RowMeasures, measure
from kvkeep.lab.penalty import Free, free_error, free_weights, grown_set, penalty
from kvkeep.lab.rows import AttentionRow, Place, RowError, capture_rows, cells_of, sample_places
from kvkeep.lab.selection import (
    Chosen,
    auc,
    balance,
    best_set,
    candidates,
    closable_share,
    group_vote,
    imbalance,
    is_flat,
    kappa,
    least_dropped_mass,
    rank_correlation,
    top_mass,
)

__all__ = [
    "AttentionRow",
    "Chosen",
    "Free",
    "Instance",
    "InstanceError",
    "Place",
    "RowError",
    "RowMeasures",
    "auc",
    "balance",
    "best_set",
    "candidates",
    "capture_rows",
    "cells_of",
    "closable_share",
    "dropped_mass",
    "forced_error",
    "free_error",
    "free_weights",
    "group_vote",
    "grown_set",
    "imbalance",
    "is_flat",
    "kappa",
    "least_dropped_mass",
    "measure",
    "penalty",
    "rank_correlation",
    "sample_places",
    "top_mass",
]
