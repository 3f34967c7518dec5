"""What a frozen model does with a text, layer by layer: queries, keys and values, and the target that follows.

The model runs once, with its own attention, which `hf.substitute` lets us look at. A layer's tensors are shown as soon
as the layer has attended, and are gone when the next one comes: no more than one layer is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.hf.fitting import served_model
from kvkeep.hf.substitute import LayerCall, Output, substituted
from kvkeep.hf.support import plan_model, rotary_of, unwrap
from kvkeep.learn.config import KVpopConfig, ModelShape
from kvkeep.learn.scorers import scorer_inputs
from kvkeep.learn.target import aggregate, causal_lse, future_log_mass
from kvkeep.observation import Rotary


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One layer of full attention over a text.

    Attributes:
        ordinal: which of the layers that may be evicted, from 0.
        layer: index in the model.
        queries: `[B, H, S, D]`, rotated.
        keys: `[B, H_kv, S, D]`, rotated.
        values: `[B, H_kv, S, D]`.
        scaling: factor on the products.
        rotary: the layer's rotation.
    """

    ordinal: int
    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    rotary: Rotary

    def inputs(self, kind: str) -> Tensor:
        """What a scorer sees, `[B, H_kv, S, I]`; see `scorer_inputs`."""
        positions = torch.arange(self.keys.shape[2], device=self.keys.device).expand(len(self.keys), -1)
        return scorer_inputs(self.keys, self.values, kind, positions=positions, rotary=self.rotary).float()

    def target(self, config: KVpopConfig) -> Tensor:
        """The logarithm of the future attention, `[B, H_kv, S - w]` (equations 2, 3 and 8), from the dense LSE."""
        lse = causal_lse(self.queries, self.keys, scaling=self.scaling)
        mass = future_log_mass(self.queries, self.keys, lse, config.protected_window, scaling=self.scaling)
        return aggregate(mass, self.keys.shape[1], config.aggregate, config.eps)


@torch.no_grad()
def trace(model: Any, ids: Tensor, see: Callable[[LayerTrace], object]) -> None:
    """Run a text through a model and show each layer of full attention, in order.

    Args:
        model: one that kvkeep supports, with `sdpa` or `eager` attention; attached to kvkeep or not.
        ids: `[B, S]` tokens, without padding.
        see: called under `no_grad`; what it keeps of a trace stays in memory.

    Raises:
        UnsupportedError: a model or an attention that kvkeep has not checked.
    """
    inner = unwrap(model)
    ordinals = evictable_ordinals(inner)
    decoder = inner.get_decoder()

    def look(call: LayerCall) -> Output:
        layer = int(call.module.layer_idx)
        if layer in ordinals:
            rotary = rotary_of(decoder, call.module)
            see(LayerTrace(ordinals[layer], layer, call.query, call.key, call.value, call.scaling, rotary))
        return call.former()

    with substituted(inner, look):
        decoder(input_ids=ids, use_cache=False)


def shape_of(model: Any, *, fingerprint: bool = True) -> ModelShape:
    """The part of a model that scorers are made for.

    Raises:
        UnsupportedError: a model that kvkeep has not checked.
    """
    found = served_model(model, plan_model(model))
    known = found.fingerprint() if fingerprint else ""
    return ModelShape(len(found.layers), found.kv_heads, found.head_size, known)


def evictable_ordinals(model: Any) -> dict[int, int]:
    """Which of the layers that may be evicted each of them is, by its index in the model."""
    layers = [plan.index for plan in plan_model(model) if plan.window is None]
    return {layer: ordinal for ordinal, layer in enumerate(layers)}
