"""Shows a model to a policy that must know it, once for each cache."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from kvkeep.budget import Budget
from kvkeep.hf.models import weights_fingerprint
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


# Hashing a model takes as long as some steps of it, and caches are made often. What weights were hashed, by where they
# stand and how often they were written to.
_Stamp = list[tuple[int, int]]
_known: weakref.WeakKeyDictionary[nn.Module, tuple[_Stamp, str]] = weakref.WeakKeyDictionary()


def _fingerprint(model: nn.Module) -> str:
    try:
        stamp = [(tensor.data_ptr(), tensor._version) for tensor in (*model.parameters(), *model.buffers())]
    except RuntimeError:  # made under inference_mode: nothing tells whether they were written to
        return weights_fingerprint(model)
    if model not in _known or _known[model][0] != stamp:
        _known[model] = stamp, weights_fingerprint(model)
    return _known[model][1]
