"""Picks the attention path: what `KVKEEP_ATTENTION` names, or the one that suits the layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvkeep.attention import cells, native, padded, reference, triton_decode, varlen
from kvkeep.errors import UnsupportedError, near_names
from kvkeep.store import RaggedLayer

VARIABLE = "KVKEEP_ATTENTION"
PATHS: Mapping[str, Callable[[Tensor, RaggedLayer, float], Tensor]] = {
    "reference": reference.attend,
    "padded": padded.attend,
    "cells": cells.attend,
    "native": native.attend,
    "triton": triton_decode.attend,
    "varlen": varlen.attend,
}


def attend(query: Tensor, layer: RaggedLayer, scaling: float) -> Tensor:
    """Attention of the newest tokens over everything that the layer holds; see `reference.attend`.

    Raises:
        UnsupportedError: `KVKEEP_ATTENTION` names no path, or one that cannot serve this layer.
    """
    return PATHS[_named_path(query, layer) or _best_path(query, layer)](query, layer, scaling)


def _best_path(query: Tensor, layer: RaggedLayer) -> str:
    if native.suits(query, layer):
        return "native"
    if triton_decode.suits(query, layer):
        return "triton"
    if varlen.suits(query, layer):
        return "varlen"
    return "padded" if layer.is_uniform else "cells"


def _named_path(query: Tensor, layer: RaggedLayer) -> str | None:
    name = os.environ.get(VARIABLE)
    if name and name not in PATHS:
        raise UnsupportedError(
            expected=f"{VARIABLE} to name an attention path", received=f"{name!r}", remedy=near_names(name, PATHS)
        )
    if name == "native" and not native.can_attend(query, layer):
        raise UnsupportedError(
            expected="compiled attention, and a layer on the CPU whose keys and values are of one type and size",
            received=f"{query.dtype} on {query.device}, compiled code for {native.instruction_sets() or 'nothing'}",
            remedy=f"unset {VARIABLE}: each layer then takes the path that suits it; or reinstall kvkeep where there "
            "is a C++ compiler",
        )
    on_gpu = {"triton": triton_decode, "varlen": varlen}.get(name or "")
    if on_gpu and not on_gpu.can_attend(query, layer):
        raise UnsupportedError(
            expected=on_gpu.NEEDS,
            received=f"{query.dtype} of size {query.shape[-1]} on {query.device}",
            remedy=f"unset {VARIABLE}: each layer then takes the path that suits it",
        )
    return name


def attend_prompt(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention of a text over itself, with nothing before it and no padding.

    Args:
        query: `[B, H, L, D]`.
        keys: `[B, H_kv, L, D]`; not repeated for the group.
        values: `[B, H_kv, L, D]`.
        scaling: factor on the dot products.

    Returns:
        `[B, H, L, D]`.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1]
    )
