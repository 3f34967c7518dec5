"""KVpop: learn from the attention that entries will get which of them to keep.

`config` says what a policy is made of, `target` measures future attention, `ranking` decides who stays, `loss` compares
the two at the boundary, `scorers` are what is trained. Nothing here knows transformers.
"""

from kvkeep.learn.config import KVpopConfig, LearnError, ModelShape
from kvkeep.learn.loss import BoundaryLoss, LossSettings, boundary_loss, sample_queries
from kvkeep.learn.ranking import (
    Boundary,
    boundary,
    effective_score,
    evict_at,
    kept_after,
    log_gamma,
    recall,
    static_priority,
    visible_mask,
)
from kvkeep.learn.scorers import InputStatistics, KVpopScorer, scorer_inputs
from kvkeep.learn.target import aggregate, causal_lse, future_log_mass

__all__ = [
    "Boundary",
    "BoundaryLoss",
    "InputStatistics",
    "KVpopConfig",
    "KVpopScorer",
    "LearnError",
    "LossSettings",
    "ModelShape",
    "aggregate",
    "boundary",
    "boundary_loss",
    "causal_lse",
    "effective_score",
    "evict_at",
    "future_log_mass",
    "kept_after",
    "log_gamma",
    "recall",
    "sample_queries",
    "scorer_inputs",
    "static_priority",
    "visible_mask",
]
