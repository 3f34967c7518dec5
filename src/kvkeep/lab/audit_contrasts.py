"""What enforcing the memory costs, and what a visible question is worth: differences on the same questions.

Source: ContourKV (arXiv 2608.25230), its audit: the same selection with and without the memory enforced, and the same
policy with the question visible, hidden, or without a say. Intervals are those of `kvkeep.results.statistics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep.lab.audit_settings import PROTOCOLS
from kvkeep.results import FULL, Row
from kvkeep.results.metrics import METRICS, Metric
from kvkeep.results.statistics import Measurement, paired_difference

RESAMPLES = 2000


@dataclass(frozen=True)
class Contrast:
    """Two ways to store or to ask, on the same questions: the first minus the second.

    Attributes:
        name: `enforcement`, `cap`, `visibility` or `ranking`; see CONTRASTS.
        policy: its name.
        ratio: the nominal compression ratio.
        protocol: of both where they are stored differently; of the first where they are asked differently.
        metric: `score`, 0 to 1, or `reference_logprob`, nats a token.
        mean: of the differences: over tasks, of means over questions.
        low: end of its 95 % interval, over contexts; None where there is none.
        high: the other end.
        contexts: of these.
        note: why there is no interval, or what to mind about it.
    """

    name: str
    policy: str
    ratio: float
    protocol: str
    metric: str
    mean: float
    low: float | None
    high: float | None
    contexts: int
    note: str


@dataclass(frozen=True)
class _Kind:
    """What is compared: (storage, protocol), None for any protocol, the same on both sides."""

    first: tuple[str, str | None]
    second: tuple[str, str | None]
    words: str


CONTRASTS = {
    "enforcement": _Kind(("ragged", None), ("not-enforced", None), "ragged - not-enforced"),
    "cap": _Kind(("capped", None), ("not-enforced", None), "capped - not-enforced"),
    "visibility": _Kind(("ragged", "visible"), ("ragged", "hidden"), "visible - hidden"),
    "ranking": _Kind(("ragged", "visible"), ("ragged", "document"), "visible - document"),
}
COMPARED = ("score", "reference_logprob")


def contrasts(rows: Iterable[Row], *, resamples: int = RESAMPLES) -> list[Contrast]:
    """The differences of all policies and ratios, in the order of CONTRASTS.

    Args:
        rows: of an audit; those without a question are left out.
        resamples: of the bootstrap.
    """
    cells: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row.policy != FULL and row.fidelity.nll is None:
            cells.setdefault((row.policy, row.budget["compression_ratio"]), []).append(row)
    found = []
    for (policy, ratio), members in cells.items():
        for name, kind in CONTRASTS.items():
            for protocol in PROTOCOLS if kind.first[1] is None else (kind.first[1],):
                pair = [_chosen(members, *side, protocol) for side in (kind.first, kind.second)]
                for metric in (METRICS[one] for one in COMPARED):
                    ours, theirs = (_measurements(side, metric) for side in pair)
                    if ours and theirs:
                        paired = paired_difference(ours, theirs, resamples=resamples).difference
                        means = (paired.mean, paired.low, paired.high, paired.clusters, paired.note)
                        found.append(Contrast(name, policy, ratio, protocol, metric.name, *means))
    return found


def _chosen(rows: Sequence[Row], storage: str, own: str | None, protocol: str) -> list[Row]:
    return [row for row in rows if (row.options["storage"], row.options["ranking"]) == (storage, own or protocol)]


def _measurements(rows: Sequence[Row], metric: Metric) -> list[Measurement]:
    """The family of a row's task is its storage, which is what is compared: the task is what follows."""
    return [
        Measurement((row.task.partition("/")[2], row.length), row.cluster, row.turn, value)
        for row in rows
        if (value := metric.of(row)) is not None
    ]
