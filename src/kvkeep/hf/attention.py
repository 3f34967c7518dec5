"""The attention functions that kvkeep registers with transformers, under two names that keep no state.

A model that is attached computes attention by these. They serve kvkeep's caches, and hand every other cache to the
implementation that the model had, `sdpa` or `eager`, so that results with other caches do not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask, sdpa_mask

from kvkeep.errors import CacheStateError, UnsupportedError

Output = tuple[Tensor, Tensor | None]
FormerOf = Callable[[nn.Module], Callable[..., Any]]

# The name that an attached model has, by the name that it had before.
NAMES = {"sdpa": "kvkeep_sdpa", "eager": "kvkeep_eager"}

# What a model computed attention by under that name. Each model's file has its own eager attention; there is none in
# transformers' registry.
FORMER: dict[str, FormerOf] = {
    "sdpa": lambda module: sdpa_attention_forward,
    "eager": lambda module: sys.modules[type(module).__module__].eager_attention_forward,
}

# What the models on the allow-list pass to the attention function beside tensors and scale. Anything else could change
# the scores (sinks, soft caps, biases), and would be lost without a word.
_HARMLESS = frozenset({"position_ids", "use_cache", "sliding_window", "cache_position", "is_causal"})
# What calls of `generate` and of a model may bring along, on its way to nowhere: `tokenizer` comes with stop strings.
_HARMLESS |= {"tokenizer", "assistant_tokenizer", "output_hidden_states"}


class KeptLength(int):
    """The mask length of a layer whose masking kvkeep does itself; an ordinary number to everybody else."""


class CacheLayer(Protocol):
    """A cache layer that computes its own attention."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """`[B, q, H, D]` attention of the new tokens, which are stored first."""
        ...


class Handle:
    """What a kvkeep layer's `update` returns in the place of keys and values.

    The model's forward keeps its locals until the layer is done; the handle lets the attention function take the
    tensors out, so that a layer's dense keys and values are freed as soon as they have been cut.
    """

    def __init__(self, layer: CacheLayer, key: Tensor, value: Tensor) -> None:
        self._layer = layer
        self._pair: tuple[Tensor, Tensor] | None = (key, value)

    def take(self) -> tuple[CacheLayer, Tensor, Tensor]:
        """The layer and the new tokens' keys and values; only once."""
        if self._pair is None:
            raise CacheStateError(
                expected="one attention call for each update of a layer",
                received="a second one",
                remedy="this is a bug of kvkeep or an attention module it has not checked; please report it",
            )
        (key, value), self._pair = self._pair, None
        return self._layer, key, value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CacheStateError(
            expected="a model that kvkeep is attached to",
            received=f"attention code of another implementation, which asked for `{name}` of kvkeep's keys",
            remedy="do not change the model's attention implementation while a KeepCache is in use",
        )


class HandingLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """A cache layer that computes its own attention: what transformers asks of it, and gets a handle for."""

    is_sliding = False
    supports_early_init = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: a layer takes its shape from the first tokens."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hand the new tokens to the attention function, which calls `attend` after it has taken them out."""
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask; the length is marked, so that no q x L mask is built."""
        return KeptLength(self.get_seq_length() + query_length), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit; the name before transformers 5.17."""
        return -1


def _forward(
    former: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor | Handle,
    value: Tensor | Handle,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Output:
    if not isinstance(key, Handle):
        output: Output = former(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
        return output
    strange = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    strange = [name for name in strange if kwargs[name] is not False]
    if strange or dropout:
        raise UnsupportedError(
            expected="attention of queries, keys and a scale, which is all that kvkeep computes",
            received=f"{', '.join(strange) or f'dropout={dropout}'} in {type(module).__name__}",
            remedy="call model.eval(); a model whose attention needs more than that is not supported",
        )
    layer, new_key, new_value = key.take()
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return layer.attend(module, query, new_key, new_value, scaling), None


def _serving(former_of: FormerOf) -> Callable[..., Output]:
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor | Handle,
        value: Tensor | Handle,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> Output:
        return _forward(former_of(module), module, query, key, value, attention_mask, scaling, dropout, kwargs)

    return forward


def _mask(former: Any, kv_length: int, mask_function: Any, kwargs: dict[str, Any]) -> Tensor | None:
    if not isinstance(kv_length, KeptLength):
        mask: Tensor | None = former(kv_length=kv_length, mask_function=mask_function, **kwargs)
        return mask
    if mask_function is not causal_mask_function:
        raise UnsupportedError(
            expected="causal attention over the evictable layers",
            received=f"another mask ({getattr(mask_function, '__name__', mask_function)})",
            remedy="packed sequences, prefix-LM masks and bidirectional image tokens are not supported",
        )
    return None  # padding was read before the first layer; a q x L mask is never built


def _sdpa_mask(*, kv_length: int, mask_function: Any = causal_mask_function, **kwargs: Any) -> Tensor | None:
    return _mask(sdpa_mask, kv_length, mask_function, kwargs)


def _eager_mask(*, kv_length: int, mask_function: Any = causal_mask_function, **kwargs: Any) -> Tensor | None:
    return _mask(eager_mask, kv_length, mask_function, kwargs)


def register() -> None:
    """Make both names known to transformers. Adds to its registries and changes nothing that is in them."""
    for known, name in NAMES.items():
        AttentionInterface.register(name, _serving(FORMER[known]))
    AttentionMaskInterface.register(NAMES["sdpa"], _sdpa_mask)
    AttentionMaskInterface.register(NAMES["eager"], _eager_mask)
