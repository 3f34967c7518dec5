from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from results.fake import CLAIMS, HOSTILE, row

from kvkeep.errors import ResultsError
from kvkeep.results import ResultLog, Row, read_rows
from kvkeep.results.appending import ROWS, RUN, read_run

SETTINGS = {"model": "m", "policies": ("snapkv", "knorm"), "task": {"length": 1024, "seed": 0}}


def some_rows(count: int) -> list[Row]:
    return [row(sample=f"s{i}", prediction=HOSTILE[i % len(HOSTILE)]) for i in range(count)]


def write(folder: Path, rows: list[Row], **kwargs: Any) -> Path:
    with ResultLog(folder, SETTINGS, **kwargs) as log:
        for each in rows:
            log.append(each)
    return folder


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    rows = some_rows(9)
    assert read_rows(write(tmp_path / "a" / "run", rows)) == rows


def test_a_key_is_there_once(tmp_path: Path) -> None:
    first, again = row(score=1.0), row(score=0.0)
    with ResultLog(tmp_path, SETTINGS) as log:
        assert log.append(first)
        assert not log.append(again)
        assert first.key in log
        assert len(log) == 1
    with ResultLog(tmp_path, SETTINGS) as log:
        assert first.key in log
        assert not log.append(again)
    assert read_rows(tmp_path) == [first]
    with open(tmp_path / ROWS, "ab") as file:  # two folders were put together by hand
        file.write((tmp_path / ROWS).read_bytes())
    assert read_rows(tmp_path) == [first]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("log") / "run", some_rows(7))


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_ends_anywhere_loses_the_torn_row_alone(
    data: st.DataObject, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content, rows = (whole / ROWS).read_bytes(), some_rows(7)
    size = data.draw(st.integers(0, len(content)))
    tail = data.draw(st.sampled_from([b"", b"\0" * 17]))  # a file that grew before its blocks were written
    folder = tmp_path_factory.mktemp("torn")
    (folder / RUN).write_bytes((whole / RUN).read_bytes())
    (folder / ROWS).write_bytes(content[:size] + tail)
    there = content[:size].count(b"\n")
    assert read_rows(folder) == rows[:there]  # by a reader, while the file is as it is
    assert sum(write_log(folder, rows)) == len(rows) - there
    assert read_rows(folder) == rows
    assert (folder / ROWS).read_bytes() == content


def write_log(folder: Path, rows: list[Row]) -> list[bool]:
    with ResultLog(folder, SETTINGS) as log:
        return [log.append(each) for each in rows]


def test_a_process_killed_while_it_writes_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys; from results.fake import row; from kvkeep.results import ResultLog\n"
        "log = ResultLog(sys.argv[1], {}, sync_rows=3)\n"
        "for i in range(100_000): log.append(row(sample=f's{i}', prediction='x' * 500))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    counts = [0]
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=environment)
        path = tmp_path / ROWS
        deadline = time.monotonic() + 60
        enough = 20_000 + (path.stat().st_size if path.exists() else 0)
        while not path.exists() or path.stat().st_size < enough:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        rows = read_rows(tmp_path)
        assert [each.sample for each in rows] == [f"s{i}" for i in range(len(rows))]
        counts.append(len(rows))
    assert counts == sorted(set(counts))
    with ResultLog(tmp_path, {}) as log:  # the dead process holds no lock
        assert len(log) == counts[-1]
    assert (tmp_path / ROWS).read_bytes().endswith(b"\n")


def test_a_row_that_cannot_be_written_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = some_rows(2)
    with ResultLog(tmp_path, SETTINGS) as log:
        log.append(first)
        write_some = os.write

        def full_disk(file: int, data: bytes) -> int:
            if len(data) < 500:
                raise OSError(28, "No space left on device")
            return write_some(file, data[: len(data) // 2])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_disk)
            with pytest.raises(OSError, match="No space"):
                log.append(second)
        assert second.key not in log
        assert read_rows(tmp_path) == [first]
        assert log.append(second)
    assert read_rows(tmp_path) == [first, second]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with ResultLog(tmp_path, SETTINGS) as log:
        with pytest.raises(ResultsError, match="another process"):
            ResultLog(tmp_path, SETTINGS)
        log.append(row())
        assert read_rows(tmp_path) == [row()]  # reading is possible meanwhile
    ResultLog(tmp_path, SETTINGS).close()


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    log = ResultLog(tmp_path, SETTINGS)
    log.close()
    log.close()
    with pytest.raises(ResultsError, match="closed"):
        log.append(row())


def test_other_settings_are_named(tmp_path: Path) -> None:
    write(tmp_path, some_rows(1))
    other = {"model": "m", "policies": ["snapkv"], "task": {"length": 2048, "seed": 0}, "new": 1}
    with pytest.raises(ResultsError) as error:
        ResultLog(tmp_path, other)
    for difference in ("task.length: 1024 -> 2048", "new: null -> 1", 'policies: ["snapkv", "knorm"] -> ["snapkv"]'):
        assert difference in error.value.received
    assert "seed" not in error.value.received
    ResultLog(tmp_path, SETTINGS).close()  # the refused one let go of the lock


def test_settings_that_json_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="JSON"):
        ResultLog(tmp_path, {"path": tmp_path})
    with pytest.raises(ResultsError, match="JSON"):
        ResultLog(tmp_path, {"r": float("nan")})


def test_claims_are_declared_once(tmp_path: Path) -> None:
    claims, others = tmp_path / "claims.toml", tmp_path / "others.toml"
    claims.write_text(CLAIMS)
    others.write_text(CLAIMS.replace("contexts = 10", "contexts = 2"))
    run = write(tmp_path / "run", some_rows(1), claims=claims)
    assert (run / "claims.toml").read_text() == CLAIMS
    assert len(read_run(run).claims_sha256) == 64
    ResultLog(run, SETTINGS, claims).close()
    ResultLog(run, SETTINGS).close()
    with pytest.raises(ResultsError, match="claims: another file"):
        ResultLog(run, SETTINGS, others)
    without = write(tmp_path / "without", some_rows(1))
    with pytest.raises(ResultsError, match="claims: none"):
        ResultLog(without, SETTINGS, claims)


def test_files_that_are_not_a_runs(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no such file"):
        read_rows(tmp_path)
    with pytest.raises(ResultsError, match="no such file"):
        read_run(tmp_path)
    run = write(tmp_path / "run", some_rows(3))
    lines = (run / ROWS).read_bytes().splitlines(keepends=True)
    (run / ROWS).write_bytes(lines[0] + b"{half\n" + lines[2])
    with pytest.raises(ResultsError, match="line 2 of"):
        read_rows(run)
    with pytest.raises(ResultsError, match="line 2 of"):
        ResultLog(run, SETTINGS)
    assert (run / ROWS).read_bytes().startswith(lines[0] + b"{half")  # nothing was cut off
    (run / RUN).unlink()
    with pytest.raises(ResultsError, match="rows without it"):
        ResultLog(run, SETTINGS)


def test_a_newer_run_is_refused(tmp_path: Path) -> None:
    run = write(tmp_path, some_rows(1))
    content = (run / ROWS).read_bytes()
    newer = json.dumps(json.loads(content) | {"schema_version": 99}).encode() + b"\n"
    (run / ROWS).write_bytes(content + newer)
    with pytest.raises(ResultsError, match="update kvkeep"):
        ResultLog(run, SETTINGS)
    record = json.loads((run / RUN).read_bytes())
    (run / RUN).write_text(json.dumps(record | {"schema_version": 99}))
    with pytest.raises(ResultsError, match="update kvkeep"):
        read_run(run)
