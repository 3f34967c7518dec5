"""Policies that must know the model before they can serve it, such as trained ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kvkeep.policies.online import OnlinePolicy


@dataclass(frozen=True)
class ServedModel:
    """The part of a model that a policy may have been made for.

    Attributes:
        layers: the model's indices of the layers that may be evicted.
        kv_heads: KV heads of each.
        head_size: D.
        device: that the model is on.
        entries: the cap of a cell, where it is known before the first text; None for a cap in bytes.
        fingerprint: of the weights, whatever floating type they are in; computed when it is asked for.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_size: int
    device: torch.device
    entries: int | None
    fingerprint: Callable[[], str]


@runtime_checkable
class FittingPolicy(Protocol):
    """A policy that is asked before it serves a model."""

    def fit(self, model: ServedModel) -> OnlinePolicy:
        """The policy that will serve this model.

        Raises:
            KvkeepError: it was made for another one.
        """
        ...
