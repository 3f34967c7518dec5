from __future__ import annotations

import dataclasses
from pathlib import Path

import polars as pl
from results.fake import HOSTILE, row, write_run

from kvkeep.results import Row, read_rows
from kvkeep.results.frame import compact, frame, read


def test_every_field_of_a_row_has_its_column() -> None:
    made = frame([row()])
    parts = {name for part in ("memory", "fidelity", "times") for name in vars(getattr(row(), part))}
    fields = {field.name for field in dataclasses.fields(Row)} - {"memory", "fidelity", "times"}
    assert {*made.columns} == fields | parts | {"budget_value"}


def test_what_was_not_measured_is_null() -> None:
    made = frame([row(score=None), row(score=0.25, entries_per_cell=((1, 2), (3, 4)))])
    assert made["score"].to_list() == [None, 0.25]
    assert made["score"].dtype == pl.Float64
    assert made["kl"].dtype == pl.Float64  # though no row has it
    assert made["entries_per_cell"].to_list() == [None, [[1, 2], [3, 4]]]


def test_layers_with_unequal_heads() -> None:
    cells = [((1, 2), (3,)), None, ((4,),)]
    column = frame(row(entries_per_cell=each) for each in cells)["entries_per_cell"]
    assert column.to_list() == [[[1, 2], [3]], None, [[4]]]


def test_no_rows() -> None:
    assert frame([]).height == 0


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tasks=["ruler/vt"], contexts=2, needles=False, lengths=[1024])
    table = pl.read_parquet(compact(run))
    assert table.equals(read(run))
    assert table.height == len(read_rows(run))
    assert {*HOSTILE[:2]} <= {*table["prediction"]}
    assert not [path.name for path in run.iterdir() if path.name.endswith(".new")]
