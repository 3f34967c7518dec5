"""Numbers as they are printed: a mean never stands without its interval and its n."""

from __future__ import annotations

from kvkeep.results.metrics import Metric
from kvkeep.results.statistics import Estimate
from kvkeep.results.summary import bytes_label

MINUS = "\N{MINUS SIGN}"


def number_text(value: float, metric: Metric | None = None) -> str:
    """One number with the metric's digits, and its unit where that is bytes."""
    if metric is not None and metric.unit == "bytes":
        return bytes_label(value)
    text = f"{value:,.{metric.digits if metric else 3}f}"
    if float(text.replace(",", "")) == 0:
        text = text.removeprefix("-")
    return text.replace("-", MINUS)


def interval_text(estimate: Estimate, metric: Metric | None = None) -> str:
    """`[low, high]`, or why there is none."""
    if estimate.low is None or estimate.high is None:
        return estimate.note
    return f"[{number_text(estimate.low, metric)}, {number_text(estimate.high, metric)}]"


def estimate_text(estimate: Estimate, metric: Metric | None = None) -> str:
    """The mean and its interval."""
    return f"{number_text(estimate.mean, metric)} {interval_text(estimate, metric)}"


def n_text(estimate: Estimate) -> str:
    """`n 40`: contexts; with the number of questions where it differs, and a mark where they are few."""
    rows = f" ({estimate.rows} questions)" if estimate.rows != estimate.clusters else ""
    few = ", few" if estimate.note.startswith("fewer") else ""
    return f"n {estimate.clusters}{rows}{few}"
