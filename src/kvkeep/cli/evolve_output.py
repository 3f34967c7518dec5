"""What `kvkeep evolve` shows: a bar while it works, a table or JSON when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from kvkeep.cli.output import progress_bar, stdout

if TYPE_CHECKING:
    from kvkeep.evolve.controls import Control
    from kvkeep.evolve.loop import Progress, SearchResult
    from kvkeep.evolve.promotion import Verdict


@contextmanager
def watching() -> Iterator[Callable[[str, int, int], None]]:
    """A bar that says what is done now, for a terminal."""
    with progress_bar("") as (bar, shown):
        part = ""

        def watch(what: str, done: int, total: int) -> None:
            nonlocal part
            if (kind := what.partition(":")[0]) != part:
                part = kind
                bar.reset(shown)
            bar.update(shown, completed=done, total=total, description=what)

        yield watch


def progress_line(progress: Progress) -> str:
    """How far a search is, in a line."""
    known = progress.best is not None and progress.seed is not None
    best = f" best {progress.best:.1f}, seed {progress.seed:.1f}" if known else ""
    stage = f", {progress.stage} {progress.going}" if progress.stage else ""
    return f"search:{best}{stage}"


def record_of(
    folder: Path, result: SearchResult, controls: list[Control], found: list[Verdict], page: Path | None
) -> dict[str, Any]:
    """What was found, for JSON."""
    from kvkeep.evolve.ranks import rank_correlations

    history = result.history
    best, first = history.best, history.candidates[0]
    return {
        "schema_version": 1,
        "folder": str(folder),
        "candidates": len(history.candidates) - len(history.generations[0].candidates),
        "counts": history.counts(),
        "seed": {"name": first.name, "fitness": first.evaluation.fitness if first.evaluation else None},
        "best": None
        if best is None or best.evaluation is None
        else {
            "name": best.name,
            "digest": best.digest,
            "order": best.order,
            "fitness": best.evaluation.fitness,
            "file": str(folder / "best.py"),
        },
        "cells": result.archive.filled(),
        "drift": [{"generation": number, "points": points} for number, points in history.drift()],
        "rank_correlations": [
            {"what": ranks.what, "spearman": ranks.value, "n": ranks.n, "note": ranks.note}
            for ranks in rank_correlations(history)
        ],
        "diagnosis": list(result.diagnosis),
        "stopped": result.stopped,
        "controls": [
            {
                "name": control.name,
                "evaluations": len(control.evaluations),
                "best": None if control.best is None else control.names[control.best],
                "fitness": None if control.best is None else control.evaluations[control.best].fitness,
            }
            for control in controls
        ],
        "promotion": [verdict.to_dict() for verdict in found],
        "page": None if page is None else str(page),
    }


def print_search(
    folder: Path, result: SearchResult, controls: list[Control], found: list[Verdict], page: Path | None
) -> None:
    """What was found, for people."""
    from kvkeep.evolve.ranks import rank_correlations

    history, console = result.history, stdout()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("what")
    for heading in ("points", "stage 1", "stage 2", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [("seed " + history.candidates[0].name, history.candidates[0].evaluation)]
    if history.best is not None:
        rows.append((f"best, candidate {history.best.order}", history.best.evaluation))
    for control in controls:
        if control.best is not None:
            rows.append((f"control {control.name}: {control.names[control.best]}", control.evaluations[control.best]))
    for name, evaluation in rows:
        if evaluation is not None and evaluation.fitness is not None and evaluation.stage1 and evaluation.stage2:
            second = evaluation.stage2
            between = "" if second.low is None else f" [{second.low:.1f}, {second.high:.1f}]"
            table.add_row(
                Text(name),
                f"{evaluation.fitness:.1f}",
                f"{evaluation.stage1.mean:.1f}",
                f"{second.mean:.1f}{between}",
                f"{evaluation.stage1.n + second.n}",
            )
    console.print(table)
    counts = ", ".join(f"{count} {status}" for status, count in sorted(history.counts().items()))
    console.print(f"\n{counts}; {result.archive.filled()} cells filled. 100 points: the full cache; 0: random entries")
    for line in (*result.diagnosis, *((f"stopped: {result.stopped}",) if result.stopped else ())):
        console.print(line)
    for ranks in rank_correlations(history):
        if ranks.value is not None:
            console.print(f"rank correlation of {ranks.what}: {ranks.value:.2f} (n {ranks.n}, {ranks.note})")
    for verdict in (verdict for verdict in found if verdict.part == "all"):
        between = "" if verdict.low is None else f" [{verdict.low:+.3f}, {verdict.high:+.3f}]"
        console.print(
            f"{verdict.model}, {verdict.protocol}: best against {verdict.against}: {verdict.difference:+.3f} nats"
            f"{between}, n={verdict.n}{', better' if verdict.better else ''}"
        )
    console.print(f"\n{folder / 'best.py'}" + (f"\n{page}" if page else ""), soft_wrap=True)
