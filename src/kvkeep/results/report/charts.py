"""Curves over held bytes as SVG, drawn by Vega-Lite (in vl-convert) without a browser.

The specifications are plain dictionaries: Altair's classes would build the same, at half a second a chart (measured).

Colours come from the page's style sheet, by class and data attribute, so that one drawing serves light and dark, and
filters hide a policy by its attribute. Elements and attributes that a chart does not need are dropped.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import vl_convert
from markupsafe import Markup

from kvkeep.results.metrics import Metric
from kvkeep.results.report.numbers import estimate_text, n_text
from kvkeep.results.report.styles import Style
from kvkeep.results.rows import FULL
from kvkeep.results.summary import Point, budget_label, bytes_label

VEGA_LITE = "5.20"
WIDTH, HEIGHT = 380, 250  # px; drawn about 1:1 on a phone and in three columns

_SVG = "{http://www.w3.org/2000/svg}"
_ELEMENTS = {"svg", "g", "path", "line", "rect", "text"}
_ATTRIBUTES = {
    *("class", "role", "aria-label", "aria-hidden", "width", "height", "viewBox", "transform", "opacity"),
    *("d", "x", "y", "x1", "x2", "y1", "y2", "stroke-width", "stroke-dasharray", "text-anchor", "font-size"),
}


def curve(points: Sequence[Point], metric: Metric, styles: Mapping[str, Style], title: str) -> Markup:
    """A metric against held bytes: a line, a mark and an interval for each policy.

    Args:
        points: comparable ones, at least one.
        metric: what they measure.
        styles: of the policies.
        title: for readers who do not see the chart.
    """
    size, unit = bytes_unit(max(p.held_bytes for p in points))
    scale = y_unit(points, metric)[0]
    means, lows, highs = ([value / scale for value in values] for values in zip(*map(_span, points), strict=True))
    held = [p.held_bytes / size for p in points]
    x_domain = [min(held) / 1.15, max(held) * 1.15]
    x_axis = {
        "field": "x",
        "type": "quantitative",
        "title": f"held bytes ({unit}, logarithmic)",
        "scale": {"type": "log", "domain": x_domain, "nice": False},
        "axis": {"values": _ticks(*x_domain), "format": "~g", "grid": False},
    }
    y_axis = _y_axis(metric, min(lows), max(highs))
    policies = [name for name in styles if any(p.policy == name for p in points)]
    layers: list[dict[str, Any]] = []
    for place, policy in enumerate(policies):
        # Policies at equal bytes would lie on each other: each is moved sideways by a few px.
        shift = 0.0 if policy == FULL else 3 * (place - (len(policies) - 1) / 2)
        data = [
            {"x": at, "y": mean, "low": low, "high": high, "text": _description(p, metric)}
            for p, at, mean, low, high in zip(points, held, means, lows, highs, strict=True)
            if p.policy == policy
        ]
        layers += _layers(data, styles[policy], policy == FULL, shift, x_axis, y_axis)
    chart = {
        "layer": layers,
        "width": WIDTH,
        "height": HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "background": "transparent",
        "config": {
            "view": {"stroke": None},
            "axis": {"labelFontSize": 12, "titleFontSize": 12, "labelOverlap": True},
        },
    }
    return clean(vl_convert.vegalite_to_svg(chart, vl_version=VEGA_LITE), title)


def _span(point: Point) -> tuple[float, float, float]:
    """Mean, low, high; where there is no interval it has no width."""
    estimate = point.estimate
    if estimate.low is None or estimate.high is None:
        return estimate.mean, estimate.mean, estimate.mean
    return estimate.mean, estimate.low, estimate.high


def _description(point: Point, metric: Metric) -> str:
    return _printable(
        f"{point.policy}, {budget_label(point.budget)}: {estimate_text(point.estimate, metric)}, "
        f"{n_text(point.estimate)}; held {bytes_label(point.held_bytes)}, {point.fraction:.1%} of the full cache"
    )


def _layers(
    data: list[dict[str, Any]], style: Style, full: bool, shift: float, x: dict[str, Any], y: dict[str, Any]
) -> list[dict[str, Any]]:
    """A policy's line, intervals and marks. Their names become classes of the SVG's groups."""

    def layer(name: str, mark: dict[str, Any], **encoding: Any) -> dict[str, Any]:
        return {"name": f"{name}{style.index}", "data": {"values": data}, "mark": mark, "encoding": encoding}

    dash = list(style.dash)
    interval = layer(
        "rule", {"type": "rule", "aria": False, "xOffset": shift}, x=x, y=y | {"field": "low"}, y2={"field": "high"}
    )
    mark = layer(
        "mark",
        {"type": "point", "shape": style.shape, "size": 90, "filled": True, "opacity": 1, "xOffset": shift},
        x=x,
        y=y,
        description={"field": "text", "type": "nominal"},
    )
    if full:
        return [layer("line", {"type": "rule", "aria": False, "strokeDash": dash}, y=y), interval, mark]
    return [
        layer("line", {"type": "line", "aria": False, "strokeDash": dash, "xOffset": shift}, x=x, y=y),
        interval,
        mark,
    ]


def _y_axis(metric: Metric, low: float, high: float) -> dict[str, Any]:
    """From 0 to 1 for shares, from 0 for what is positive; logarithmic for KL where it spans decades."""
    axis: dict[str, Any] = {"tickCount": 5}
    scale: dict[str, Any] = {"nice": False}
    if metric.name == "kl" and low > 0 and high / low > 20:
        scale |= {"type": "log", "domain": [low / 1.2, high * 1.2]}
        axis = {"values": _ticks(low / 1.2, high * 1.2), "format": "~g"}
    elif low >= 0 and high <= 1:
        scale["domain"] = [0, 1]
    elif low >= 0 and metric.from_zero:
        scale["domain"] = [0, high * 1.05]
    else:
        margin = 0.05 * (high - low) or 0.5
        scale["domain"] = [low - margin, high + margin]
    return {"field": "y", "type": "quantitative", "title": None, "scale": scale, "axis": axis}


def y_unit(points: Sequence[Point], metric: Metric) -> tuple[float, str]:
    """What a chart's numbers are divided by, and the unit that they have then."""
    if metric.unit != "bytes":
        return 1.0, metric.unit
    return bytes_unit(max(p.estimate.mean for p in points))


