"""Writes the page of a search: one HTML file that fetches nothing; the same log gives the same page."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvkeep.errors import ResultsError
from kvkeep.evolve.campaign import controls_of, verdicts_of
from kvkeep.evolve.diagnosis import diagnosis_of
from kvkeep.evolve.history import History, read_history
from kvkeep.evolve.loop import replay
from kvkeep.evolve.ranks import rank_correlations
from kvkeep.evolve.report.charts import ascent_chart, scatter_chart
from kvkeep.evolve.report.parts import (
    grids,
    lineage,
    reasons,
    score_text,
)
from kvkeep.results.report.numbers import number_text
from kvkeep.results.report.rendering import environment, style_sheet
from kvkeep.results.rows import PROTOCOLS
from kvkeep.whole_files import write_whole

PAGE = "index.html"


def write_search_report(folder: str | os.PathLike[str]) -> Path:
    """Write `index.html` into the folder of a search, while it runs too.

    Returns:
        The page.

    Raises:
        ResultsError: no search in the folder, or one that has judged nothing yet.
    """
    folder = Path(folder)
    history = read_history(folder)
    if history.best is None or history.yardstick is None:
        raise ResultsError(
            expected=f"a search in {folder} that has judged a program", received="none yet", remedy="wait for its seeds"
        )
    write_whole(folder / PAGE, _render(history))
    return folder / PAGE


def _render(history: History) -> str:
    archive = replay(history)
    axes = [
        ("weight share of FRC's features", "stage 1, points"),
        ("search score, points", "held out, nats a token"),
    ]
    templates = environment("kvkeep.evolve.report", points=score_text, number=number_text)
    return templates.get_template("search.html").render(
        css=style_sheet(),
        history=history,
        model=history.settings.get("model", "a model"),
        samples=history.settings.get("samples", {}),
        cascade=history.settings["cascade"],
        yardstick=history.yardstick,
        best=history.best,
        seed=history.candidates[0],
        counts=sorted(history.counts().items()),
        ascent=ascent_chart(history),
        lineage=lineage(history, history.best),
        grids=grids(archive),
        filled=archive.filled(),
        reasons=reasons(history),
        controls=controls_of(history),
        verdicts=verdicts_of(history),
        protocols=PROTOCOLS,
        correlations=[
            (ranks, scatter_chart(ranks.pairs, *labels))
            for ranks, labels in zip(rank_correlations(history), axes, strict=True)
        ],
        diagnosis=diagnosis_of(history, archive),
        drift=[abs(points) for _, points in history.drift() if points is not None],
        guard=_share_of_guards(history),
        settings=json.dumps(dict(history.settings), indent=2, ensure_ascii=False),
    )


def _share_of_guards(history: History) -> float | None:
    """Of the time that candidates took, what the sandbox and the guards took."""
    evaluations = [c.evaluation for c in history.candidates if c.evaluation is not None]
    guard, model = (sum(getattr(e, f"{name}_seconds") for e in evaluations) for name in ("guard", "model"))
    return guard / (guard + model) if guard + model else None
