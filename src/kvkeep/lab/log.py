"""The log of a measurement of rows: one line of JSON a row, which a killed run neither loses nor counts twice.

A folder holds `rows.jsonl` (append-only), `run.json` (settings; a run goes on with the same ones only) and `.lock`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from kvkeep.errors import ResultsError

ROWS, RUN, LOCK = "rows.jsonl", "run.json", ".lock"
SCHEMA_VERSION = 1


class RowLog:
    """Appends records, each of which has a text `key`; made again with the same settings, it goes on.

    Args:
        folder: made if it is not there.
        settings: what the numbers hang on; JSON-able.

    Raises:
        ResultsError: another process appends to the folder; other settings than the run began with; a line in the
            middle that is no record.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ResultsError(
                expected=f"to be the only one that appends to {folder}",
                received="a folder that another process is writing to",
                remedy="wait until it is done, or choose another folder",
            ) from error
        try:
            self._check_settings(json.loads(json.dumps(dict(settings), allow_nan=False)))
            path = folder / ROWS
            content = path.read_bytes() if path.exists() else b""
            whole = content.rfind(b"\n") + 1  # a torn last line is measured again
            self._records = _records(content[:whole], path)
            self._file = open(path, "ab")  # noqa: SIM115 - closed by close()
            self._file.truncate(whole)
        except BaseException:
            self._lock.release()
            raise

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records, by key, so that a resumed run gives them in the same order as an undisturbed one."""
        return [self._records[key] for key in sorted(self._records)]

    def append(self, record: Mapping[str, Any]) -> None:
        """Hand a record to the operating system; one whose key is there already is left out."""
        key = record["key"]
        if key in self._records:
            return
        self._file.write(json.dumps(dict(record), allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._records[key] = dict(record)

    def close(self) -> None:
        """Wait until everything is on the disk, and let others append."""
        try:
            os.fsync(self._file.fileno())
            self._file.close()
        finally:
            self._lock.release()

    def __enter__(self) -> RowLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_settings(self, given: dict[str, Any]) -> None:
        path = self.folder / RUN
        record = {"schema_version": SCHEMA_VERSION, "settings": given}
        if not path.exists():
            if (self.folder / ROWS).exists():
                raise ResultsError(
                    expected=f"{RUN} beside {ROWS} in {self.folder}",
                    received="rows without it",
                    remedy="nobody can tell what settings they were made with; choose another folder",
                )
            draft = path.with_name(f".{path.name}.new")
            draft.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            os.replace(draft, path)
            return
        try:
            former = json.loads(path.read_bytes())
        except ValueError as error:
            raise ResultsError(
                expected=f"settings in {path}", received="no JSON", remedy="choose another folder"
            ) from error
        if former != record:
            had = former.get("settings", {}) if isinstance(former, dict) else {}
            other = sorted(name for name in {*had, *given} if had.get(name) != given.get(name))
            raise ResultsError(
                expected=f"the settings that the run in {self.folder} began with",
                received="; ".join(f"{name}: {had.get(name)} -> {given.get(name)}" for name in other)
                or "another schema version",
                remedy="choose another folder, or go back to the former settings",
            )


def _records(content: bytes, path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            record = json.loads(line)
            found.setdefault(record["key"], record)
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(
                expected=f"a record in line {number} of {path}",
                received=f"{line[:60]!r}",
                remedy="the file was damaged; remove this line, and run again to refill it",
            ) from error
    return found
