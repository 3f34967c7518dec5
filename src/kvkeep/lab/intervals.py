"""Any statistic of clustered rows with an interval, by drawing whole documents.

Source: ContourKV (arXiv 2608.25230): cluster bootstrap over documents, 1,000 resamples, 95 % percentile intervals. The
means of `kvkeep.results.statistics` have better intervals (BCa); medians and AUCs are what the paper's table holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvkeep.errors import ResultsError
from kvkeep.lab.instance import Floats, Indexes

FEW = 10  # documents below which a percentile interval is marked as too narrow
RESAMPLES = 1000
LEVEL = 0.95

Statistic = Callable[[Floats], float]


@dataclass(frozen=True)
class Measured:
    """A statistic and how sure it is.

    Attributes:
        value: over all rows; None where it is not defined (an AUC of one class).
        low: end of the interval; None where there is none.
        high: the other end.
        documents: clusters.
        rows: of these.
        note: why there is no interval, or what to mind about it; empty if there is nothing.
    """

    value: float | None
    low: float | None
    high: float | None
    documents: int
    rows: int
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: what is infinite is written as text."""
        return {name: str(v) if isinstance(v, float) and math.isinf(v) else v for name, v in asdict(self).items()}


def cluster_interval(
    rows: Floats,
    documents: Sequence[Hashable],
    statistic: Statistic,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Measured:
    """A statistic of rows, and its percentile interval over documents drawn with replacement.

    Args:
        rows: `[n]` or `[n, k]`, one row of attention each.
        documents: `[n]`, where each comes from.
        statistic: of any number of rows; NaN where it is not defined.
        level: of the interval.
        resamples: of the bootstrap; those in which the statistic is not defined do not count.
        seed: of the bootstrap; the order of documents has no influence.

    Raises:
        ResultsError: no rows, or not one document for each.
    """
    if not len(rows) or len(rows) != len(documents):
        raise ResultsError(
            expected="rows, and the document of each",
            received=f"{len(rows)} rows and {len(documents)} documents",
            remedy="measure first",
        )
    places: dict[str, list[int]] = {}
    for index, document in enumerate(documents):
        places.setdefault(repr(document), []).append(index)
    clusters: list[Indexes] = [np.array(places[name], dtype=np.intp) for name in sorted(places)]
    value = statistic(rows)
    if math.isnan(value):
        return Measured(None, None, None, len(clusters), len(rows), "not defined: all rows are on one side")
    if len(clusters) == 1:
        return Measured(value, None, None, 1, len(rows), "no interval: one document")
    generator = np.random.default_rng(seed)
    drawn: list[float] = []
    for _ in range(resamples):
        chosen = generator.integers(len(clusters), size=len(clusters))
        found = statistic(rows[np.concatenate([clusters[int(i)] for i in chosen])])
        if not math.isnan(found):
            drawn.append(found)
    if len(drawn) < resamples / 2:
        note = "no interval: not defined in most resamples"
        return Measured(value, None, None, len(clusters), len(rows), note)
    # Order statistics, nothing between two of them: infinite values may be among them.
    drawn.sort()
    outside = math.floor((1 - level) / 2 * len(drawn))
    low, high = drawn[outside], drawn[-1 - outside]
    note = f"fewer than {FEW} documents: the interval is too narrow" if len(clusters) < FEW else ""
    return Measured(value, low, high, len(clusters), len(rows), note)
