"""What a conformance suite finds, whatever the kind of the policy."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

Fault = tuple[str, str]  # its kind, and what was seen


def caught(check: Callable[[Any], Iterator[Fault]], policy: Any) -> Iterator[Fault]:
    """The faults that a check finds; an exception is one, too."""
    try:
        yield from check(policy)
    except Exception as error:
        yield f"raises {type(error).__name__}", str(error)


def generator_states() -> tuple[Any, ...]:
    """The states of the global random generators, to compare."""
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002  # watched


def value_faults(policy: Any) -> Iterator[Fault]:
    """Whether a policy is a value: a frozen dataclass that equals its copy, with the same hash."""
    params = getattr(policy, "__dataclass_params__", None)
    if params is None or not params.frozen:
        yield "not a frozen dataclass", f"{type(policy).__name__} is {'none' if params is None else 'not frozen'}"
    twin = copy.deepcopy(policy)
    if twin != policy:
        yield "not equal to its copy", "two policies with the same fields must be equal"
    elif hash(twin) != hash(policy):
        yield "not hashable", "equal policies have different hashes"
