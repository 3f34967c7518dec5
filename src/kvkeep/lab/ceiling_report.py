"""The table of a ceiling run as JSON, as Markdown and as charts, beside the paper's numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvkeep.lab.ceiling import METRICS, Ceiling
from kvkeep.lab.intervals import Measured
from kvkeep.lab.published import PUBLISHED, SOURCE
from kvkeep.whole_files import write_whole

TABLE, RECORD, CHART, SCATTER = "ceiling.md", "ceiling.json", "ceiling.svg", "dropped_mass.svg"
SCHEMA_VERSION = 1
_SHARES = ("closable_share", "optimal", "beyond", "auc", "imbalance", "dropped_mass", "recovered")
_SCATTER_ENTRIES = 8
_MOST_POINTS = 4000  # of the scatter; an SVG has an element for each


def ceiling_dict(ceiling: Ceiling, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": dict(settings),
        "rows": ceiling.rows,
        "documents": ceiling.documents,
        "cells": ceiling.cells,
        "flat_cells": ceiling.flat_cells,
        "interval": "95 %, percentile, cluster bootstrap over documents, 1,000 resamples",
        "published_source": SOURCE,
        "lines": [
            {
                "metric": line.metric,
                "title": METRICS[line.metric].title,
                "entries": line.entries,
                **line.measured.to_dict(),
                "published": PUBLISHED.get(line.metric, {}).get(line.entries),
            }
            for line in ceiling.lines
        ],
    }


def markdown(ceiling: Ceiling, settings: Mapping[str, Any]) -> str:
    """A table with a row for each metric and budget."""
    lines = [
        f"# Ceiling of {settings['model']}",
        "",
        f"{ceiling.rows:,} rows of attention from {ceiling.documents} documents, {settings['length']:,} tokens each, "
        f"seed {settings['seed']}. Intervals: 95 %, cluster bootstrap over documents.",
        "",
        "| measure | s | here | interval | published* |",
        "|---|---:|---:|---:|---:|",
    ]
    for line in ceiling.lines:
        published = PUBLISHED.get(line.metric, {}).get(line.entries)
        lines.append(
            f"| {METRICS[line.metric].title} | {line.entries} | {number(line.measured.value)} | "
            f"{interval(line.measured)} | {number(published)} |"
        )
    notes = sorted({line.measured.note for line in ceiling.lines if line.measured.note})
    lines += ["", f"\\* not measured here: {SOURCE}. Another model and other text than this table's.", ""]
    lines += [f"- {note}" for note in notes]
    if ceiling.flat_cells is not None:
        lines.append(
            f"- flat cells (median dropped mass at s = 8 above 0.25): {ceiling.flat_cells} of {ceiling.cells}, "
            f"by {ceiling.rows / ceiling.cells:.1f} rows each"
        )
    lines += [
        "- The best error is that of the best subset of the candidates, so the closable share is a lower bound.",
        "- The penalty's bias has no sign: both errors in it are upper bounds.",
    ]
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """Three digits behind the point, or a dash."""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def interval(measured: Measured) -> str:
    """`low to high`, or a dash."""
    if measured.low is None or measured.high is None:
        return "-"
    return f"{number(measured.low)} to {number(measured.high)}"


def charts(ceiling: Ceiling, records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The charts as SVG by file name; drawn by Vega-Lite (in vl-convert) without a browser.

    Raises:
        ImportError: vl-convert is not installed; it comes with the extra `report`.
    """
    import vl_convert

    specifications = {CHART: _by_budget(ceiling), SCATTER: _scatter(records)}
    return {name: str(vl_convert.vegalite_to_svg(spec, vl_version="5.20")) for name, spec in specifications.items()}


