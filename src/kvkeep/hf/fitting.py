"""Shows a model to a policy that must know it, once for each cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvkeep.budget import Budget
from kvkeep.hf.models import weights_identity
from kvkeep.hf.once import once_for_weights
from kvkeep.hf.support import LayerPlan, unwrap
from kvkeep.policies.fitting import FittingPolicy, ServedModel
from kvkeep.policies.online import OnlinePolicy


def fitted(policy: OnlinePolicy | None, model: Any, plans: Sequence[LayerPlan], budget: Budget) -> OnlinePolicy | None:
    """The policy itself, or what it makes of itself for this model.

    Args:
        policy: of a cache; None where there is no online one.
        model: that the cache is for.
        plans: its layers.
        budget: of the cache.

    Raises:
        KvkeepError: the policy was made for another model.
    """
    return policy.fit(served_model(model, plans, budget)) if isinstance(policy, FittingPolicy) else policy


def served_model(model: Any, plans: Sequence[LayerPlan], budget: Budget | None = None) -> ServedModel:
    """What a policy may ask of a model."""
    inner = unwrap(model)
    evictable = [plan for plan in plans if plan.window is None]
    shape = evictable[0].shape
    return ServedModel(
        layers=tuple(plan.index for plan in evictable),
        kv_heads=shape.kv_heads,
        head_size=shape.entry_bytes // (2 * inner.dtype.itemsize),
        device=inner.device,
        entries=None if budget is None else budget.entries,
        fingerprint=partial(_fingerprint, inner),
    )


# Caches are made often.
_fingerprint = once_for_weights(weights_identity)
