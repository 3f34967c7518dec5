"""Rows as a polars table, and as parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kvkeep.results.log import iterate_rows
from kvkeep.results.rows import Row
from kvkeep.whole_files import replacing

PARQUET = "results.parquet"

_PARTS = ("memory", "fidelity", "times")  # their fields become columns
_JSON = ("options", "seeds", "versions")  # their keys differ from task to task: one column of JSON text each

_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("sample", "task", "cluster", "policy"), pl.String),
    "budget": pl.String,
    "budget_value": pl.Float64,
    "protocol": pl.String,
    "turn": pl.Int64,
    "length": pl.Int64,
    "metric": pl.String,
    "score": pl.Float64,
    **dict.fromkeys(("reference_logprob", "kl", "top1", "nll"), pl.Float64),
    **dict.fromkeys(
        ("held_bytes", "full_bytes", "peak_bytes", "payload_bytes", "slack_bytes", "metadata_bytes", "state_bytes"),
        pl.Int64,
    ),
    **dict.fromkeys(("window_bytes", "logical_length", "entries", "entries_full", "uncut_entries"), pl.Int64),
    "fraction": pl.Float64,
    **dict.fromkeys(("prefill_s", "evict_s", "time_to_first_token_s", "decode_tokens_per_s"), pl.Float64),
    "kept_needle_share": pl.Float64,
    "kept_needle_share_per_cell": pl.List(pl.List(pl.Float64)),
    "entries_per_cell": pl.List(pl.List(pl.Int64)),
    **dict.fromkeys(("question", "prediction"), pl.String),
    "references": pl.List(pl.String),
    **dict.fromkeys((*_JSON, "model", "model_sha256", "provider"), pl.String),
}

_NESTED = (pl.List(pl.List(pl.Int64)), pl.List(pl.List(pl.Float64)))


def frame(rows: Iterable[Row]) -> pl.DataFrame:
    """One row each. The parts' fields are columns of their own (`held_bytes`, `kl`, `prefill_s`).

    The budget is its kind (`budget`) and its number (`budget_value`); `options`, `seeds` and `versions` are JSON.
    """
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for row in rows:
        values = vars(row) | {name: value for part in _PARTS for name, value in vars(getattr(row, part)).items()}
        values |= {name: json.dumps(values[name], sort_keys=True) for name in _JSON}
        ((values["budget"], values["budget_value"]),) = row.budget.items()
        for name, column in columns.items():
            column.append(values[name])
    return pl.DataFrame([_series(name, columns[name], dtype) for name, dtype in _COLUMNS.items()])


def _series(name: str, values: list[Any], dtype: Any) -> pl.Series:
    """Lists of lists go through numpy where they are all of one shape: polars takes minutes for a large run."""
    present = [value for value in values if value is not None]
    shapes = {tuple(map(len, value)) for value in present} if dtype in _NESTED else set()
    if len(shapes) == 1 and len(set(*shapes)) == 1:
        places = iter(range(len(present)))
        index = pl.Series([None if value is None else next(places) for value in values], dtype=pl.Int64)
        return pl.Series(name, np.array(present)).cast(dtype).gather(index)
    return pl.Series(name, values, dtype=dtype)


def read(folder: str | os.PathLike[str]) -> pl.DataFrame:
    """The rows of a run as a table, see `frame`; also while it runs.

    Raises:
        ResultsError: see `kvkeep.results.log.iterate_rows`.
    """
    return frame(iterate_rows(folder))


def compact(folder: str | os.PathLike[str]) -> Path:
    """Write the rows of a run as `results.parquet` beside them. The lines of JSON stay what counts.

    Returns:
        The file.

    Raises:
        ResultsError: see `kvkeep.results.log.iterate_rows`.
    """
    return write_parquet(iterate_rows(folder), folder)


def write_parquet(rows: Iterable[Row], folder: str | os.PathLike[str]) -> Path:
    """Write rows as `results.parquet` into a folder: whole, or not at all."""
    path = Path(folder) / PARQUET
    with replacing(path) as draft:
        frame(rows).write_parquet(draft)
    return path
