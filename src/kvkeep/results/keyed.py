"""Records with a text `key` in a file that a killed run goes on from, for runs that measure no policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.results.appending import AppendLog, damaged


class KeyedLog(AppendLog):
    """Appends records, each of which has a text `key`; made again with the same settings, it goes on.

    Args:
        folder: made if it is not there.
        settings: what the numbers hang on; JSON-able.

    Raises:
        ResultsError: as for `AppendLog`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        super().__init__(folder, settings)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records, by key, so that a resumed run gives them in the same order as an undisturbed one."""
        return [self._records[key] for key in sorted(self._records)]

    def append(self, record: Mapping[str, Any]) -> None:
        """Hand a record to the operating system; one whose key is there already is left out."""
        if self._append(record["key"], record):
            self._note("a new record", dict(record))

    def _note(self, where: str, record: Any) -> str:
        try:
            key = str(record["key"])
        except (KeyError, TypeError) as error:
            raise damaged(where, repr(record)) from error
        self._records.setdefault(key, record)
        return key
