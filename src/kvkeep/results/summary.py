"""Rows grouped into cells, with a mean and an interval for each number: what tables and charts show."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from kvkeep.results.metrics import METRICS, Metric, measurements
from kvkeep.results.rows import FULL, Row
from kvkeep.results.statistics import Estimate, mean_interval, stratified_mean

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

BudgetKey = tuple[str, float | int]


@dataclass(frozen=True)
class Point:
    """One metric of a policy at a budget, over whatever rows it was made of.

    Attributes:
        policy: its name.
        budget: kind and number.
        estimate: mean and interval of the metric.
        held_bytes: mean over the same rows, weighted alike.
        fraction: held share of the full cache, likewise.
        missing: strata (task and length) that other policies have here and this one has not; its mean is then not
            comparable with theirs.
    """

    policy: str
    budget: BudgetKey
    estimate: Estimate
    held_bytes: float
    fraction: float
    missing: tuple[Hashable, ...] = ()


def budget_key(row: Row) -> BudgetKey:
    """The row's budget as it sorts and groups."""
    ((kind, number),) = row.budget.items()
    return kind, number


def budget_label(budget: BudgetKey) -> str:
    """A budget in words."""
    kind, number = budget
    if kind == "compression_ratio":
        return f"{number * 100:g} % removed" if number else "nothing removed"
    return f"{number:,} entries" if kind == "entries" else bytes_label(number)


def budgets_of(rows: Iterable[Row]) -> list[BudgetKey]:
    """Budgets, from the largest to the tightest of each kind; the full cache's is left out."""
    found = {budget_key(row) for row in rows if row.policy != FULL}
    return sorted(found, key=lambda b: (b[0], b[1] if b[0] == "compression_ratio" else -b[1]))


def policies_of(rows: Iterable[Row]) -> list[str]:
    """Policies by name, the full cache last."""
    return sorted({row.policy for row in rows}, key=lambda name: (name == FULL, name))


def bytes_label(number: float) -> str:
    """Bytes for people, in powers of 1000, three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number:.0f} B"


def group(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Rows (or what else) by key, in the order in which keys come."""
    found: dict[K, list[T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def points(rows: Iterable[Row], metric: Metric) -> list[Point]:
    """One metric of each policy at each budget, over those rows that have it.

    A mean over tasks is comparable only where it is over the same tasks: what a policy lacks is named in `missing`.

    Args:
        rows: of one protocol.
        metric: what to average.

    Raises:
        ResultsError: see `mean_interval`.
    """
    having = [row for row in rows if metric.of(row) is not None]
    strata = {(row.task, row.length) for row in having}
    found = [
        Point(
            policy,
            budget,
            mean_interval(measurements(members, metric)),
            stratified_mean(measurements(members, METRICS["held_bytes"])),
            stratified_mean(measurements(members, METRICS["fraction"])),
            tuple(sorted(strata - {(row.task, row.length) for row in members})),
        )
        for (policy, budget), members in group(having, lambda row: (row.policy, budget_key(row))).items()
    ]
    policies, budgets = policies_of(having), budgets_of(having)
    order = {budget: index for index, budget in enumerate(budgets)}
    return sorted(found, key=lambda p: (policies.index(p.policy), order.get(p.budget, -1)))
