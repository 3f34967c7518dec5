"""Scorers: small networks that foretell from an entry, and what came after it, whether it will be looked at.

Each is one network for every cell of a model; `KVpopScorer` has all that an eviction needs and is what is saved.
"""

from kvkeep.learn.scorers.base import CellScorer
from kvkeep.learn.scorers.bundle import SCORERS, KVpopScorer
from kvkeep.learn.scorers.inputs import InputStatistics, scorer_inputs
from kvkeep.learn.scorers.linear import LinearScorer
from kvkeep.learn.scorers.mlp import MLPScorer
from kvkeep.learn.scorers.mlstm import MLSTMScorer
from kvkeep.learn.scorers.zero import ZeroScorer

__all__ = [
    "SCORERS",
    "CellScorer",
    "InputStatistics",
    "KVpopScorer",
    "LinearScorer",
    "MLPScorer",
    "MLSTMScorer",
    "ZeroScorer",
    "scorer_inputs",
]
