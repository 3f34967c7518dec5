"""Rows of a data set, each with the place that it comes from, so that a bad one can be named.

    read_rows("ruler_4096.jsonl")                  # .jsonl, .json (a list of rows), .csv, .parquet
    read_rows("hub:simonjegou/ruler:4096:test")    # a data set on the Hugging Face hub: config and split
    read_rows("hub:HuggingFaceH4/MATH-500@main")   # without a config; the split is test; a branch or a commit

Files are read by the standard library; parquet needs polars or pyarrow, the hub needs huggingface_hub, all in the extra
`kvkeep[bench]`. Of the hub only the files are used, no loading script is run; what was fetched once is read from the
hub's own cache when there is no network.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from kvkeep.errors import TaskError

HUB = "hub:"
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
SPLIT = "test"

_SOURCE = re.compile(
    r"hub:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<config>[\w .-]*)(?::(?P<split>[\w.-]+))?)?",
    re.ASCII,
)
_BENCH = "install kvkeep[bench]"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        values: by column.
        file: as the user named it, or its path on the hub.
        place: such as `"line 7"`.
    """

    values: Mapping[str, Any]
    file: str
    place: str

    def error(self, column: str, *, expected: str, remedy: str) -> TaskError:
        """The error for what stands in a column."""
        if column in self.values:
            value = self.values[column]
            text = repr(value)
            shown = f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
        else:
            shown = f"no such column; there are {', '.join(map(repr, self.values)) or 'none'}"
        return TaskError(
            expected=f"{expected} in {self.file}, {self.place}, column {column!r}", received=shown, remedy=remedy
        )

    def has(self, column: str) -> bool:
        """Whether there is a value, neither null nor not-a-number, as tables write a missing text."""
        value = self.values.get(column)
        return value is not None and not (isinstance(value, float) and math.isnan(value))

    def text(self, column: str, default: str | None = None) -> str:
        """The text in a column.

        Args:
            column: its name.
            default: stands for a missing value; None makes that an error.

        Raises:
            TaskError: there is no text.
        """
        if not self.has(column) and default is not None:
            return default
        value = self.values.get(column)
        if not isinstance(value, str):
            raise self.error(column, expected="a text", remedy="correct the row, or remove it")
        return value

    def positive(self, column: str) -> int:
        """The positive integer in a column, written as a number or as text.

        Raises:
            TaskError: there is none.
        """
        value = self.values.get(column)
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}(\.0)?\s*", value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1 or value != value // 1:
            raise self.error(column, expected="a positive integer", remedy="correct the row, or remove it")
        return int(value)


@dataclass(frozen=True)
class Table:
    """Rows and where they come from.

    Attributes:
        source: as the user wrote it.
        provider: the same, for the hub with the commit.
        repo: of the hub, such as `"simonjegou/ruler"`; empty for files.
        config: of the hub; may be empty.
        rows: in order.
    """

    source: str
    provider: str
    repo: str
    config: str
    rows: tuple[Row, ...]


def read_rows(source: str | PathLike[str]) -> Table:
    """The rows of a file or of a data set on the hub.

    Raises:
        TaskError: no such file or data set, a format that is not known, a line that cannot be read, no rows, or a
            package that is missing.
    """
    name = str(source)
    if not name.startswith(HUB):
        return _checked(Table(name, name, "", "", tuple(read_file(Path(source).expanduser(), name))))
    if (parts := _SOURCE.fullmatch(name)) is None:
        raise TaskError(
            expected="hub:OWNER/NAME, hub:OWNER/NAME:CONFIG or hub:OWNER/NAME:CONFIG:SPLIT, with @REVISION after NAME",
            received=repr(name),
            remedy="such as hub:simonjegou/ruler:4096:test",
        )
    repo, revision, config, split = (parts[key] or "" for key in ("repo", "revision", "config", "split"))
    folder, files = _fetch(repo, revision or None, config, split or SPLIT)
    rows = [
        row
        for file in files
        for row in read_file(folder / file, f"{HUB}{repo}/{file}")  # a split may lie in several files
    ]
    # The folder of a snapshot is named after its commit.
    return _checked(Table(name, f"{HUB}{repo}@{folder.name}:{config}:{split or SPLIT}", repo, config, tuple(rows)))


def _checked(table: Table) -> Table:
    if not table.rows:
        raise TaskError(expected=f"rows in {table.source}", received="none", remedy="name another file or split")
    return table


