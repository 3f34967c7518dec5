"""Heat maps: where in the text a needle is still found, and which layers and heads the entries went to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.results.metrics import METRICS
from kvkeep.results.report.tables import Cell, cell_of
from kvkeep.results.rows import FULL, Row
from kvkeep.results.summary import BudgetKey, budget_key, budgets_of, group, points, policies_of

CLASSES = 9  # --q0 to --q8 in page.css


@dataclass(frozen=True)
class NeedleMap:
    """Scores by length and depth.

    Attributes:
        protocol: of the rows.
        policy: of the rows.
        budget: of the rows.
        lengths: columns, in tokens.
        depths: rows, from the beginning of the text to its end.
        cells: `[depth][length]`: what is printed, and the class of its colour; None where nothing was measured.
    """

    protocol: str
    policy: str
    budget: BudgetKey
    lengths: list[int]
    depths: list[float]
    cells: list[list[tuple[Cell, int] | None]]


@dataclass(frozen=True)
class HeadMap:
    """Share of the text that each layer's heads hold, a mean over rows.

    Attributes:
        protocol: of the rows.
        policy: of the rows.
        budget: of the rows.
        layers: columns.
        heads: rows.
        paths: for each class of colour, the SVG path of its cells; a cell is one unit wide and high.
        least: the smallest share.
        mean: over all cells.
        most: the largest share.
        rows: that were averaged.
    """

    protocol: str
    policy: str
    budget: BudgetKey
    layers: int
    heads: int
    paths: list[tuple[int, str]]
    least: float
    mean: float
    most: float
    rows: int


def needle_maps(rows: Sequence[Row]) -> list[NeedleMap]:
    """One map for each policy, budget and protocol, of rows that have a depth and a score."""
    having = [row for row in rows if _depth(row) is not None and row.score is not None]
    depths = sorted({_depth(row) or 0.0 for row in having})
    lengths = sorted({row.length for row in having})
    maps = []
    for (protocol, policy, budget), members in _figures(having):
        by_place = group(members, lambda row: (_depth(row), row.length))
        cells: list[list[tuple[Cell, int] | None]] = []
        for depth in depths:
            line: list[tuple[Cell, int] | None] = []
            for length in lengths:
                found = points(by_place.get((depth, length), []), METRICS["score"])
                mean = min(max(found[0].estimate.mean, 0.0), 1.0) if found else 0.0
                line.append((cell_of(found[0], METRICS["score"]), round(mean * (CLASSES - 1))) if found else None)
            cells.append(line)
        maps.append(NeedleMap(protocol, policy, budget, lengths, depths, cells))
    return maps


def head_maps(rows: Sequence[Row]) -> tuple[list[HeadMap], dict[BudgetKey, float]]:
    """One map for each policy, budget and protocol; and for each budget the share that has the strongest colour.

    Maps at one budget share a scale, so that they can be compared.
    """
    having = [row for row in rows if row.entries_per_cell and row.memory.logical_length and row.policy != FULL]
    shares = []
    for place, members in _figures(having):
        counts = [np.array(row.entries_per_cell) / row.memory.logical_length for row in members]
        parts = [part for part in counts if part.shape == counts[0].shape]
        shares.append((place, np.mean(parts, axis=0), len(parts)))
    scales: dict[BudgetKey, float] = {}
    for (_, _, budget), share, _ in shares:
        scales[budget] = max(scales.get(budget, 0.0), float(share.max()))
    maps = [
        HeadMap(
            *place,
            layers=share.shape[0],
            heads=share.shape[1],
            paths=_paths(np.rint(share / (scales[place[2]] or 1.0) * (CLASSES - 1)).astype(int).tolist()),
            least=float(share.min()),
            mean=float(share.mean()),
            most=float(share.max()),
            rows=count,
        )
        for place, share, count in shares
    ]
    return maps, scales


def _depth(row: Row) -> float | None:
    depth = row.options.get("depth")
    return float(depth) if isinstance(depth, int | float) else None


def _figures(rows: Sequence[Row]) -> list[tuple[tuple[str, str, BudgetKey], list[Row]]]:
    budgets = {budget: index for index, budget in enumerate(budgets_of(rows))}
    policies = {policy: index for index, policy in enumerate(policies_of(rows))}
    found = group(rows, lambda row: (row.protocol, row.policy, budget_key(row)))
    return sorted(found.items(), key=lambda f: (f[0][0], budgets.get(f[0][2], -1), policies[f[0][1]]))


def _paths(classes: list[list[int]]) -> list[tuple[int, str]]:
    """Cells of one colour as one path, neighbours in a row as one stroke: a thousand cells are some kilobytes."""
    parts: dict[int, list[str]] = {}
    for head, row in enumerate(zip(*classes, strict=True)):
        layer = 0
        for kind, run in itertools.groupby(row):
            width = len(list(run))
            parts.setdefault(kind, []).append(f"M{layer} {head}h{width}v1h-{width}z")
            layer += width
    return [(kind, "".join(parts[kind])) for kind in sorted(parts)]
