"""Options that several commands share, and the errors of options that do not go together."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from kvkeep.budget import Budget, parse_bytes
from kvkeep.errors import KvkeepError

Protocol = Literal["query-agnostic", "query-aware"]
ModelName = Annotated[str, Parameter(help="A known model, a folder, a .gguf file, or an owner/name of the hub.")]
# "-" begins with a hyphen, and is no option.
TextFile = Annotated[str, Parameter(help="A text file in UTF-8; '-' reads stdin.", allow_leading_hyphen=True)]
Dtype = Annotated[
    str,
    Parameter(
        help="Type of weights and cache: float32, bfloat16, float16, float64; auto is what the model was saved in, and "
        "float32 for known models and .gguf files."
    ),
]
Device = Annotated[str, Parameter(help="Of torch: cpu, cuda, cuda:1.")]
Json = Annotated[bool, Parameter(negative="", help="Print one JSON object instead of text.", show_default=False)]
Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Texts = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
Paths = Annotated[tuple[Path, ...], Parameter(negative="", show_default=False)]
Count = Annotated[int, Parameter(validator=Number(gte=1))]
Whole = Annotated[int, Parameter(validator=Number(gte=0))]  # such as a seed


class OptionError(KvkeepError):
    """A command line that cannot be read, options that do not go together, or a file that one of them names."""


def unreadable(complaint: str, command: Sequence[str]) -> OptionError:
    """The error for a command line that cannot be read.

    Args:
        complaint: what the parser has to say.
        command: the words of the command that it was read for, as far as they were understood.
    """
    called = " ".join(["kvkeep", *command])
    return OptionError(
        expected=f"a command line that `{called}` can read",
        received=" ".join(complaint.split()).rstrip("."),
        remedy=f"see `{called} --help`",
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """How much may stay; one of the three.

    Attributes:
        compression_ratio: Fraction of the entries to remove, 0 <= r < 1.
        entries: Entries that a cell (layer and KV head) keeps on average.
        bytes: Bytes of the whole cache after the cut, such as 64MiB.
    """

    compression_ratio: float | None = None
    entries: int | None = None
    bytes: str | None = None

    def given(self) -> dict[str, Any]:
        """Those that were given, as `Session` and `Budget` take them."""
        values = {
            "compression_ratio": self.compression_ratio,
            "entries": self.entries,
            "bytes": None if self.bytes is None else parse_bytes(self.bytes),
        }
        return {name: value for name, value in values.items() if value is not None}

    def check(self, policy: Any) -> None:
        """Refuse a budget that `policy` cannot be given, before a model is loaded or fetched.

        Raises:
            BudgetError: none, more than one, or one out of range; only `full` needs none. A ratio for a policy that
                holds a cap at every step.
        """
        from kvkeep.policies import Full, OnlinePolicy
        from kvkeep.policies.online import refuse_ratio

        if self.given() or not isinstance(policy, Full):
            budget = Budget(**self.given())
            if isinstance(policy, OnlinePolicy):
                refuse_ratio(policy, budget)


def read_text(path: str, option: str) -> str:
    """The text of a file, or of stdin for `-`.

    Raises:
        OptionError: it cannot be read, or is not UTF-8.
    """
    try:
        return (
            sys.stdin.buffer.read().decode("utf-8")
            if path == "-"
            else Path(path).expanduser().read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            expected=f"a text file in UTF-8 for {option}",
            received=f"{path}: {error.strerror if isinstance(error, OSError) else error}",
            remedy="check the path; '-' reads stdin",
        ) from None


def writable(path: Path, option: str) -> Path:
    """A path that a file can be written to, checked before the work begins.

    Raises:
        OptionError: there is no such folder.
    """
    path = path.expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise OptionError(
            expected=f"a file in a folder that exists for {option}",
            received=f"{path}",
            remedy="make the folder first" if not path.is_dir() else "name a file in it",
        )
    return path


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file that `writable` found no fault with.

    Raises:
        OptionError: the system refuses it all the same.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            expected=f"a file that can be written for {option}",
            received=f"{path}: {error.strerror}",
            remedy="choose another folder",
        ) from None


def seeded_policy(text: str, seed: int) -> Any:
    """The policy that a text names; one that draws takes `seed`, unless its brackets name one."""
    from kvkeep.policies import OnlinePolicy, Policy, parse_policy

    policy = parse_policy(text)
    if isinstance(policy, OnlinePolicy) and hasattr(policy, "seed") and not re.search(r"\bseed\s*=", text):
        return replace(policy, seed=seed)  # type: ignore[type-var]
    if isinstance(policy, Policy) and hasattr(policy.scorer, "seed") and not re.search(r"\bseed\s*=", text):
        return replace(policy, scorer=replace(policy.scorer, seed=seed))  # type: ignore[type-var]
    return policy


@contextmanager
def packages(purpose: str, extra: str) -> Iterator[None]:
    """Turn a missing import into what to install.

    Args:
        purpose: ends "the packages that ...".
        extra: of kvkeep, which has them.

    Raises:
        OptionError: something is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise OptionError(
            expected=f"the packages that {purpose}",
            received=str(error),
            remedy=f'pip install "kvkeep[{extra}]"',
        ) from None
