"""A model whose attention is looked at, or computed by somebody else, for as long as a block of code runs.

The model bears the name of an attention function that is registered beside transformers' own. Within the block every
layer's attention goes through a function of the caller, which gets the layer's queries, keys and values and a way to
the model's former attention. Nothing of the model is replaced. The former name is set again afterwards, also after an
exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from kvkeep.errors import UnsupportedError
from kvkeep.hf import attention
from kvkeep.hf.attention import FormerOf
from kvkeep.hf.attention import Output as Output

NAMES = {"sdpa": "kvkeep_substitute_sdpa", "eager": "kvkeep_substitute_eager"}


@dataclass(frozen=True, eq=False)
class LayerCall:
    """The attention of one layer in one forward.

    Attributes:
        module: the model's attention module.
        query: `[B, H, L, D]`, rotated.
        key: `[B, H_kv, L, D]`, rotated.
        value: `[B, H_kv, L, D]`.
        scaling: factor on the products.
        former: what the model itself computes: `[B, L, H, D]`, and weights or None.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    former: Callable[[], Output]


Substitute = Callable[[LayerCall], Output]

_active: ContextVar[Substitute | None] = ContextVar("kvkeep_substitute", default=None)


@contextmanager
def substituted(model: Any, substitute: Substitute) -> Iterator[None]:
    """Let a function compute, or only look at, the attention of every layer within the block.

    Args:
        model: an unwrapped transformers model with `sdpa` or `eager` attention; attached to kvkeep or not.
        substitute: called for each layer; returns what the layer's attention gives.

    Raises:
        UnsupportedError: another attention implementation.
    """
    former = model.config.get_text_config(decoder=True)._attn_implementation
    by_name = {name: known for known, name in attention.NAMES.items()}
    known = by_name.get(former, former)
    if known not in NAMES:
        raise UnsupportedError(
            expected=f"a model with attention implementation {' or '.join(NAMES)}",
            received=f"{former!r}",
            remedy="call model.set_attn_implementation('sdpa') first",
        )
    _register()
    _set(model, NAMES[known])
    token = _active.set(substitute)
    try:
        yield
    finally:
        _active.reset(token)
        _set(model, former)


def _through(former_of: FormerOf) -> Callable[..., Output]:
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> Output:
        def former() -> Output:
            given: Output = former_of(module)(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
            return given

        substitute = _active.get()
        if substitute is None:
            return former()
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return substitute(LayerCall(module, query, key, value, scale, former))

    return forward


def _register() -> None:
    """Adds our names to transformers' registries and changes nothing that is in them."""
    for known, name in NAMES.items():
        AttentionInterface.register(name, _through(attention.FORMER[known]))
    AttentionMaskInterface.register(NAMES["sdpa"], sdpa_mask)
    AttentionMaskInterface.register(NAMES["eager"], eager_mask)


def _set(model: Any, name: str) -> None:
    if model.config.get_text_config(decoder=True) is model.config:
        model.set_attn_implementation(name)
    else:  # the vision tower of a multimodal model keeps its own
        model.set_attn_implementation({"text_config": name})
