"""One row of results: what one policy did with one question about one context, at one budget."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvkeep.budget import Budget
from kvkeep.errors import BudgetError, ResultsError

# Raised when a field is added, removed or changes its meaning.
SCHEMA_VERSION = 1

# The policy's name in rows of the full cache, which others are judged against. Its budget is compression_ratio=0.
FULL = "full"

PROTOCOLS = {
    "query-agnostic": "the question was hidden when entries were evicted",
    "query-aware": "the question was visible when entries were evicted",
}


class Key(NamedTuple):
    """What a row is about. A log holds each key once."""

    sample: str
    turn: int
    policy: str
    budget: str
    protocol: str


def row_key(sample: str, turn: int, policy: str, budget: Mapping[str, float | int], protocol: str) -> Key:
    """The key of a row, also before there is one: `row_key(...) in log` says that the work is done.

    Args:
        sample: `Sample.key`.
        turn: index of the question.
        policy: as it is written on the command line.
        budget: `Budget.describe()`.
        protocol: one of `PROTOCOLS`.

    Raises:
        ResultsError: the budget is none.
    """
    return Key(_text(sample), turn, _text(policy), json.dumps(_budget(budget)), protocol)


class _Part:
    """Fields that are all numbers, or not measured."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _number(value, f"{type(self).__name__.lower()}.{name}"))


@dataclass(frozen=True)
class Memory(_Part):
    """Measured bytes, as the cache's ledger gives them: `Memory(**cache.ledger.to_dict())`.

    Attributes:
        held_bytes: payload, slack, metadata and state, over the layers that the policy may evict.
        full_bytes: payload of the full cache of the same text, over the same layers.
        fraction: held / full.
        peak_bytes: the most held at once, prompt processing and sliding windows included.
        payload_bytes: keys and values of the kept entries.
        slack_bytes: reserved, unused.
        metadata_bytes: offsets and positions.
        state_bytes: a scorer's memory.
        window_bytes: what sliding-window layers hold, which is not in `held_bytes`.
        logical_length: tokens seen.
        entries: held, over all cells.
        entries_full: of the full cache.
        uncut_entries: came after the last cut.
    """

    held_bytes: int
    full_bytes: int
    fraction: float
    peak_bytes: int
    payload_bytes: int
    slack_bytes: int = 0
    metadata_bytes: int = 0
    state_bytes: int = 0
    window_bytes: int = 0
    logical_length: int = 0
    entries: int = 0
    entries_full: int = 0
    uncut_entries: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name, value in vars(self).items() if value is None]
        if missing:
            raise ResultsError(
                expected="measured bytes in every row",
                received=f"None for {', '.join(missing)}",
                remedy="pass Memory(**cache.ledger.to_dict())",
            )


@dataclass(frozen=True)
class Fidelity(_Part):
    """How far from the full cache, beside the 0/1 scores; None where it was not measured.

    Attributes:
        reference_logprob: log-probability of the reference answer, nats a token.
        kl: mean KL divergence of the next token's distribution, full cache to this one, nats.
        top1: share of positions whose most likely token is the full cache's, 0 to 1.
        nll: mean negative log-likelihood of the text, nats a token.
    """

    reference_logprob: float | None = None
    kl: float | None = None
    top1: float | None = None
    nll: float | None = None


