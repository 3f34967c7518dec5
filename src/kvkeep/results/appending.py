"""A file of JSON lines that a killed run neither loses nor counts twice, and the settings that it belongs to.

A folder holds `rows.jsonl` (append-only), `run.json` (the settings; a run resumes with the same ones only),
`claims.toml` if claims were declared before the run, and `.lock`.

What is on disk: each row is handed to the operating system before the next one is made, so that a killed process loses
at most the row that it was writing; `fsync` comes in batches, so that a machine that loses power loses at most a batch.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from kvkeep.errors import ResultsError
from kvkeep.results.rows import SCHEMA_VERSION, check_schema_version
from kvkeep.whole_files import sync_folder, write_whole

ROWS = "rows.jsonl"
RUN = "run.json"
CLAIMS = "claims.toml"
LOCK = ".lock"


@dataclass(frozen=True)
class Run:
    """What `run.json` says.

    Attributes:
        settings: of the run, as JSON gives them back.
        started: when the run began the first time, UTC, ISO 8601.
        claims_sha256: of the claims that were declared before the run; empty if there were none.
    """

    settings: dict[str, Any]
    started: str = ""
    claims_sha256: str = ""


class AppendLog(ABC):
    """Appends records to a folder, each with a key that is there once; subclasses know what a record is.

    Args:
        folder: of the run; it is made if it is not there.
        settings: what the run's numbers hang on: model, tasks, policies, budgets, seeds, versions. Must be JSON-able.
        claims: a claims file to be declared before the run begins; it is copied into the folder. None keeps what the
            folder has.
        sync_rows: `fsync` after so many records, or
        sync_seconds: after so many seconds, whichever comes first, and when the log is closed.

    Raises:
        ResultsError: another process appends to the folder; the settings or claims differ from those that the run
            began with; a newer schema version; a line in the middle that is no record.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any],
        claims: str | os.PathLike[str] | None = None,
        *,
        sync_rows: int = 32,
        sync_seconds: float = 5.0,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sync_rows, self._sync_seconds = sync_rows, sync_seconds
        self._file: int | None = None
        self._unsynced, self._synced_at = 0, time.monotonic()
        self._lock = FileLock(self.folder / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ResultsError(
                expected=f"to be the only one that appends to {self.folder}",
                received="a folder that another process is writing to",
                remedy="wait until it is done, or choose another folder; reading is possible at any time",
            ) from error
        try:
            self._begin_or_resume(settings, None if claims is None else Path(claims))
            self._open()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    @abstractmethod
    def _note(self, where: str, record: Any) -> Hashable:
        """The key of a record that is in the file, or has just been appended.

        Raises:
            ResultsError: it is no record.
        """

    def _append(self, key: Hashable, record: Mapping[str, Any]) -> bool:
        """Write a record; false if there is one with its key already, which stays.

        Raises:
            ResultsError: the log is closed.
            OSError: it could not be written; the file is as it was before.
        """
        if self._file is None:
            raise ResultsError(
                expected="an open log", received="one that was closed", remedy="make a new one with the same settings"
            )
        if key in self._keys:
            return False
        line = json.dumps(dict(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            _write_all(self._file, line)
        except BaseException:  # a full disk, Ctrl-C: what follows must not be glued to half a record
            os.ftruncate(self._file, self._length)
            raise
        self._length += len(line)
        self._keys.add(key)
        self._unsynced += 1
        if self._unsynced >= self._sync_rows or time.monotonic() - self._synced_at >= self._sync_seconds:
            self.flush()
        return True

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        if self._file is not None and self._unsynced:
            os.fsync(self._file)
        self._unsynced, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Flush, and let others append."""
        try:
            if self._file is not None:
                self.flush()
                os.close(self._file)
                self._file = None
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin_or_resume(self, settings: Mapping[str, Any], claims: Path | None) -> None:
        path = self.folder / RUN
        given = _as_json(settings)
        declared = claims.read_bytes() if claims is not None else b""
        if path.exists():
            run = read_run(self.folder)
            differences = _differences(run.settings, given)
            if claims is not None and hashlib.sha256(declared).hexdigest() != run.claims_sha256:
                differences.append(f"claims: {'another file' if run.claims_sha256 else 'none'} -> {claims}")
            if differences:
                raise ResultsError(
                    expected=f"the settings that the run in {self.folder} began with",
                    received="other ones: " + "; ".join(differences),
                    remedy="choose another folder, or go back to the former settings",
                )
            return
        if (self.folder / ROWS).exists() and (self.folder / ROWS).stat().st_size:
            raise ResultsError(
                expected=f"{RUN} beside {ROWS} in {self.folder}",
                received="rows without it",
                remedy="nobody can tell what settings they were made with; choose another folder",
            )
        if claims is not None:
            write_whole(self.folder / CLAIMS, declared, durable=True)
        record = {
            "schema_version": SCHEMA_VERSION,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "claims_sha256": hashlib.sha256(declared).hexdigest() if claims is not None else "",
            "settings": given,
        }
        write_whole(path, json.dumps(record, indent=2) + "\n", durable=True)

    def _open(self) -> None:
        path = self.folder / ROWS
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._length = _whole_lines(path.read_bytes())
        self._keys: set[Hashable] = {self._note(where, record) for where, record in whole_lines(path)}
        os.ftruncate(self._file, self._length)  # a torn last record is made again
        self._unsynced = 1
        self.flush()
        sync_folder(self.folder)


def whole_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of a file, while it is written too: a last line that is not finished is left out.

    Yields:
        where it stands, for messages, and what JSON gave.

    Raises:
        ResultsError: a line that is no JSON.
    """
    content = path.read_bytes()
    for number, line in enumerate(content[: _whole_lines(content)].split(b"\n")[:-1], start=1):
        where = f"line {number} of {path}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise damaged(where, line.decode(errors="replace")) from error
        yield where, record


def damaged(where: str, received: str) -> ResultsError:
    """The error for a line in the middle that is no record."""
    return ResultsError(
        expected=f"a row in {where}",
        received=f"{received[:60]!r}",
        remedy="the file was damaged; remove this line, and run again to refill it",
    )


def read_run(folder: str | os.PathLike[str]) -> Run:
    """The settings of a run.

    Raises:
        ResultsError: no `run.json`, one that is no JSON, a newer schema version.
    """
    path = Path(folder) / RUN
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise ResultsError(
            expected=f"{RUN} in {folder}",
            received="no such file" if isinstance(error, FileNotFoundError) else "a file that is no JSON",
            remedy="name the folder of a run",
        ) from error
    check_schema_version(record.get("schema_version") if isinstance(record, dict) else None, str(path))
    return Run(record.get("settings", {}), record.get("started", ""), record.get("claims_sha256", ""))


def _whole_lines(content: bytes) -> int:
    """Bytes up to the last line that is finished."""
    return content.rfind(b"\n") + 1


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they will be read again: tuples are lists, keys are text."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ResultsError(
            expected="settings that JSON can write", received=str(error), remedy="pass numbers, text, lists, dicts"
        ) from error
    return plain


def _differences(former: Any, given: Any, path: str = "") -> list[str]:
    """`name: former -> given` for each leaf that differs."""
    if isinstance(former, dict) and isinstance(given, dict):
        return [
            line
            for name in sorted({*former, *given})
            for line in _differences(former.get(name), given.get(name), f"{path}.{name}" if path else name)
        ]
    return [] if former == given else [f"{path}: {json.dumps(former)} -> {json.dumps(given)}"]