def bytes_unit(largest: float) -> tuple[float, str]:
    """The unit in which bytes up to `largest` are read best."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, unit
    return 1.0, "bytes"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within a logarithmic axis: 1, 2 and 5 times a power of ten, fewer or more as there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(n / 10 for n in range(10, 100))):
        ticks = [t for d in decades for step in steps if low <= (t := float(f"{step * 10.0**d:.3g}")) <= high]
        if len(ticks) >= 3:
            break
    return ticks if len(ticks) <= 7 else ticks[:: math.ceil(len(ticks) / 6)]


def _printable(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def clean(svg: str, title: str) -> Markup:
    """An SVG that may stand in the page: known elements and attributes only, no colours, a title, policies marked.

    Groups of a policy's marks get `data-p`, its index in the styles.
    """
    root = ET.fromstring(svg)
    _clean(root)
    size = root.attrib.pop("width", ""), root.attrib.pop("height", "")
    root.attrib.setdefault("viewBox", f"0 0 {size[0]} {size[1]}")
    root.attrib |= {"role": "img", "aria-label": _printable(title), "class": "curve"}
    ET.register_namespace("", _SVG[1:-1])
    return Markup(ET.tostring(root, encoding="unicode"))


def _clean(element: ET.Element) -> None:
    kind = element.attrib.pop("class", "")
    for name in list(element.attrib):
        if name not in _ATTRIBUTES:
            del element.attrib[name]
        elif name in ("transform", "d", "x2", "y2"):
            element.set(name, _rounded(element.attrib[name]))
    if policy := re.search(r"\b(line|rule|mark)(\d+)_marks\b", kind):
        element.attrib |= {"class": policy[1], "data-p": policy[2]}
    elif axis := re.search(r"\brole-axis-(grid|tick|label|title|domain)\b", kind):
        element.set("class", axis[1])
    for child in list(element):
        frame = {"background", "foreground"} & {*child.get("class", "").split()}
        if frame or child.tag.removeprefix(_SVG) not in _ELEMENTS:
            element.remove(child)
        else:
            _clean(child)


def _rounded(numbers: str) -> str:
    return re.sub(r"-?\d+\.\d{2,}(?:e-?\d+)?", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), numbers)


def policies_left_out(points: Iterable[Point]) -> list[str]:
    """What a chart over several tasks does not show, and why."""
    return [
        f"{p.policy} at {budget_label(p.budget)}: lacks {len(p.missing)} of {len(p.missing) + p.estimate.strata} tasks"
        for p in points
        if p.missing
    ]
