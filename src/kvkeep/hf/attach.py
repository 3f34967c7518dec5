"""Attaching kvkeep to a model, and leaving it as it was.

Attaching sets the model's attention implementation to one of kvkeep's names and puts two hooks on its decoder. The
first reads the arguments of a forward before any layer runs, refuses what kvkeep cannot honour, and tells the cache
what comes; the second tells the cache that the forward went through.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvkeep.errors import UnsupportedError
from kvkeep.hf import attention
from kvkeep.hf.support import check_model, unwrap


@dataclass
class _Attachment:
    former: str
    hooks: list[Any]


_attached: WeakKeyDictionary[PreTrainedModel, _Attachment] = WeakKeyDictionary()


def attach(model: Any) -> PreTrainedModel:
    """Attach kvkeep to a model; nothing happens if it is attached already.

    Returns:
        The transformers model, unwrapped.

    Raises:
        UnsupportedError: a model or an attention implementation that kvkeep has not checked.
    """
    inner = unwrap(model)
    decoder = check_model(inner)
    current = inner.config.get_text_config(decoder=True)._attn_implementation
    attachment = _attached.get(inner)
    if attachment is not None and current == attention.NAMES[attachment.former]:
        return inner
    by_name = {name: former for former, name in attention.NAMES.items()}
    former = by_name.get(current, current)  # a model that shares its config with an attached one has our name already
    if former not in attention.NAMES:
        raise UnsupportedError(
            expected=f"a model with attention implementation {' or '.join(attention.NAMES)}",
            received=f"{current!r}",
            remedy="call model.set_attn_implementation('sdpa') first",
        )
    attention.register()
    _set_implementation(inner, attention.NAMES[former])
    if attachment is not None:
        attachment.former = former  # the implementation was changed since
    else:
        names = list(inspect.signature(decoder.forward).parameters)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _before_forward(inner, module, dict(zip(names, args, strict=False)) | kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            cache = _cache_in(dict(zip(names, args, strict=False)) | kwargs)
            if _is_ours(cache):
                cache.finish_forward()

        hooks = [
            decoder.register_forward_pre_hook(before, with_kwargs=True),
            decoder.register_forward_hook(after, with_kwargs=True),
        ]
        _attached[inner] = _Attachment(former, hooks)
    return inner


def detach(model: Any) -> None:
    """Leave a model as it was before `attach`. Caches that still belong to it can no longer be used with it."""
    inner = unwrap(model)
    attachment = _attached.pop(inner, None)
    if attachment is None:
        return
    for hook in attachment.hooks:
        hook.remove()
    if inner.config.get_text_config(decoder=True)._attn_implementation == attention.NAMES[attachment.former]:
        _set_implementation(inner, attachment.former)


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


def _cache_in(arguments: dict[str, Any]) -> Any:
    # transformers calls the argument `cache` from 5.24 on, and `past_key_values` before.
    given = arguments.get("cache")
    return arguments.get("past_key_values") if given is None else given


def _is_ours(cache: Any) -> bool:
    return isinstance(cache, Cache) and hasattr(cache, "begin_forward")


def _before_forward(model: PreTrainedModel, decoder: nn.Module, arguments: dict[str, Any]) -> None:
    cache = _cache_in(arguments)
    if not _is_ours(cache):
        return
    config = model.config.get_text_config(decoder=True)
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
    cache.begin_forward(decoder, (tokens.shape[0], tokens.shape[1]), mask, arguments.get("position_ids"))
