"""How far from the best possible the top-mass set is, on a model and texts of one's own: the paper's table.

Source: ContourKV (arXiv 2608.25230), its tables of the closable share, the penalty and the ratio of errors. Documents
are run one after the other; each row is written down as soon as it is measured.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.errors import KvkeepError, ResultsError
from kvkeep.lab.instance import Floats
from kvkeep.lab.intervals import Measured, Statistic, cluster_interval
from kvkeep.lab.measuring import RowMeasures, measure
from kvkeep.lab.rows import Place, capture_rows, cells_of, sample_places
from kvkeep.lab.selection import BEYOND, BUDGETS, FLAT_BUDGET, auc, is_flat, rank_correlation
from kvkeep.results.keyed import KeyedLog
from kvkeep.tasks.text import Message, digest_of

LEAST_LENGTH = 128  # the first half is not sampled, and a row must have more keys than any budget wants


class CeilingError(KvkeepError):
    """A measurement that cannot be made as asked."""


@dataclass(frozen=True)
class CeilingSettings:
    """What the numbers hang on.

    Attributes:
        model: its name.
        model_sha256: of its weights.
        documents: names, in order.
        digest: of their texts.
        length: tokens taken from the beginning of each document; rows are drawn from the second half of them.
        rows: over all documents.
        seed: of the sample.
        budgets: s.
        dtype: of the model.
        version: of kvkeep.
    """

    model: str
    model_sha256: str
    documents: tuple[str, ...]
    digest: str
    length: int
    rows: int
    seed: int
    dtype: str
    version: str
    budgets: tuple[int, ...] = BUDGETS


@dataclass(frozen=True)
class Line:
    """One number of the table.

    Attributes:
        metric: a name of METRICS.
        entries: s.
        measured: here.
    """

    metric: str
    entries: int
    measured: Measured


@dataclass(frozen=True)
class Ceiling:
    """The table, and what stands beside it.

    Attributes:
        lines: in the order of METRICS, then of budgets.
        flat_cells: cells (layer and head) whose rows drop more than 0.25 at s = 8 in the median; None without s = 8.
        cells: with at least one row.
        rows: measured.
        documents: of these.
    """

    lines: tuple[Line, ...]
    flat_cells: int | None
    cells: int
    rows: int
    documents: int


@dataclass(frozen=True)
class Metric:
    """A column of the table.

    Attributes:
        title: for people.
        of: the number of one row.
        statistic: over rows.
    """

    title: str
    of: Callable[[RowMeasures], Any]
    statistic: Statistic


def _median(rows: Floats) -> float:
    return float(np.median(rows))


def _mean(rows: Floats) -> float:
    return float(rows.mean())


def _auc(rows: Floats) -> float:
    return auc(rows[:, 0], rows[:, 1] > 0)


def _rank(rows: Floats) -> float:
    return rank_correlation(rows[:, 0], rows[:, 1])


def _recovered(row: RowMeasures) -> float:
    """The share of the closable gap that the balancing selector closes; NaN where there is no gap."""
    gap = row.top_error - row.best_error
    return (row.top_error - row.balanced_error) / gap if gap > 0 else math.nan


def _median_known(rows: Floats) -> float:
    known = rows[~np.isnan(rows)]
    return _median(known) if len(known) else math.nan


def _vote(row: RowMeasures) -> float:
    if row.vote_error is None or row.top_error == 0:
        return math.nan
    return row.vote_error / row.top_error


METRICS: dict[str, Metric] = {
    "closable_share": Metric("closable share c, median", lambda row: row.closable_share, _median),
    "penalty": Metric("penalty pi of forced weights, median", lambda row: row.penalty, _median),
    "kappa": Metric("kappa, top-mass error over best, median", lambda row: row.kappa, _median),
    "optimal": Metric(
        "share of rows whose top-mass set no other beats", lambda row: float(row.best_error >= row.top_error), _mean
    ),
    "beyond": Metric(f"share of rows with kappa > {BEYOND}", lambda row: float(row.kappa > BEYOND), _mean),
    "auc": Metric(
        f"AUC of dropped mass for kappa > {BEYOND}",
        lambda row: (row.dropped_mass, float(row.kappa > BEYOND)),
        _auc,
    ),
    "imbalance": Metric(
        "rank correlation of Phi and the best error", lambda row: (row.imbalance, row.best_error), _rank
    ),
    "dropped_mass": Metric("dropped mass of top-mass, median", lambda row: row.dropped_mass, _median),
    "recovered": Metric("share of the gap that balancing closes, median", _recovered, _median_known),
    "vote": Metric("group vote error over own top-mass, median", _vote, _median_known),
}


def choose_documents(documents: Sequence[Message], tokenizer: Any, length: int, most: int | None) -> list[Message]:
    """The documents with at least `length` tokens; at most `most` of them, evenly spread over the list.

    Raises:
        CeilingError: none is long enough, or a length too short to sample from.
    """
    if length < LEAST_LENGTH:
        raise CeilingError(
            expected=f"a length of at least {LEAST_LENGTH} tokens",
            received=f"{length}",
            remedy="rows need more keys than the largest budget has",
        )
    lengths = [len(tokens_of(document.text, tokenizer, length)) for document in documents]
    long = [document for document, count in zip(documents, lengths, strict=True) if count >= length]
    if not long:
        raise CeilingError(
            expected=f"a document of at least {length:,} tokens",
            received=f"{len(documents)} documents of up to {max(lengths, default=0):,}",
            remedy="give longer texts, or a smaller --length",
        )
    if most is None or most >= len(long):
        return long
    return [long[int(place)] for place in np.linspace(0, len(long) - 1, most).round()]


def tokens_of(text: str, tokenizer: Any, length: int) -> list[int]:
    """The first `length` tokens of a text, with what the tokenizer puts before it (attention sinks live there)."""
    return list(tokenizer(text, truncation=True, max_length=length)["input_ids"])


def places_by_document(
    model: Any, documents: Sequence[Message], length: int, rows: int, seed: int
) -> list[list[Place]]:
    """The rows to measure, shared out evenly over documents and, within each, over cells; the same for the same seed.

    Raises:
        RowError: fewer rows exist.
        UnsupportedError: a model without full attention, or one that kvkeep has not checked.
    """
    cells, count = cells_of(model), len(documents)
    positions = range(length // 2, length)
    return [
        sample_places(cells, positions, rows // count + (index < rows % count), [seed, *_numbers(document.name)])
        for index, document in enumerate(documents)
    ]


def measure_ceiling(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Message],
    settings: CeilingSettings,
    folder: Path,
    on_rows: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[dict[str, Any]]:
    """Measure all rows that the folder does not have yet.

    Args:
        model: in float32.
        tokenizer: of the model.
        documents: those of the settings, each long enough.
        settings: of the run.
        folder: of the log; a killed run goes on there.
        on_rows: called with rows done, rows in all, and what is being done.

    Returns:
        All records: `key`, `document`, `layer`, `head`, `position`, `keys`, `deviation`, `measures`.

    Raises:
        CeilingError: other documents than the settings name.
        ResultsError: a folder of other settings, or one that another process writes to.
        RowError: a row that is not what the model computed.
    """
    if tuple(document.name for document in documents) != settings.documents or digest_of(documents) != settings.digest:
        raise CeilingError(
            expected="the documents of the settings", received="other ones", remedy="make the settings of what you pass"
        )
    planned = places_by_document(model, documents, settings.length, settings.rows, settings.seed)
    total = sum(map(len, planned))
    with KeyedLog(folder, asdict(settings)) as log:
        for document, places in zip(documents, planned, strict=True):
            missing = [place for place in places if _key(document.name, place) not in log]
            on_rows(len(log), total, document.name)
            if not missing:
                continue
            tokens = tokens_of(document.text, tokenizer, settings.length)
            for row in capture_rows(model, tokens, missing):
                measures = measure(row.instance(), settings.budgets, row.group_mass)
                log.append(
                    {
                        "key": _key(document.name, row.place),
                        "document": document.name,
                        **row.place._asdict(),
                        "keys": len(row.probabilities),
                        "deviation": row.deviation,
                        "measures": [one.to_dict() for one in measures],
                    }
                )
                on_rows(len(log), total, document.name)
        return log.records


def summarise(records: Sequence[dict[str, Any]], *, resamples: int = 1000, seed: int = 0) -> Ceiling:
    """The table of a run.

    Args:
        records: of `measure_ceiling`.
        resamples: of the bootstrap over documents.
        seed: of it.

    Raises:
        ResultsError: no records.
    """
    if not records:
        raise ResultsError(expected="measured rows", received="none", remedy="run `kvkeep lab ceiling` first")
    documents = [record["document"] for record in records]
    by_budget: dict[int, list[RowMeasures]] = {}
    for record in records:
        for one in record["measures"]:
            by_budget.setdefault(one["entries"], []).append(RowMeasures(**one))
    lines = []
    for name, metric in METRICS.items():
        for entries, rows in sorted(by_budget.items()):
            values = np.array([metric.of(row) for row in rows], dtype=np.float64)
            found = cluster_interval(values, documents, metric.statistic, resamples=resamples, seed=seed)
            lines.append(Line(name, entries, found))
    cells: dict[tuple[int, int], list[float]] = {}
    for index, record in enumerate(records):
        dropped = by_budget[FLAT_BUDGET][index].dropped_mass if FLAT_BUDGET in by_budget else math.nan
        cells.setdefault((record["layer"], record["head"]), []).append(dropped)
    flat = sum(is_flat(dropped) for dropped in cells.values()) if FLAT_BUDGET in by_budget else None
    return Ceiling(tuple(lines), flat, len(cells), len(records), len(set(documents)))


def _key(document: str, place: Place) -> str:
    return f"{document}/{place.layer:03d}/{place.head:03d}/{place.position:07d}"


def _numbers(name: str) -> list[int]:
    """A document's share in the seed."""
    return list(hashlib.sha256(name.encode()).digest()[:8])
