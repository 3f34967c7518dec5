"""Attaching kvkeep to a model, and leaving it as it was.

Attaching sets the model's attention implementation to one of kvkeep's names and puts two hooks on its decoder. The
first reads the arguments of a forward before any layer runs, refuses what kvkeep cannot honour, and tells the cache
what comes; the second tells the cache that the forward went through.

All that attaching changes stands in the model itself. So a copy of an attached model, by `copy.deepcopy` or through a
pickle, is an attached model of its own: it takes caches, runs without them, and can be detached.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvkeep.errors import UnsupportedError
from kvkeep.hf import attention
from kvkeep.hf.support import supported_decoder, unwrap


class _Hook:
    """A hook on the decoder, which can be copied and pickled with it.

    Args:
        names: of the arguments of the decoder's forward, in order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        # Copies point to the copied model, and reserve their number there: see RemovableHandle.
        self.handle: RemovableHandle | None = None

    def _cache_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The cache, None if it is not kvkeep's, and all arguments by name."""
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        # transformers calls the argument `cache` from 5.24 on, and `past_key_values` before.
        given = arguments.get("cache")
        given = arguments.get("past_key_values") if given is None else given
        return (given if isinstance(given, Cache) and hasattr(given, "begin_forward") else None), arguments

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a new process transformers does not know the model's attention yet."""
        vars(self).update(state)
        attention.register()


class _Before(_Hook):
    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache, arguments = self._cache_in(args, kwargs)
        if cache is not None:
            _before_forward(cache, decoder, arguments)


class _After(_Hook):
    def __call__(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache, _ = self._cache_in(args, kwargs)
        if cache is not None:
            cache.finish_forward()


def _hooks(decoder: nn.Module) -> list[_Hook]:
    """Our hooks on a decoder, if kvkeep is attached to it."""
    every: list[Any] = [*decoder._forward_pre_hooks.values(), *decoder._forward_hooks.values()]
    return [hook for hook in every if isinstance(hook, _Hook)]


def attach(model: Any) -> PreTrainedModel:
    """Attach kvkeep to a model; nothing happens if it is attached already.

    Returns:
        The transformers model, unwrapped.

    Raises:
        UnsupportedError: a model or an attention implementation that kvkeep has not checked.
    """
    inner = unwrap(model)
    decoder = supported_decoder(inner)
    current = inner.config.get_text_config(decoder=True)._attn_implementation
    by_name = {name: former for former, name in attention.NAMES.items()}
    # A model that shares its config with an attached one has our name, and no hooks yet; the name of an attached one
    # may have been changed since.
    former = by_name.get(current, current)
    if former not in attention.NAMES:
        raise UnsupportedError(
            expected=f"a model with attention implementation {' or '.join(attention.NAMES)}",
            received=f"{current!r}",
            remedy="call model.set_attn_implementation('sdpa') first",
        )
    hooks = _hooks(decoder)
    if hooks and current in by_name:
        return inner
    if not hooks:
        names = list(inspect.signature(decoder.forward).parameters)
        before, after = _Before(names), _After(names)
        before.handle = decoder.register_forward_pre_hook(before, with_kwargs=True)
        after.handle = decoder.register_forward_hook(after, with_kwargs=True)
    attention.register()
    _set_implementation(inner, attention.NAMES[former])
    return inner


def detach(model: Any) -> None:
    """Leave a model as it was before `attach`. Caches that still belong to it can no longer be used with it."""
    inner = unwrap(model)
    hooks = _hooks(inner.get_decoder())
    for hook in hooks:
        if hook.handle is not None:
            hook.handle.remove()
    by_name = {name: former for former, name in attention.NAMES.items()}
    current = inner.config.get_text_config(decoder=True)._attn_implementation
    if hooks and current in by_name:
        _set_implementation(inner, by_name[current])


@contextmanager
def attached(model: Any) -> Iterator[PreTrainedModel]:
    """`with kvkeep.attached(model): ...` attaches, and detaches at the end, also after an exception."""
    inner = attach(model)
    try:
        yield inner
    finally:
        detach(inner)


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    text_config = model.config.get_text_config(decoder=True)
    if text_config is model.config:
        model.set_attn_implementation(name)
    else:  # the vision tower of a multimodal model keeps its own
        model.set_attn_implementation({"text_config": name})


def _before_forward(cache: Any, decoder: nn.Module, arguments: dict[str, Any]) -> None:
    """Refuse what kvkeep cannot honour, and tell the cache what comes."""
    config: Any = decoder.config
    use_cache = arguments.get("use_cache")
    if use_cache is False or (use_cache is None and getattr(config, "use_cache", True) is False):
        raise UnsupportedError(
            expected="use_cache=True, since the cache takes part in the attention",
            received="use_cache=False together with a KeepCache",
            remedy="drop use_cache=False, or drop the cache",
        )
    asks = arguments.get("output_attentions")
    if asks or (asks is None and getattr(config, "output_attentions", False)):
        raise UnsupportedError(
            expected="a forward without output_attentions",
            received="output_attentions=True",
            remedy="evicted entries have no attention to give; use a DynamicCache with the eager implementation",
        )
    mask = arguments.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        kind = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise UnsupportedError(
            expected="a 2-D attention mask [rows, tokens] that marks padding",
            received=kind,
            remedy="prepared 4-D masks describe entries that may be evicted; pass the padding mask",
        )
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return  # the model itself refuses this
    if torch.is_grad_enabled() and any(p.requires_grad for p in decoder.parameters()):
        warnings.warn(
            "A KeepCache under autograd: the graph keeps every layer's keys and values alive, so no memory is freed, "
            "and no gradient flows through the cache. Wrap the call in torch.no_grad().",
            stacklevel=2,
        )
    shape = tokens.shape[0], tokens.shape[1]
    cache.begin_forward(decoder, shape, mask, arguments.get("position_ids"), arguments.get("input_ids"))