def write(
    folder: Path, ceiling: Ceiling, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> list[Path]:
    """Write `ceiling.json`, `ceiling.md` and two charts into a folder, each whole or not at all.

    Raises:
        ImportError: vl-convert is not installed.
    """
    contents = {
        RECORD: json.dumps(ceiling_dict(ceiling, settings), indent=2, allow_nan=False) + "\n",
        TABLE: markdown(ceiling, settings),
        **charts(ceiling, records),
    }
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in contents]


def _by_budget(ceiling: Ceiling) -> dict[str, Any]:
    """A small chart for each metric: ours with its interval, the paper's as hollow squares."""
    budgets = sorted({line.entries for line in ceiling.lines})
    x = {
        "field": "entries",
        "type": "quantitative",
        "title": "entries kept, s",
        "scale": {"type": "log", "base": 2, "domain": [budgets[0] / 1.2, budgets[-1] * 1.2], "nice": False},
        "axis": {"values": budgets, "format": "d", "grid": False},
    }
    panels = []
    for name, metric in METRICS.items():
        ours = [
            {
                "entries": line.entries,
                "value": line.measured.value,
                "low": line.measured.value if line.measured.low is None else line.measured.low,
                "high": line.measured.value if line.measured.high is None else line.measured.high,
            }
            for line in ceiling.lines
            if line.metric == name and line.measured.value is not None and math.isfinite(line.measured.value)
        ]
        ours = [one for one in ours if all(math.isfinite(v) for v in one.values() if v is not None)]
        theirs = [{"entries": s, "value": v} for s, v in PUBLISHED.get(name, {}).items() if s in budgets]
        y = {
            "field": "value",
            "type": "quantitative",
            "title": None,
            "scale": {"zero": name in _SHARES},
            "axis": {"tickCount": 4},
        }
        layers: list[dict[str, Any]] = [
            {"data": {"values": ours}, "mark": {"type": "line", "color": "#1f5fa8"}, "encoding": {"x": x, "y": y}},
            {
                "data": {"values": ours},
                "mark": {"type": "rule", "color": "#1f5fa8"},
                "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}},
            },
            {
                "data": {"values": ours},
                "mark": {"type": "point", "filled": True, "color": "#1f5fa8", "size": 60, "opacity": 1},
                "encoding": {"x": x, "y": y},
            },
            {
                "data": {"values": theirs},
                "mark": {"type": "point", "filled": False, "shape": "square", "color": "#b3541e", "size": 70},
                "encoding": {"x": x, "y": y},
            },
        ]
        panels.append({"title": metric.title, "width": 240, "height": 150, "layer": layers})
    return {
        "title": {
            "text": "Top-mass against the best set",
            "subtitle": ["filled: measured here, with 95 % interval over documents", f"hollow: published, {SOURCE}"],
        },
        "background": "white",
        "concat": panels,
        "columns": 2,
        "config": {"view": {"stroke": "#ddd"}, "title": {"fontSize": 12, "anchor": "start"}},
    }


def _scatter(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Closable share against dropped mass, a point a row, at s = 8 or the smallest budget."""
    budgets = sorted({one["entries"] for record in records for one in record["measures"]})
    entries = _SCATTER_ENTRIES if _SCATTER_ENTRIES in budgets else budgets[0]
    step = max(1, math.ceil(len(records) / _MOST_POINTS))
    points = [
        {
            "dropped": one["dropped_mass"],
            "share": 0.0 if one["top_error"] == 0 else 1 - one["best_error"] / one["top_error"],
        }
        for record in records[::step]
        for one in record["measures"]
        if one["entries"] == entries
    ]
    return {
        "title": f"Rows at s = {entries}: what another set would save, by dropped mass",
        "data": {"values": points},
        "background": "white",
        "width": 420,
        "height": 300,
        "mark": {"type": "circle", "size": 14, "opacity": 0.4, "color": "#1f5fa8"},
        "encoding": {
            "x": {"field": "dropped", "type": "quantitative", "title": "dropped mass of the top-mass set"},
            "y": {"field": "share", "type": "quantitative", "title": "closable share"},
        },
    }
