"""The tables of the report: scores for each task, costs, and the same in Markdown."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvkeep.results.metrics import COST, METRICS, QUALITY, Metric
from kvkeep.results.report.numbers import interval_text, n_text, number_text
from kvkeep.results.rows import FULL, PROTOCOLS, Row
from kvkeep.results.summary import BudgetKey, Point, budget_label, budgets_of, group, points


@dataclass(frozen=True)
class Cell:
    """A mean as it is printed: never without its interval and its n.

    Attributes:
        mean: the number.
        interval: `[low, high]`, or why there is none.
        n: contexts, and questions where they differ.
        held: bytes.
    """

    mean: str
    interval: str
    n: str
    held: str


@dataclass(frozen=True)
class Block:
    """A metric at one length under one protocol: policies down, the best one first, and budgets across.

    Attributes:
        metric: what is shown.
        protocol: of the rows.
        task: of the rows; empty for all tasks together, of which policies that lack one are left out.
        length: of the rows, 0 where it was not asked for.
        rows: by policy, one cell for each budget; the full cache has one cell.
    """

    metric: Metric
    protocol: str
    task: str
    length: int
    rows: Mapping[str, list[Cell | None]]

    @property
    def title(self) -> str:
        """What the rows are of."""
        length = f", {self.length:,} tokens" if self.length else ""
        return f"{self.task or 'all tasks'}{length}, {self.protocol}"


@dataclass(frozen=True)
class CostRow:
    """What a policy costs at a budget, over all tasks of one length and protocol.

    Attributes:
        protocol: of the rows.
        length: of the rows.
        policy: of the rows.
        budget: in words.
        cells: by metric's name; those that were not measured are missing.
        n: contexts and questions.
        missing: tasks that others have.
    """

    protocol: str
    length: int
    policy: str
    budget: str
    cells: Mapping[str, Cell]
    n: str
    missing: int


def protocols_of(rows: Sequence[Row]) -> list[str]:
    """Protocols of the rows, in their own order."""
    found = {row.protocol for row in rows}
    return [name for name in PROTOCOLS if name in found]


def cell_of(point: Point, metric: Metric) -> Cell:
    """A point as it is printed."""
    return Cell(
        number_text(point.estimate.mean, metric),
        interval_text(point.estimate, metric),
        n_text(point.estimate),
        number_text(point.held_bytes, METRICS["held_bytes"]),
    )


def blocks(rows: Sequence[Row], metrics: Sequence[Metric] = tuple(QUALITY)) -> list[Block]:
    """Every metric of every task, length and protocol that was measured; before single tasks all of them together."""
    budgets = budgets_of(rows)
    order = {name: index for index, name in enumerate(protocols_of(rows))}
    cells = group(rows, lambda row: (order[row.protocol], row.task, row.length))
    together = group(rows, lambda row: (order[row.protocol], "", row.length))
    found = []
    for metric in metrics:
        for (protocol, task, length), members in sorted((together | cells).items()):
            if not task and len({row.task for row in members if metric.of(row) is not None}) < 2:
                continue
            comparable = [point for point in points(members, metric) if not point.missing]
            by_place: dict[tuple[str, BudgetKey], Cell] = {(p.policy, p.budget): cell_of(p, metric) for p in comparable}
            if by_place:
                table: dict[str, list[Cell | None]] = {
                    name: [c for (policy, _), c in by_place.items() if policy == name]
                    if name == FULL
                    else [by_place.get((name, budget)) for budget in budgets]
                    for name in _best_first(comparable, metric)
                }
                found.append(Block(metric, [*order][protocol], task, length, table))
    return found


def _best_first(found: Sequence[Point], metric: Metric) -> list[str]:
    """Policies by their mean over the budgets, behind the full cache; those that lack a budget come behind others."""
    sign = -1 if metric.higher_is_better else 1
    by_policy = group(found, lambda point: point.policy)
    means = {name: fmean(point.estimate.mean for point in of) for name, of in by_policy.items()}
    return sorted(means, key=lambda name: (name != FULL, -len(by_policy[name]), sign * means[name], name))


def costs(rows: Sequence[Row]) -> list[CostRow]:
    """Bytes and times of every policy at every budget."""
    order = {name: index for index, name in enumerate(protocols_of(rows))}
    table = []
    for (protocol, length), members in sorted(group(rows, lambda row: (order[row.protocol], row.length)).items()):
        by_metric = {metric.name: {(p.policy, p.budget): p for p in points(members, metric)} for metric in COST}
        for place, held in by_metric["held_bytes"].items():
            cells = {m.name: cell_of(by_metric[m.name][place], m) for m in COST if place in by_metric[m.name]}
            n, missing = n_text(held.estimate), len(held.missing)
            table.append(CostRow([*order][protocol], length, place[0], budget_label(place[1]), cells, n, missing))
    return table


def markdown(
    title: str,
    budgets: Sequence[BudgetKey],
    table: Sequence[Block],
    cost_table: Sequence[CostRow],
    remarks: Sequence[str],
) -> str:
    """The tables as Markdown, for a page that shows no HTML.

    Args:
        title: of the page.
        budgets: columns of the blocks.
        table: of `blocks`.
        cost_table: of `costs`.
        remarks: paragraphs above the tables.
    """
    lines = [f"# {_escaped(title)}", "", *(line for remark in remarks for line in (_escaped(remark), ""))]
    for block in table:
        lines += [f"## {_escaped(block.title)}: {block.metric.label}", ""]
        lines += _table(
            ["policy", *map(budget_label, budgets)],
            [
                [policy, *(_cell_text(cell) for cell in cells), *[""] * (len(budgets) - len(cells))]
                for policy, cells in block.rows.items()
            ],
        )
    lines += ["## Bytes and times", ""]
    lines += _table(
        ["policy", "budget", "protocol", "tokens", "n", *(f"{m.label}{f', {m.unit}' if m.unit else ''}" for m in COST)],
        [
            [row.policy, row.budget, row.protocol, f"{row.length:,}" if row.length else "", row.n]
            + [f"{cell.mean} {cell.interval}" if (cell := row.cells.get(m.name)) else "" for m in COST]
            for row in cost_table
        ],
    )
    return "\n".join(lines)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    rows = [[_escaped(cell) for cell in row] for row in (head, *body)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])] + [""]


def _cell_text(cell: Cell | None) -> str:
    return f"{cell.mean} {cell.interval}, {cell.n}, held {cell.held}" if cell else ""


def _escaped(text: str) -> str:
    """Text that neither Markdown nor the HTML in it takes for more."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{c}" if c in "\\|`*_[]" else c for c in plain)
