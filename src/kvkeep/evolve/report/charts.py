"""Two drawings: how the search rose, and one score against another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import vl_convert
from markupsafe import Markup

from kvkeep.evolve.history import Candidate, History
from kvkeep.results.report.charts import HEIGHT, VEGA_LITE, clean

WIDTH = 640
# Groups in the drawing get these numbers as `data-p`; the page gives them colours.
ALL, ASCENT, SEED = 0, 1, 2


def ascent_chart(history: History) -> Markup:
    """Fitness of every candidate that was evaluated to the end, the best so far as a line, and its interval.

    The interval is that of stage 2, from which three quarters of the fitness come. Empty where nothing was evaluated.
    """
    points = [_point(candidate) for candidate in history.candidates if _fitness(candidate) is not None]
    if not points:
        return Markup("")
    best = [_point(candidate) for candidate in history.ascent()]
    last = {"x": history.candidates[-1].order, "y": best[-1]["y"]}
    layers = [
        _layer(f"mark{ALL}", points, {"type": "point", "size": 25, "filled": True, "opacity": 0.5}),
        _layer(f"line{ASCENT}", [*best, last], {"type": "line", "aria": False, "interpolate": "step-after"}),
        _layer(f"rule{ASCENT}", [p for p in best if "low" in p], {"type": "rule", "aria": False}, y="low", y2="high"),
        _layer(f"mark{ASCENT}", best, {"type": "point", "size": 70, "filled": True, "opacity": 1}),
        _layer(f"line{SEED}", best[:1], {"type": "rule", "aria": False, "strokeDash": [3, 3]}, x=False),
    ]
    title = f"Fitness of {len(points)} candidates in order; the best so far rose {len(best) - 1} times"
    return _drawn(layers, title, "candidate", "points")


def scatter_chart(pairs: Sequence[tuple[float, float, str]], x: str, y: str) -> Markup:
    """One number against another, a mark for each program; empty where there are fewer than three."""
    if len(pairs) < 3:
        return Markup("")
    data = [{"x": at, "y": up, "text": text} for at, up, text in pairs]
    layers = [_layer(f"mark{ALL}", data, {"type": "point", "size": 40, "filled": True, "opacity": 0.7})]
    return _drawn(layers, f"{y} against {x}, {len(pairs)} programs", x, y)


def _fitness(candidate: Candidate) -> float | None:
    return None if candidate.evaluation is None else candidate.evaluation.fitness


def _point(candidate: Candidate) -> dict[str, Any]:
    fitness, score = _fitness(candidate), candidate.evaluation.stage2 if candidate.evaluation else None
    point: dict[str, Any] = {
        "x": candidate.order,
        "y": fitness,
        "text": f"candidate {candidate.order}: {fitness:.1f} points",
    }
    if score is not None and score.low is not None and score.high is not None:
        point |= {"low": score.low, "high": score.high}
        point["text"] += f", stage 2 [{score.low:.1f}, {score.high:.1f}], n {score.n}"
    return point


def _layer(
    name: str, data: Sequence[dict[str, Any]], mark: dict[str, Any], *, x: bool = True, y: str = "y", y2: str = ""
) -> dict[str, Any]:
    encoding: dict[str, Any] = {"y": {"field": y, "type": "quantitative"}}
    if x:
        encoding["x"] = {"field": "x", "type": "quantitative"}
    if y2:
        encoding["y2"] = {"field": y2}
    if mark["type"] == "point":
        encoding["description"] = {"field": "text", "type": "nominal"}
    return {"name": name, "data": {"values": list(data)}, "mark": mark, "encoding": encoding}


def _drawn(layers: Sequence[dict[str, Any]], title: str, x: str, y: str) -> Markup:
    for layer in layers:
        scale = {"zero": False, "nice": True}
        layer["encoding"]["y"] |= {"title": y, "scale": scale, "axis": {"tickCount": 5}}
        if "x" in layer["encoding"]:
            layer["encoding"]["x"] |= {"title": x, "scale": scale, "axis": {"grid": False, "tickCount": 6}}
    chart = {
        "layer": list(layers),
        "width": WIDTH,
        "height": HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "background": "transparent",
        "config": {"view": {"stroke": None}, "axis": {"labelFontSize": 12, "titleFontSize": 12}},
    }
    return clean(vl_convert.vegalite_to_svg(chart, vl_version=VEGA_LITE), title)
