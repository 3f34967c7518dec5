"""kvkeep: keep the entries of a key-value cache that matter, physically delete the rest."""

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
