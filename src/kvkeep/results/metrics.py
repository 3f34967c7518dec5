"""The numbers of a row that are compared and shown: their names, units, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvkeep.errors import ResultsError, near_names
from kvkeep.results.rows import Row
from kvkeep.results.statistics import Measurement


@dataclass(frozen=True)
class Metric:
    """One number of a row.

    Attributes:
        name: in claims and columns.
        label: in words.
        of: takes it from a row; None where it was not measured.
        higher_is_better: else lower is.
        unit: printed behind it.
        digits: behind the point.
        from_zero: its axis begins at zero.
    """

    name: str
    label: str
    of: Callable[[Row], float | None]
    higher_is_better: bool = True
    unit: str = ""
    digits: int = 2
    from_zero: bool = True


QUALITY = [
    Metric("score", "Score", lambda r: r.score),
    Metric("reference_logprob", "Log-probability of the answer", lambda r: r.fidelity.reference_logprob, unit="nats"),
    Metric("kl", "KL to the full cache", lambda r: r.fidelity.kl, False, "nats", 3),
    Metric("top1", "Top-1 agreement with the full cache", lambda r: r.fidelity.top1),
    Metric("nll", "Negative log-likelihood", lambda r: r.fidelity.nll, False, "nats", 3, False),
    Metric("kept_needle_share", "Kept share of the needles", lambda r: r.kept_needle_share),
]

COST = [
    Metric("prefill_s", "Prefill", lambda r: r.times.prefill_s, False, "s"),
    Metric("evict_s", "Eviction", lambda r: r.times.evict_s, False, "s", 3),
    Metric("time_to_first_token_s", "Time to first token", lambda r: r.times.time_to_first_token_s, False, "s"),
    Metric("decode_tokens_per_s", "Decoding", lambda r: r.times.decode_tokens_per_s, True, "tokens/s", 1),
    Metric("held_bytes", "Held", lambda r: r.memory.held_bytes, False, "bytes", 0),
    Metric("peak_bytes", "Peak", lambda r: r.memory.peak_bytes, False, "bytes", 0),
    Metric("fraction", "Held of full", lambda r: r.memory.fraction, False),
]

METRICS = {metric.name: metric for metric in (*QUALITY, *COST)}


def metric_named(name: str) -> Metric:
    """The metric of a name.

    Raises:
        ResultsError: there is none; near names are in the message.
    """
    if name not in METRICS:
        raise ResultsError(expected="a metric", received=f"{name!r}", remedy=near_names(name, METRICS))
    return METRICS[name]


def measurements(rows: Iterable[Row], metric: Metric) -> list[Measurement]:
    """The numbers of those rows that have them, with the stratum (task and length) and the context of each."""
    return [
        Measurement((row.task, row.length), row.cluster, (row.sample, row.turn), value)
        for row in rows
        if (value := metric.of(row)) is not None
    ]
