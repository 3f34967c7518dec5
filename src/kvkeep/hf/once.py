"""What is made of all weights of a model, kept until they change: it takes as long as some steps of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from torch import nn

Result = TypeVar("Result")

# Where the weights stand, and how often they were written to.
Stamp = list[tuple[int, int]]


def once_for_weights(function: Callable[[nn.Module], Result]) -> Callable[[nn.Module], Result]:
    """A function of a model's weights, computed once for each model until they change. Keeps no model alive."""
    known: weakref.WeakKeyDictionary[nn.Module, tuple[Stamp, Result]] = weakref.WeakKeyDictionary()

    @wraps(function)
    def remembered(model: nn.Module) -> Result:
        try:
            stamp = [(tensor.data_ptr(), tensor._version) for tensor in (*model.parameters(), *model.buffers())]
        except RuntimeError:  # made under inference_mode: nothing tells whether they were written to
            return function(model)
        if model not in known or known[model][0] != stamp:
            known[model] = stamp, function(model)
        return known[model][1]

    return remembered
