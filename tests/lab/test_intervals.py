from __future__ import annotations

import math

import numpy as np
import pytest

from kvkeep.errors import ResultsError
from kvkeep.lab.intervals import cluster_interval


def median(rows):
    return float(np.median(rows))


def test_whole_documents_are_drawn():
    """Rows of a document are equal, so its rows add nothing: the interval is as wide as that of the documents."""
    documents = [d for d in range(20) for _ in range(50)]
    rows = np.array([float(d) for d in documents])
    found = cluster_interval(rows, documents, lambda r: float(r.mean()))
    assert found.value == pytest.approx(9.5)
    error = np.std(range(20)) / math.sqrt(20)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert (found.documents, found.rows, found.note) == (20, 1000, "")


def test_coverage_is_near_its_level():
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        effects = np.repeat(generator.normal(size=25), 4)
        rows = effects + generator.normal(size=100)
        found = cluster_interval(rows, np.repeat(range(25), 4).tolist(), median, resamples=200, seed=trial)
        hits += found.low <= 0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_order_of_documents_and_seed():
    generator = np.random.default_rng(1)
    rows, documents = generator.normal(size=60), [f"d{i % 12}" for i in range(60)]
    found = cluster_interval(rows, documents, median, seed=5)
    order = np.argsort(documents, kind="stable")[::-1]
    turned = cluster_interval(rows[order], [documents[i] for i in order], median, seed=5)
    assert found == turned
    assert found != cluster_interval(rows, documents, median, seed=6)


def test_what_has_no_interval_says_so():
    assert cluster_interval(np.ones(3), ["a"] * 3, median).note == "no interval: one document"
    few = cluster_interval(np.arange(3.0), ["a", "b", "c"], median)
    assert few.note.startswith("fewer than 10 documents")
    assert few.low == 0
    nothing = cluster_interval(np.ones(3), ["a", "b", "c"], lambda rows: math.nan)
    assert (nothing.value, nothing.low) == (None, None)
    one_side = np.array([1.0, *np.zeros(11)])
    rare = cluster_interval(one_side, list(range(12)), lambda r: 1.0 if r.sum() == 1 and r[0] else math.nan)
    assert rare.note == "no interval: not defined in most resamples"


def test_infinite_values_are_text_in_json():
    rows = np.array([1.0, math.inf, math.inf])
    found = cluster_interval(rows, ["a", "b", "c"], median)
    assert found.value == math.inf
    assert found.to_dict()["value"] == "inf"
    assert found.to_dict()["low"] == 1


def test_nothing_is_refused():
    with pytest.raises(ResultsError, match="received 0 rows"):
        cluster_interval(np.ones(0), [], median)
    with pytest.raises(ResultsError, match="received 2 rows and 1 documents"):
        cluster_interval(np.ones(2), ["a"], median)
