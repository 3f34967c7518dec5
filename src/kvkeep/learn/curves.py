"""The page of a training run: one HTML file that fetches nothing, also while the run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert
from markupsafe import Markup

from kvkeep.errors import ResultsError
from kvkeep.results.appending import ROWS, read_run, whole_lines
from kvkeep.results.report.charts import HEIGHT, VEGA_LITE, clean
from kvkeep.results.report.numbers import number_text
from kvkeep.results.report.rendering import environment, style_sheet
from kvkeep.whole_files import write_whole

PAGE = "index.html"
_WIDTH = 640
_MOST_POINTS = 400  # of a line; an SVG has an element for each
Series = Mapping[str, Sequence[tuple[int, float]]]
Record = Mapping[str, Any]


def write_training_page(folder: str | os.PathLike[str]) -> Path:
    """Write `index.html` into the folder of a run.

    Returns:
        The page.

    Raises:
        ResultsError: no run in the folder, or one that has not done a step yet.
    """
    folder = Path(folder)
    run = read_run(folder)
    records = [record for _, record in whole_lines(folder / ROWS)]
    steps, looks = ([r for r in records if str(r["key"]).startswith(kind)] for kind in ("step", "look"))
    if not steps:
        raise ResultsError(expected=f"a training run in {folder}", received="no step yet", remedy="wait for its first")
    page = environment("kvkeep.learn", number=number_text).get_template("training.html")
    text = page.render(
        css=style_sheet(),
        model=run.settings.get("model") or "a model",
        settings=run.settings["settings"],
        geometry=run.settings["geometry"],
        corpus=run.settings["corpus"],
        step=steps[-1]["step"],
        seconds=sum(record["seconds"] for record in steps),
        looks=looks,
        charts=_charts(steps, looks),
        finetune=run.settings.get("finetune"),
        facts=json.dumps(run.settings, indent=2, ensure_ascii=False),
    )
    write_whole(folder / PAGE, text)
    return folder / PAGE


def _charts(
    steps: Sequence[Mapping[str, Any]], looks: Sequence[Mapping[str, Any]]
) -> list[tuple[str, list[str], Markup]]:
    """Title, legend and drawing of each chart that there are numbers for."""
    wanted: list[tuple[str, Series]] = [
        ("loss", {"training": _smooth(_points(steps, "loss")), "held out": _points(looks, "loss")}),
        (
            "pairs in the right order, share",
            {"training": _smooth(_points(steps, "agreed")), "held out": _points(looks, "agreed")},
        ),
        ("recall of the oracle's slots", {"scorer": _points(looks, "recall")}),
        (
            "future attention that is held, share",
            {
                "scorer": _points(looks, "kept_mass"),
                "oracle": _points(looks, "oracle_mass"),
                "newest entries": _points(looks, "recent_mass"),
            },
        ),
        (
            "KL to the full cache, nats a token",
            {
                "training": _smooth(_points(steps, "kl")),
                "held out": _points(looks, "kl"),
                "with nothing evicted": _points(looks, "dense_kl"),
            },
        ),
    ]
    # Of a regression the loss is a squared error, and that of held-out texts another number.
    if looks and steps and "agreed" not in steps[-1] and "squared_error" in looks[-1]:
        wanted[0] = (
            "squared error, in standard deviations",
            {"training": _smooth(_points(steps, "loss")), "held out": _points(looks, "squared_error")},
        )
    found = []
    for title, series in wanted:
        known = {name: points for name, points in series.items() if points}
        if known:
            found.append((title, list(known), _drawn(title, known)))
    return found


def _points(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


def _smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means of neighbours, so that there are no more points than a chart can show."""
    width = -(-len(points) // _MOST_POINTS)
    groups = [points[at : at + width] for at in range(0, len(points), width)] if points else []
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _drawn(title: str, series: Series) -> Markup:
    layers: list[dict[str, Any]] = []
    for index, (name, points) in enumerate(series.items()):
        data = [{"x": x, "y": y, "text": f"{name}, step {x}: {y:.4g}"} for x, y in points]
        encoding = {
            "x": {"field": "x", "type": "quantitative", "title": "step", "axis": {"grid": False}},
            "y": {"field": "y", "type": "quantitative", "title": None, "scale": {"zero": False}},
        }
        line = {"type": "line", "aria": False}
        layers.append({"name": f"line{index}", "data": {"values": data}, "mark": line, "encoding": encoding})
        if len(points) <= 40:
            mark = {"type": "point", "size": 40, "filled": True, "opacity": 1}
            told = {**encoding, "description": {"field": "text", "type": "nominal"}}
            layers.append({"name": f"mark{index}", "data": {"values": data}, "mark": mark, "encoding": told})
    chart = {
        "layer": layers,
        "width": _WIDTH,
        "height": HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "background": "transparent",
        "config": {"view": {"stroke": None}, "axis": {"labelFontSize": 12, "titleFontSize": 12}},
    }
    return clean(vl_convert.vegalite_to_svg(chart, vl_version=VEGA_LITE), f"{title}: {', '.join(series)}")