def read_file(path: Path, name: str) -> Iterator[Row]:
    """The rows of one file, by its suffix.

    Args:
        path: the file.
        name: what errors call it.

    Raises:
        TaskError: it is not there, its format is not known, or a line cannot be read.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise TaskError(
            expected=f"a file of {', '.join(readers)}", received=name, remedy="convert it, such as to .jsonl"
        )
    if not path.is_file():
        raise TaskError(
            expected=f"a file at {name}",
            received="a folder" if path.is_dir() else "none",
            remedy=f"check the path; data sets of the hub are written {HUB}OWNER/NAME:CONFIG:SPLIT",
        )
    for place, values in readers[path.suffix](path, name):
        if not isinstance(values, dict):
            raise TaskError(
                expected=f"a row (columns by name) in {name}, {place}",
                received=f"{type(values).__name__} {repr(values)[:80]}",
                remedy="write one JSON object for each row",
            )
        yield Row(values, name, place)


def read_json(path: Path, name: str) -> Any:
    """What a JSON file holds.

    Raises:
        TaskError: it cannot be read, or is no JSON.
    """
    return _parse(_read_text(path, name), name, 1)


def _parse(text: str, name: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(
            expected=f"JSON in {name}, line {first_line + error.lineno - 1}, column {error.colno}",
            received=f"{error.msg}: {text[max(0, error.pos - 20) : error.pos + 20]!r}",
            remedy="correct the file; one of JSON Lines is named .jsonl",
        ) from None
    except RecursionError:
        raise TaskError(
            expected=f"JSON in {name}, line {first_line}",
            received="brackets nested too deep",
            remedy="correct the file",
        ) from None


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # not read_text: line ends within a context are the context's
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            expected=f"a readable file in UTF-8 at {name}", received=str(error), remedy="check the path, or convert it"
        ) from error


def _read_jsonl(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines: it also splits at separators that JSON lets stand within a text.
    for number, line in enumerate(_read_text(path, name).split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parse(line, name, number)


def _read_json(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    content = read_json(path, name)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise TaskError(
            expected=f"a list of rows in {name}",
            received=f"{type(content).__name__} {repr(content)[:80]}",
            remedy='write [{"context": ...}, ...], or one object a line in a .jsonl file',
        )
    yield from ((f"row {number}", row) for number, row in enumerate(content, 1))


def _read_csv(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    lines = _read_text(path, name).split("\n")
    limit = csv.field_size_limit(2**31 - 1)  # contexts are longer than the default of 128 kB
    try:
        reader = csv.DictReader((line + "\n" for line in lines), strict=True)
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise TaskError(
                    expected=f"{len(reader.fieldnames or ())} cells in {name}, line {reader.line_num}",
                    received="more" if None in row else "fewer",
                    remedy="quote cells that hold commas or line ends",
                )
            rows.append((f"line {reader.line_num}", row))
    except csv.Error as error:
        raise TaskError(
            expected=f"CSV in {name}, line {reader.line_num}", received=str(error), remedy="correct the file"
        ) from None
    finally:
        csv.field_size_limit(limit)
    yield from rows


def _read_parquet(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    rows: Iterable[Any]
    try:
        if (polars := _optional("polars")) is not None:
            rows = polars.read_parquet(path).to_dicts()
        elif (pyarrow := _optional("pyarrow.parquet")) is not None:
            rows = pyarrow.read_table(path).to_pylist()
        else:
            raise TaskError(
                expected=f"polars or pyarrow, to read {name}",
                received="neither is installed",
                remedy=f"{_BENCH}, or convert the file to .jsonl",
            )
    except TaskError:
        raise
    except Exception as error:  # each library has errors of its own
        raise TaskError(
            expected=f"a parquet file at {name}",
            received=f"{type(error).__name__}: {str(error)[:200]}",
            remedy="check the file, or fetch it again",
        ) from error
    yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _optional(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _fetch(repo: str, revision: str | None, config: str, split: str) -> tuple[Path, list[str]]:
    """The folder that a data set's files were fetched to, and those of the config and the split."""
    hub = _optional("huggingface_hub")
    if hub is None:
        raise TaskError(expected="huggingface_hub, to fetch data sets", received="it is not installed", remedy=_BENCH)
    wanted = config or split
    # Narrow first: some data sets hold gigabytes for other configs. Wide second: a set of one file may name neither.
    for patterns in ([f"*{wanted}*{suffix}" for suffix in SUFFIXES], [f"*{suffix}" for suffix in SUFFIXES]):
        try:
            folder = Path(hub.snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
        except Exception as error:  # the hub's, the network's, the disk's: all mean that there is no data
            raise TaskError(
                expected=f"the data set {repo} on the hub",
                received=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
                remedy="check the name and the network, log in if it is gated, or pass the path of a file of it",
            ) from error
        present = [
            path.relative_to(folder).as_posix()
            for path in sorted(folder.rglob("*"))
            if path.suffix in SUFFIXES and path.is_file()
        ]
        if files := choose_files(present, config, split):
            return folder, files
    raise TaskError(
        expected=f"files of config {config!r} and split {split!r} in the data set {repo}",
        received=", ".join(present[:8]) + (" ..." if len(present) > 8 else "") or "no data files",
        remedy=f"name config and split, such as {HUB}{repo}:CONFIG:train, or pass the path of a file of it",
    )


def choose_files(files: list[str], config: str, split: str) -> list[str]:
    """The files of a data set that hold a config and a split, by the hub's habits of naming them.

    A config names a folder, or the file itself (`4096/test-00000-of-00001.parquet`, `gpqa_diamond.csv`); a split stands
    at the beginning of the file's name, alone or before a number (`data/train-00000-of-00002.parquet`, `test.jsonl`).
    If just one file is there, it is taken whatever its name. Files of one format only.
    """
    if config:
        files = [file for file in files if config in (*Path(file).parts[:-1], Path(file).name.split(".")[0])]
    named = [file for file in files if re.match(rf"{re.escape(split)}(?:[-_][0-9]|\.|$)", Path(file).name)]
    if not named and len(files) == 1:
        named = files
    folders = {str(Path(file).parent) for file in named}
    if len(folders) > 1:  # several configs, none of which was named
        return []
    formats = [suffix for suffix in SUFFIXES if any(file.endswith(suffix) for file in named)]
    return [file for file in named if formats and file.endswith(formats[0])]
