"""kvkeep: keep the entries of a key-value cache that matter, physically delete the rest.

The public names are imported when they are first used: torch and transformers take seconds, which `kvkeep --help` and
a test of a policy need not wait for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from kvkeep.budget import Budget
    from kvkeep.errors import (
        BudgetError,
        CacheStateError,
        KvkeepError,
        ModelFileError,
        PolicyError,
        ResultsError,
        TaskError,
        UnsupportedError,
    )
    from kvkeep.hf.attach import attached, detach
    from kvkeep.hf.cache import KeepCache
    from kvkeep.hf.decoding import decode_batch
    from kvkeep.hf.generation import Answer
    from kvkeep.hf.models import load_model
    from kvkeep.hf.repeat_prompt import RepeatPrompt
    from kvkeep.hf.session import Session
    from kvkeep.hf.weighing import CacheBytes, measure_bytes
    from kvkeep.observation import Needs, Observation, SecondPass
    from kvkeep.policies import Policy, Scorer, TopK, Uniform, available_policies, parse_policy, register

__all__ = [
    "Answer",
    "Budget",
    "BudgetError",
    "CacheBytes",
    "CacheStateError",
    "KeepCache",
    "KvkeepError",
    "ModelFileError",
    "Needs",
    "Observation",
    "Policy",
    "PolicyError",
    "RepeatPrompt",
    "ResultsError",
    "Scorer",
    "SecondPass",
    "Session",
    "TaskError",
    "TopK",
    "Uniform",
    "UnsupportedError",
    "attached",
    "available_policies",
    "decode_batch",
    "detach",
    "load_model",
    "measure_bytes",
    "parse_policy",
    "register",
]

__version__ = "0.1.0"

_HOMES = {
    "budget": ("Budget",),
    "errors": (
        "BudgetError",
        "CacheStateError",
        "KvkeepError",
        "ModelFileError",
        "PolicyError",
        "ResultsError",
        "TaskError",
        "UnsupportedError",
    ),
    "hf.attach": ("attached", "detach"),
    "hf.cache": ("KeepCache",),
    "hf.decoding": ("decode_batch",),
    "hf.generation": ("Answer",),
    "hf.models": ("load_model",),
    "hf.repeat_prompt": ("RepeatPrompt",),
    "hf.session": ("Session",),
    "hf.weighing": ("CacheBytes", "measure_bytes"),
    "observation": ("Needs", "Observation", "SecondPass"),
    "policies": ("Policy", "Scorer", "TopK", "Uniform", "available_policies", "parse_policy", "register"),
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
