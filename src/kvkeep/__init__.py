"""kvkeep: keep the entries of a key-value cache that matter, physically delete the rest.

The public names are imported when they are first used: torch and transformers take seconds, which `kvkeep --help` and
a test of a policy need not wait for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from kvkeep.budget import Budget
    from kvkeep.errors import (
        BudgetError,
        CacheStateError,
        KvkeepError,
        ModelFileError,
        PolicyError,
        UnsupportedError,
    )
    from kvkeep.hf.attach import attached, detach
    from kvkeep.hf.cache import KeepCache
    from kvkeep.hf.models import load_model
    from kvkeep.hf.session import Answer, Session
    from kvkeep.observation import Needs, Observation
    from kvkeep.policies import Policy, parse_policy, policies, register

__all__ = [
    "Answer",
    "Budget",
    "BudgetError",
    "CacheStateError",
    "KeepCache",
    "KvkeepError",
    "ModelFileError",
    "Needs",
    "Observation",
    "Policy",
    "PolicyError",
    "Session",
    "UnsupportedError",
    "attached",
    "detach",
    "load_model",
    "parse_policy",
    "policies",
    "register",
]

__version__ = "0.1.0"

_HOMES = {
    "budget": ("Budget",),
    "errors": ("BudgetError", "CacheStateError", "KvkeepError", "ModelFileError", "PolicyError", "UnsupportedError"),
    "hf.attach": ("attached", "detach"),
    "hf.cache": ("KeepCache",),
    "hf.models": ("load_model",),
    "hf.session": ("Answer", "Session"),
    "observation": ("Needs", "Observation"),
    "policies": ("Policy", "parse_policy", "register"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("_"))])


class _Package(ModuleType):
    """This package. `kvkeep.policies` is the function that lists them; the room of that name is for `import`."""

    @property
    def policies(self) -> Callable[[], Mapping[str, Any]]:
        function: Callable[[], Mapping[str, Any]] = import_module("kvkeep.policies.registry").policies
        return function

    @policies.setter
    def policies(self, room: ModuleType) -> None:
        """Importing the room would put it in the function's place."""


sys.modules[__name__].__class__ = _Package
