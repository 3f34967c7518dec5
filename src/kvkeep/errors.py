"""The errors of kvkeep. Each says what was expected, what came, and what to do.

KvkeepError
├── BudgetError         a budget that cannot be read, or cannot be kept
├── PolicyError         an unknown policy, part or option; a policy that breaks its contract
├── UnsupportedError    a model, a layer, an argument or a mode that kvkeep has not checked
├── CacheStateError     a cache that cannot serve the call in the state that it is in
├── ModelFileError      a model file that is missing, incomplete or not the one that was expected
├── TaskError           a task, a data set or a sample that cannot be made or read
└── ResultsError        results that cannot be read, or a comparison that they do not bear
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class KvkeepError(Exception):
    """Base of all errors that kvkeep raises on purpose.

    Args:
        expected: what would have been right, as a sentence without a full stop.
        received: what came instead.
        remedy: what the caller can do about it.
    """

    def __init__(self, *, expected: str, received: str, remedy: str) -> None:
        self.expected = expected
        self.received = received
        self.remedy = remedy
        super().__init__(f"expected {expected}; received {received}; {remedy}")

    def to_dict(self) -> dict[str, Any]:
        """As programs read it: the kind of error, what was expected, what came, what to do."""
        parts = {"expected": self.expected, "received": self.received, "remedy": self.remedy}
        return {"error": type(self).__name__, **parts}


class BudgetError(KvkeepError):
    """A budget that cannot be read, or that cannot be kept."""


class PolicyError(KvkeepError):
    """An unknown policy, part or option, or a policy that breaks its contract."""


class UnsupportedError(KvkeepError):
    """A model, a layer, an argument or a mode that kvkeep has not checked."""


class CacheStateError(KvkeepError):
    """A cache that cannot serve the call in the state that it is in."""


class ModelFileError(KvkeepError):
    """A model file that is missing, incomplete, or not the one that was expected."""


class TaskError(KvkeepError):
    """A task, a data set or a sample that cannot be made or read."""


class ResultsError(KvkeepError):
    """Results that cannot be read, or a comparison that they do not bear."""


def near_names(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest known names first, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    suggestion = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"{suggestion}known: {', '.join(names)}"
