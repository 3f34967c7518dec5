from __future__ import annotations

import json

import pytest

from kvkeep.errors import ResultsError
from kvkeep.results.keyed import KeyedLog


def test_a_killed_run_loses_nothing_and_counts_nothing_twice(tmp_path):
    with KeyedLog(tmp_path, {"seed": 1}) as log:
        for key in ("b", "a", "b"):
            log.append({"key": key, "value": 1})
    with open(tmp_path / "rows.jsonl", "ab") as file:
        file.write(b'{"key":"c","val')  # killed while it wrote
    with KeyedLog(tmp_path, {"seed": 1}) as log:
        assert [record["key"] for record in log.records] == ["a", "b"]
        assert "c" not in log
        log.append({"key": "c", "value": 2})
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["b", "a", "c"]


def test_other_settings_are_refused(tmp_path):
    KeyedLog(tmp_path, {"seed": 1, "sizes": (1, 2)}).close()
    KeyedLog(tmp_path, {"seed": 1, "sizes": (1, 2)}).close()
    with pytest.raises(ResultsError, match="seed: 1 -> 2"):
        KeyedLog(tmp_path, {"seed": 2, "sizes": (1, 2)})
    KeyedLog(tmp_path, {"seed": 1, "sizes": (1, 2)}).close()  # the refusal has let go of the folder


def test_one_process_at_a_time(tmp_path):
    with KeyedLog(tmp_path, {}), pytest.raises(ResultsError, match="the only one that appends"):
        KeyedLog(tmp_path, {})


def test_damage_is_named(tmp_path):
    with KeyedLog(tmp_path, {}) as log:
        log.append({"key": "a"})
    with open(tmp_path / "rows.jsonl", "ab") as file:
        file.write(b"[1]\n")
    with pytest.raises(ResultsError, match="line 2"):
        KeyedLog(tmp_path, {})
    (tmp_path / "run.json").unlink()
    with pytest.raises(ResultsError, match="rows without it"):
        KeyedLog(tmp_path, {})
