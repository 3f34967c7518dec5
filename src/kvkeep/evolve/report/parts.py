"""What the page shows, as plain values: lineage, archive, reasons."""

from __future__ import annotations

import difflib
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.evolve.archive import BOUNDS, Archive
from kvkeep.evolve.evaluation import Score
from kvkeep.evolve.guard import REASONS
from kvkeep.evolve.history import Candidate, History
from kvkeep.evolve.program import Program
from kvkeep.results.report.heat import CLASSES
from kvkeep.results.report.numbers import MINUS


@dataclass(frozen=True)
class Ancestor:
    """One step of a lineage.

    Attributes:
        candidate: the program.
        diff: against its first parent, as lines of a unified diff; the whole block for a seed.
    """

    candidate: Candidate
    diff: str


@dataclass(frozen=True)
class Grid:
    """Two traits of the archive against each other: the best fitness that any island holds there.

    Attributes:
        rows: trait down.
        columns: trait across.
        row_labels: ranges, from the lowest.
        column_labels: likewise.
        cells: `[row][column]`: fitness as text and class of colour, None where nothing is held.
    """

    rows: str
    columns: str
    row_labels: list[str]
    column_labels: list[str]
    cells: list[list[tuple[str, int] | None]]


def lineage(history: History, candidate: Candidate | None) -> list[Ancestor]:
    """From a program back to its seed, by the parent that was changed."""
    known, found = history.by_digest(), list[Ancestor]()
    while candidate is not None:
        parent = next((known[p] for p in candidate.parents[:1] if p in known and p != candidate.digest), None)
        found.append(Ancestor(candidate, _diff(parent, candidate)))
        if parent is not None and parent.order >= candidate.order:  # a recording may name a program of this search
            break
        candidate = parent
    return found


def _diff(parent: Candidate | None, child: Candidate) -> str:
    new = Program(child.source, child.name).block.splitlines()
    if parent is None:
        return "\n".join(new)
    old = Program(parent.source, parent.name).block.splitlines()
    names = f"candidate {parent.order}", f"candidate {child.order}"
    return "\n".join(difflib.unified_diff(old, new, *names, lineterm="", n=2))


def grids(archive: Archive) -> list[Grid]:
    """Overlap by run length, and share of the last positions by attention mass."""
    return [_grid(archive, "overlap", "run_length"), _grid(archive, "recent", "mass")]


def _grid(archive: Archive, rows: str, columns: str) -> Grid:
    names = list(BOUNDS)
    down, across = names.index(rows), names.index(columns)
    best: dict[tuple[int, int], float] = {}
    for grid in archive.islands:
        for cell, elite in grid.items():
            place = cell[down], cell[across]
            best[place] = max(elite.fitness, best.get(place, -math.inf))
    low, high = min(best.values(), default=0.0), max(best.values(), default=0.0)
    cells: list[list[tuple[str, int] | None]] = []
    for row in range(len(BOUNDS[rows]) + 1):
        line: list[tuple[str, int] | None] = []
        for column in range(len(BOUNDS[columns]) + 1):
            value = best.get((row, column))
            share = 1.0 if high == low else (0.0 if value is None else (value - low) / (high - low))
            line.append(None if value is None else (_points(value), round(share * (CLASSES - 1))))
        cells.append(line)
    return Grid(rows, columns, _ranges(BOUNDS[rows]), _ranges(BOUNDS[columns]), cells)


def _ranges(bounds: Sequence[float]) -> list[str]:
    inner = [f"{low:g}–{high:g}" for low, high in itertools.pairwise(bounds)]
    return [f"< {bounds[0]:g}", *inner, f"≥ {bounds[-1]:g}"]


def reasons(history: History) -> list[tuple[str, str, str, int, str]]:
    """Status, stage, reason, how many, and the reason in words, most first; evaluated ones are left out."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for candidate in history.candidates:
        if candidate.status != "evaluated":
            stage = "proposal" if candidate.evaluation is None else candidate.evaluation.stage
            counts[candidate.status, stage, candidate.reason] += 1
    return [
        (status, stage, reason, count, REASONS.get(reason, _WORDS.get(reason, "")))
        for (status, stage, reason), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


_WORDS = {
    "gate": "too few points in stage 1",
    "behaviour": "the entries of an earlier program",
    "text": "the text of an earlier program",
    "reconstruction": "attention rebuilt worse than by random entries",
}


def score_text(score: Score | None) -> str:
    """Points with their interval, and the number of samples."""
    if score is None:
        return "–"
    between = (
        score.note if score.low is None or score.high is None else f"[{_points(score.low)}, {_points(score.high)}]"
    )
    return f"{_points(score.mean)} {between}, n {score.n}"


def _points(value: float) -> str:
    return f"{value:,.1f}".replace("-", MINUS)
