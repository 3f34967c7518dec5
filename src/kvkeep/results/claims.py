"""Claims that were declared before a run, and what the run says of them.

A claims file states what will be compared before anything is run, so that nobody looks for a cell where a policy
happens to be ahead:

```toml
[[claim]]
name = "contour against its peers"
metric = "score"                        # a name of kvkeep.results.metrics
policy = "kvzip+threshold[floor=32]"    # any name of the policy: rows call this one "contour"
against = ["snapkv", "snapkv+ada"]      # Holm corrects over these
contexts = 40                           # at least so many that both policies have
seed = 0                                # of the bootstrap and the sign flips
threshold = 0.0                         # the mean difference must be at least this, in the metric's unit
equal_bytes = true                      # the default: refused where held bytes differ by more than 1 %

[claim.cell]
tasks = ["ruler/niah_multikey_1"]       # averaged over, each alike
lengths = [4096]                        # left out: all
protocol = "query-agnostic"
budget = { bytes = 1000000 }
```
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvkeep.budget import Budget
from kvkeep.errors import BudgetError, KvkeepError, ResultsError
from kvkeep.results.metrics import measurements, metric_named
from kvkeep.results.rows import PROTOCOLS, Row
from kvkeep.results.statistics import Paired, check_equal_bytes, holm, paired_difference

ALPHA = 0.05

Outcome = Literal["win", "loss", "not shown", "not judged"]


@dataclass(frozen=True)
class Claim:
    """One claim; the module's docstring shows the file.

    Attributes:
        name: of the claim.
        metric: what is compared.
        policy: that is claimed to be better.
        against: policies it is compared with.
        tasks: of the cell.
        lengths: of the cell; empty for all.
        protocol: of the cell.
        budget: of the cell, `Budget.describe()`.
        contexts: at least so many.
        seed: of the bootstrap and the sign flips.
        threshold: the least mean difference, in the metric's unit, in the better direction.
        equal_bytes: held bytes must agree within 1 %.
    """

    name: str
    metric: str
    policy: str
    against: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    protocol: str
    budget: Mapping[str, float | int]
    contexts: int
    seed: int = 0
    threshold: float = 0.0
    equal_bytes: bool = True


@dataclass(frozen=True)
class Verdict:
    """What a run says of one claim and one of its opponents.

    Attributes:
        claim: the claim.
        against: the opponent.
        outcome: "win" or "loss" where the paired interval excludes zero and the corrected test is below .05;
            "not shown" otherwise; "not judged" where the run does not bear the comparison.
        reason: in words.
        paired: the difference, the claim's policy minus the opponent; None where there is none.
        p_holm: the p-value corrected over the claim's opponents.
        held_bytes: mean held bytes of the two, on the rows that both have.
        exploratory: the claim was not declared before the run, so the outcome shows nothing.
    """

    claim: Claim
    against: str
    outcome: Outcome
    reason: str
    paired: Paired | None = None
    p_holm: float | None = None
    held_bytes: tuple[float, float] | None = None
    exploratory: bool = False


def load_claims(path: str | os.PathLike[str]) -> list[Claim]:
    """Read a claims file.

    Raises:
        ResultsError: no TOML, a field that is missing, unknown or of a wrong type, a name that comes twice.
    """
    try:
        record = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(
            expected=f"a claims file at {path}", received=str(error), remedy="see kvkeep.results.claims for its form"
        ) from error
    tables = record.get("claim", [])
    if set(record) != {"claim"} or not isinstance(tables, list):
        raise _wrong(path, f"tables {', '.join(record) or 'missing'}")
    claims = [_claim(table, path) for table in tables]
    names = [claim.name for claim in claims]
    if len(set(names)) != len(names):
        raise _wrong(path, f"a name that comes twice: {max(names, key=names.count)!r}")
    return claims


def judge(claims: Sequence[Claim], rows: Sequence[Row], *, declared: bool) -> list[Verdict]:
    """What the rows say of the claims.

    Args:
        claims: of `load_claims`.
        rows: of one run.
        declared: the claims were declared before the run began; if not, each verdict is marked exploratory.

    Returns:
        One verdict for each claim and opponent, in their order.
    """
    return [verdict for claim in claims for verdict in _judge_claim(claim, rows, declared)]


def _judge_claim(claim: Claim, rows: Sequence[Row], declared: bool) -> list[Verdict]:
    ours = _cell(claim, claim.policy, rows)
    drafts = [_compare(claim, ours, against, _cell(claim, against, rows)) for against in claim.against]
    # Opponents that cannot be judged count among those compared: leaving them out would soften the correction.
    corrected = holm([d.paired.p_value if d.paired and d.outcome == "not shown" else 1.0 for d in drafts])
    return [
        replace(_decide(draft, p) if draft.outcome == "not shown" else draft, exploratory=not declared)
        for draft, p in zip(drafts, corrected, strict=True)
    ]


def _cell(claim: Claim, policy: str, rows: Sequence[Row]) -> list[Row]:
    wanted = _canonical(policy)
    names = {name for name in {row.policy for row in rows} if _canonical(name) == wanted}
    return [
        row
        for row in rows
        if row.policy in names
        and row.task in claim.tasks
        and (not claim.lengths or row.length in claim.lengths)
        and row.protocol == claim.protocol
        and row.budget == claim.budget
    ]


def _canonical(name: str) -> str:
    """What rows call the policy of that name; a name that leads to no policy here stands for itself."""
    from kvkeep.policies import parse_policy, policy_string  # who only reads rows need not wait for torch

    try:
        return policy_string(parse_policy(name))
    except KvkeepError:  # such as that of a plugin which is not installed, or the description of a custom policy
        return name


def _compare(claim: Claim, ours: list[Row], against: str, theirs: list[Row]) -> Verdict:
    metric = metric_named(claim.metric)
    ours, theirs = ([row for row in side if metric.of(row) is not None] for side in (ours, theirs))
    for policy, side in ((claim.policy, ours), (against, theirs)):
        missing = sorted({*claim.tasks} - {row.task for row in side})
        missing += [f"length {n}" for n in claim.lengths if n not in {row.length for row in side}]
        if missing:
            return Verdict(claim, against, "not judged", f"no rows of {policy} for {', '.join(missing)}")
    shared = {(row.sample, row.turn) for row in ours} & {(row.sample, row.turn) for row in theirs}
    if not shared:
        return Verdict(claim, against, "not judged", "the two share no context")
    held = (_mean_held(ours, shared), _mean_held(theirs, shared))
    paired = paired_difference(measurements(ours, metric), measurements(theirs, metric), seed=claim.seed)
    draft = Verdict(claim, against, "not judged", "", paired=paired, held_bytes=held)
    if claim.equal_bytes:
        try:
            check_equal_bytes(*held, names=(claim.policy, against))
        except ResultsError as error:
            return replace(draft, reason=f"held bytes differ by more than 1 %: {error.received}")
    if paired.difference.clusters < claim.contexts:
        reason = f"{paired.difference.clusters} contexts shared, {claim.contexts} were declared"
        return replace(draft, reason=reason)
    return replace(draft, outcome="not shown")


def _decide(draft: Verdict, p: float) -> Verdict:
    paired, claim = draft.paired, draft.claim
    if paired is None:
        return draft
    better = paired.difference.mean if metric_named(claim.metric).higher_is_better else -paired.difference.mean
    if not paired.excludes_zero:
        note = paired.difference.note
        return replace(draft, p_holm=p, reason=f"the interval does not exclude zero{f' ({note})' if note else ''}")
    if p >= ALPHA:
        return replace(draft, p_holm=p, reason=f"the corrected p-value is not below {ALPHA}")
    if better < 0:
        return replace(draft, p_holm=p, outcome="loss", reason="the interval excludes zero on the other side")
    if better < claim.threshold:
        return replace(draft, p_holm=p, reason=f"the difference is below the declared {claim.threshold}")
    reason = f"the interval excludes zero, and the corrected p-value is below {ALPHA}"
    return replace(draft, p_holm=p, outcome="win", reason=reason)


def _mean_held(rows: Sequence[Row], units: set[tuple[str, int]]) -> float:
    return float(np.mean([row.memory.held_bytes for row in rows if (row.sample, row.turn) in units]))


def _claim(table: Any, path: str | os.PathLike[str]) -> Claim:
    cell = table.get("cell") if isinstance(table, dict) else None
    if not isinstance(cell, dict):
        raise _wrong(path, "a claim without its [claim.cell]")
    name = f"claim {table.get('name')!r}"
    known = {"name", "metric", "policy", "against", "contexts", "seed", "threshold", "equal_bytes", "cell"}
    unknown = [*({*table} - known), *({*cell} - {"tasks", "lengths", "protocol", "budget"})]
    if unknown:
        raise _wrong(path, f"{name} with unknown fields: {', '.join(sorted(unknown))}")

    def take(source: Mapping[str, Any], field: str, kind: type, default: Any = None) -> Any:
        value = source.get(field, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(path, f"{name} with {field} = {value!r}")
        return value

    def take_list(source: Mapping[str, Any], field: str, kind: type, default: Any = None) -> tuple[Any, ...]:
        values = take(source, field, list, default)
        if any(not isinstance(value, kind) or isinstance(value, bool) for value in values):
            raise _wrong(path, f"{name} with {field} = {values!r}")
        return tuple(values)

    try:
        budget = Budget(**take(cell, "budget", dict)).describe()
    except (BudgetError, TypeError) as error:
        raise _wrong(path, f"{name} with a budget that is none: {error}") from error
    claim = Claim(
        name=take(table, "name", str),
        metric=metric_named(take(table, "metric", str)).name,
        policy=take(table, "policy", str),
        against=take_list(table, "against", str),
        tasks=take_list(cell, "tasks", str),
        lengths=take_list(cell, "lengths", int, []),
        protocol=take(cell, "protocol", str),
        budget=budget,
        contexts=take(table, "contexts", int),
        seed=take(table, "seed", int, 0),
        threshold=float(take(table, "threshold", (int | float), 0.0)),  # type: ignore[arg-type]
        equal_bytes=take(table, "equal_bytes", bool, True),
    )
    if claim.protocol not in PROTOCOLS:
        raise _wrong(path, f"{name} with protocol {claim.protocol!r}; known: {', '.join(PROTOCOLS)}")
    peers = [_canonical(policy) for policy in claim.against]
    for field, values, what in (("against", claim.against, peers), ("tasks", claim.tasks, [*claim.tasks])):
        if not what or len(set(what)) != len(what) or _canonical(claim.policy) in peers:
            raise _wrong(path, f"{name} with {field} = {list(values)!r}: empty, twice the same, or the policy itself")
    if claim.threshold < 0 or claim.contexts < 2:
        raise _wrong(path, f"{name} with threshold {claim.threshold} (at least 0), contexts {claim.contexts} (2)")
    return claim


def _wrong(path: str | os.PathLike[str], received: str) -> ResultsError:
    return ResultsError(
        expected=f"claims in {path}", received=received, remedy="see kvkeep.results.claims for the form of the file"
    )
