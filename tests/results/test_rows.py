from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results.fake import row

from kvkeep.errors import ResultsError
from kvkeep.results import SCHEMA_VERSION, Fidelity, Memory, Row, Times, row_key
from kvkeep.store.ledger import Ledger

texts = st.text(max_size=20)
shares = st.floats(0, 1)
full_rows = st.builds(
    row,
    sample=texts,
    policy=texts,
    prediction=texts,
    references=st.lists(texts, max_size=3),
    score=st.none() | shares,
    budget=st.sampled_from([{"compression_ratio": 0.9}, {"entries": 7}, {"bytes": 10**9}]),
    fidelity=st.builds(Fidelity, kl=st.none() | st.floats(0, 50), top1=st.none() | shares),
    times=st.builds(Times, prefill_s=st.none() | st.floats(0, 1e4)),
    options=st.dictionaries(texts, st.integers(-5, 5) | texts | st.floats(-1, 1), max_size=2),
    entries_per_cell=st.none() | st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3),
)


@given(full_rows)
def test_what_is_written_is_read(given_row: Row) -> None:
    line = json.dumps(given_row.to_dict(), allow_nan=False)
    assert "\n" not in line
    read = Row.from_dict(json.loads(line))
    assert read == given_row
    assert read.key == given_row.key


def test_the_ledgers_counts_are_a_rows_memory() -> None:
    assert {f.name for f in dataclasses.fields(Memory)} == {*Ledger([], lambda: [0]).to_dict()}
    assert Memory(**Ledger([], lambda: [7]).to_dict()).logical_length == 7


def test_numbers_of_numpy_become_plain() -> None:
    made = row(score=np.float32(0.5), turn=np.int64(3), entries_per_cell=np.array([[1, 2], [3, 4]]))
    assert json.loads(json.dumps(made.to_dict()))["entries_per_cell"] == [[1, 2], [3, 4]]
    assert (type(made.score), type(made.turn)) == (float, int)


def test_half_a_surrogate_pair_does_not_reach_a_writer() -> None:
    made = row(prediction="a\ud800b \ud83d\ude00", question="\udfff")
    assert made.prediction == "a\N{REPLACEMENT CHARACTER}b \U0001f600"
    made.question.encode()


@pytest.mark.parametrize(
    ("changes", "received"),
    [
        ({"score": float("nan")}, "nan"),
        ({"score": "0.5"}, "'0.5'"),
        ({"score": True}, "True"),
        ({"protocol": "agnostic"}, "'agnostic'"),
        ({"budget": {}}, "{}"),
        ({"budget": {"compression_ratio": 1.5}}, "1.5"),
        ({"budget": {"ratio": 0.5}}, "ratio"),
        ({"policy": None}, "None"),
        ({"options": ["depth"]}, "depth"),
        ({"entries_per_cell": [1, 2]}, "[1, 2]"),
        ({"kept_needle_share_per_cell": [[float("inf")]]}, "inf"),
    ],
)
def test_what_a_row_refuses(changes: dict[str, Any], received: str) -> None:
    with pytest.raises(ResultsError) as error:
        row(**changes)
    assert received in error.value.received


def test_numbers_that_are_none_are_named() -> None:
    with pytest.raises(ResultsError, match=r"fidelity\.kl"):
        Fidelity(kl=float("inf"))
    with pytest.raises(ResultsError, match="held_bytes"):
        Memory(held_bytes=None, full_bytes=1, fraction=1, peak_bytes=1, payload_bytes=1)  # type: ignore[arg-type]
    with pytest.raises(ResultsError, match=r"logical_length.*\[3, 4\]"):
        Memory(held_bytes=1, full_bytes=1, fraction=1, peak_bytes=1, payload_bytes=1, logical_length=[3, 4])  # type: ignore[arg-type]


def test_a_newer_schema_is_refused() -> None:
    record = row().to_dict() | {"schema_version": SCHEMA_VERSION + 1, "colour": "blue"}
    with pytest.raises(ResultsError, match="update kvkeep"):
        Row.from_dict(record)
    with pytest.raises(ResultsError, match="no file of kvkeep"):
        Row.from_dict({"hello": 1})
    with pytest.raises(ResultsError, match="no file of kvkeep"):
        Row.from_dict([])


@pytest.mark.parametrize("change", [{"colour": "blue"}, {"memory": {"held_bytes": 3}}, {"memory": None}, {"times": 4}])
def test_a_row_that_does_not_fit_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(ResultsError, match="line 7 of x"):
        Row.from_dict(row().to_dict() | change, "line 7 of x")
    with pytest.raises(ResultsError, match="nan in line 7 of x"):
        Row.from_dict(row().to_dict() | {"score": float("nan")}, "line 7 of x")


def test_a_key_is_known_before_its_row() -> None:
    made = row(budget={"compression_ratio": 0})
    assert row_key(made.sample, 0, "snapkv", {"compression_ratio": 0.0}, "query-agnostic") == made.key
    others = [row(turn=1), row(policy="x"), row(budget={"entries": 1}), row(protocol="query-aware"), row(sample="y")]
    assert len({made.key, *(other.key for other in others)}) == 6


def test_the_room_knows_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import kvkeep.results, kvkeep.results.claims, kvkeep.results.report; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'altair', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