@dataclass(frozen=True)
class Times(_Part):
    """Wall-clock times; None where they were not measured.

    Attributes:
        prefill_s: seconds of the prompt's forward.
        evict_s: seconds of scoring, choosing and cutting.
        time_to_first_token_s: seconds from the prompt to the first token.
        decode_tokens_per_s: tokens generated in a second, after the first.
    """

    prefill_s: float | None = None
    evict_s: float | None = None
    time_to_first_token_s: float | None = None
    decode_tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row. Numbers are finite; None means that it was not measured.

    Attributes:
        sample: `Sample.key`.
        task: such as `"ruler/vt"`; what stands before the slash is its family.
        cluster: the context; statistics draw contexts, since questions about one context are not independent.
        policy: as on the command line; `FULL` for the full cache.
        budget: `Budget.describe()`: one of compression_ratio, entries, bytes.
        protocol: one of `PROTOCOLS`.
        memory: measured bytes.
        model: name of the model.
        model_sha256: of its file.
        turn: index of the question.
        length: that was asked for, in tokens.
        options: what else tells cells of the task apart; `depth` of a needle is a percentage of the context.
        metric: how the score was made.
        score: of the answer, higher is better; None where a task has none.
        fidelity: continuous scores.
        question: what was asked.
        prediction: what the model answered.
        references: right answers.
        entries_per_cell: entries held, `[layer][KV head]`, over the evictable layers.
        kept_needle_share: share of the needles' entries that were kept, over all cells, 0 to 1.
        kept_needle_share_per_cell: the same, `[layer][KV head]`.
        times: wall-clock times.
        seeds: by what they seed.
        versions: by package, `python`, `device` and what else the numbers may hang on.
        provider: where the texts came from.

    Raises:
        ResultsError: a number that is not finite, an unknown protocol, a budget that is none, a value of a wrong type.
    """

    sample: str
    task: str
    cluster: str
    policy: str
    budget: Mapping[str, float | int]
    protocol: str
    memory: Memory
    model: str
    model_sha256: str
    turn: int = 0
    length: int = 0
    options: Mapping[str, str | int | float] = field(default_factory=dict)
    metric: str = ""
    score: float | None = None
    fidelity: Fidelity = field(default_factory=Fidelity)
    question: str = ""
    prediction: str = ""
    references: tuple[str, ...] = ()
    entries_per_cell: tuple[tuple[int, ...], ...] | None = None
    kept_needle_share: float | None = None
    kept_needle_share_per_cell: tuple[tuple[float, ...], ...] | None = None
    times: Times = field(default_factory=Times)
    seeds: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    provider: str = ""

    def __post_init__(self) -> None:
        for name in _TEXTS:
            self._set(name, _text(getattr(self, name), name))
        for name in ("turn", "length", "score", "kept_needle_share"):
            self._set(name, _number(getattr(self, name), name))
        for name in ("options", "seeds", "versions"):
            self._set(name, _mapping(getattr(self, name), name))
        for name in ("entries_per_cell", "kept_needle_share_per_cell"):
            self._set(name, _cells(getattr(self, name), name))
        self._set("references", tuple(_text(text, "references") for text in self.references))
        self._set("budget", _budget(self.budget))
        if self.protocol not in PROTOCOLS:
            raise ResultsError(
                expected=f"a protocol: {' or '.join(PROTOCOLS)}",
                received=f"{self.protocol!r}",
                remedy="every result says whether the question was hidden or visible when entries were evicted",
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def key(self) -> Key:
        """What the row is about."""
        return row_key(self.sample, self.turn, self.policy, self.budget, self.protocol)

    @property
    def family(self) -> str:
        """The task's family: `ruler` of `ruler/vt`."""
        return self.task.split("/", 1)[0]

    def to_dict(self) -> dict[str, Any]:
        """The row as it is written, with its schema version."""
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(record: Any, where: str = "a row") -> Row:
        """The row that `to_dict` gave.

        Args:
            record: what JSON gave.
            where: names the row in errors.

        Raises:
            ResultsError: another schema version, a field that is missing or unknown, a value that a row refuses.
        """
        version = record.get("schema_version") if isinstance(record, dict) else None
        check_schema_version(version, where)
        fields = {name: value for name, value in record.items() if name != "schema_version"}
        try:
            for name, part in (("memory", Memory), ("fidelity", Fidelity), ("times", Times)):
                fields[name] = part(**fields[name])
            return Row(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ResultsError(
                expected=f"{where} with the fields of schema version {SCHEMA_VERSION}",
                received=f"one that does not fit: {error}",
                remedy="the file was changed by hand or by another program; remove the row, and run again to refill it",
            ) from error
        except ResultsError as error:
            raise ResultsError(
                expected=error.expected, received=f"{error.received} in {where}", remedy=error.remedy
            ) from error


_TEXTS = (
    *("sample", "task", "cluster", "policy", "protocol", "model", "model_sha256"),
    *("metric", "question", "prediction", "provider"),
)


def check_schema_version(version: Any, where: str) -> None:
    """Refuse what this kvkeep cannot read.

    Raises:
        ResultsError: a newer version, or none.
    """
    if version == SCHEMA_VERSION:
        return
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    raise ResultsError(
        expected=f"schema version {SCHEMA_VERSION} in {where}",
        received=f"{version!r}",
        remedy="it was written by a newer kvkeep: update kvkeep" if newer else "this is no file of kvkeep's results",
    )


def _number(value: Any, name: str) -> Any:
    """A plain int or float (numpy's are welcome), or None."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ResultsError(
            expected=f"a number or None for {name}",
            received=f"{value!r} of type {type(value).__name__}",
            remedy="one row is about one question; None says that it was not measured",
        )
    if isinstance(value, numbers.Integral):
        return int(value)
    if not math.isfinite(value):
        raise ResultsError(
            expected=f"a finite number for {name}",
            received=f"{float(value)}",
            remedy="find out where it comes from; a mean over it would say nothing",
        )
    return float(value)


def _text(value: Any, name: str = "a name") -> str:
    """Text that every writer can encode: lone surrogates become U+FFFD."""
    if not isinstance(value, str):
        raise ResultsError(
            expected=f"text for {name}", received=f"{value!r} of type {type(value).__name__}", remedy="pass a str"
        )
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ResultsError(expected=f"a mapping for {name}", received=f"{value!r}", remedy="pass a dict")
    return {
        _text(key, name): _text(item, name) if isinstance(item, str) else _number(item, f"{name}[{key!r}]")
        for key, item in value.items()
    }


def _cells(value: Any, name: str) -> tuple[tuple[Any, ...], ...] | None:
    if value is None:
        return None
    try:
        layers = tuple(tuple(layer) for layer in value)
        if all(type(cell) is int for layer in layers for cell in layer):  # the common case: thousands a row
            return layers
        return tuple(tuple(_number(cell, name) for cell in layer) for layer in layers)
    except TypeError as error:
        raise ResultsError(
            expected=f"one number for each layer and KV head for {name}",
            received=f"{value!r}"[:200],
            remedy="pass [layer][head]; the ledger's entries_per_cell is [layer][row][head]: take row 0",
        ) from error


def _budget(value: Any) -> dict[str, float | int]:
    try:
        return Budget(**value).describe()
    except (BudgetError, TypeError) as error:
        raise ResultsError(
            expected="a budget with one of compression_ratio, entries, bytes",
            received=f"{value!r}",
            remedy="pass Budget.describe(); the full cache's is {'compression_ratio': 0}",
        ) from error
