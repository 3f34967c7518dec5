"""The log of a run: rows as lines of JSON; see `appending` for what a killed process leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvkeep.errors import ResultsError
from kvkeep.results.appending import ROWS, AppendLog, whole_lines
from kvkeep.results.rows import Key, Row


class ResultLog(AppendLog):
    """Appends rows to a folder; made again with the same settings, it goes on where the last process stopped.

    Arguments and errors are those of `AppendLog`.

    ```python
    with ResultLog(folder, settings) as log:
        if row_key(sample.key, turn, policy, budget, protocol) not in log:
            log.append(Row(...))
    ```
    """

    def append(self, row: Row) -> bool:
        """Write a row.

        Returns:
            False if there is a row with its key already: the first one stays, and nothing is written.

        Raises:
            ResultsError: the log is closed.
            OSError: the row could not be written; the file is as it was before.
        """
        return self._append(row.key, row.to_dict())

    def _note(self, where: str, record: Any) -> Key:
        return Row.from_dict(record, where).key


def iterate_rows(folder: str | os.PathLike[str]) -> Iterator[Row]:
    """The rows of a run, while it runs too: a last line that is not finished is left out, a key that comes again too.

    Raises:
        ResultsError: no such file, a newer schema version, a line that is no row.
    """
    path = Path(folder) / ROWS
    seen: set[Key] = set()
    try:
        for where, record in whole_lines(path):
            row = Row.from_dict(record, where)
            if row.key not in seen:
                seen.add(row.key)
                yield row
    except FileNotFoundError as error:
        raise ResultsError(
            expected=f"{ROWS} in {folder}", received="no such file", remedy="name the folder of a run"
        ) from error


def read_rows(folder: str | os.PathLike[str]) -> list[Row]:
    """The rows of a run; see `iterate_rows`."""
    return list(iterate_rows(folder))
