from __future__ import annotations

import json

import numpy as np
import pytest

from kvkeep.lab.certify import is_available
from kvkeep.lab.rows import read_instance

from .conftest import TEXT, check_text

SMALL = ("--length", 128, "--rows", 10, "--seed", 3)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"text{number}.txt").write_text(f"{number} of three. {TEXT}", encoding="utf-8")
    return folder


def test_ceiling_makes_the_table_and_goes_on(kvkeep, folder, texts, tmp_path):
    pytest.importorskip("vl_convert")
    out = tmp_path / "out"
    words = ("lab", "ceiling", "--model", folder, "--text", texts, "--out", out, *SMALL)
    ran = kvkeep(*words)
    check_text(ran)
    assert "10 rows of 3 documents" in ran.out
    assert {path.name for path in out.iterdir()} >= {"rows.jsonl", "ceiling.json", "ceiling.md", "ceiling.svg"}
    before = (out / "rows.jsonl").read_bytes()
    again = kvkeep(*words, "--json").json
    assert (out / "rows.jsonl").read_bytes() == before
    assert again["rows"] == 10
    assert again["lines"] == json.loads((out / "ceiling.json").read_text())["lines"]
    other = kvkeep(*words[:-1], 4)
    assert other.status == 2
    assert "seed: 3 -> 4" in " ".join(other.err.split())


def test_rows_are_written_and_judged(kvkeep, folder, texts, tmp_path):
    out = tmp_path / "rows"
    found = kvkeep("lab", "rows", "--model", folder, "--text", texts, "--out", out, *SMALL, "--json").json
    assert len(found["rows"]) == len(list(out.glob("*.npz"))) == 10
    assert max(row["deviation"] for row in found["rows"]) < 1e-5
    path = out / found["rows"][0]["file"]
    instance, _ = read_instance(path)
    assert instance.size == found["rows"][0]["position"] + 1
    ran = kvkeep("lab", "selection", path)
    check_text(ran)
    judged = kvkeep("lab", "selection", path, "--entries", 4, "--json").json["budgets"]
    assert [one["entries"] for one in judged] == [4]
    assert judged[0]["top_mass"] == sorted(np.argsort(-instance.probabilities, kind="stable")[:4].tolist())
    assert judged[0]["kappa"] >= 1


def test_errors_are_explained(kvkeep, folder, texts, tmp_path):
    ran = kvkeep("lab", "ceiling", "--model", folder, "--text", texts, "--out", tmp_path / "x", "--length", 4096)
    assert ran.status == 2
    assert "CeilingError" in ran.err
    assert not (tmp_path / "x").exists()
    np.savez(tmp_path / "bad.npz", probabilities=np.array([0.5, np.nan]), values=np.zeros((2, 1)))
    bad = kvkeep("lab", "selection", tmp_path / "bad.npz", "--json")
    assert (bad.status, bad.json["error"]) == (2, "InstanceError")
    unknown = kvkeep("lab", "ceiling", "--bogus", "--json")
    assert unknown.status == 2
    assert "kvkeep lab ceiling" in unknown.json["expected"]


@pytest.mark.skipif(not is_available(), reason='the solver SCIP is not installed: pip install "kvkeep[scip]"')
def test_selection_certifies_where_the_solver_is_there(kvkeep, tmp_path):
    generator = np.random.default_rng(0)
    p = generator.random(14)
    np.savez(tmp_path / "row.npz", probabilities=p / p.sum(), values=generator.normal(size=(14, 3)))
    words = ("lab", "selection", tmp_path / "row.npz", "--entries", "3", "--certify")
    ran = kvkeep(*words)
    assert "s = 3: " in ran.out
    assert "by SCIP, proven" in ran.out
    (found,) = kvkeep(*words, "--json").json["budgets"]
    assert found["certificate"]["kept"] == found["best"]
    assert found["certificate"]["proven"]


def test_selection_names_the_solver_that_is_missing(kvkeep, tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.lab.certify.is_available", lambda: False)
    np.savez(tmp_path / "row.npz", probabilities=np.full(9, 1 / 9), values=np.eye(9))
    ran = kvkeep("lab", "selection", tmp_path / "row.npz", "--entries", "3", "--certify")
    assert ran.status == 2
    assert 'pip install "kvkeep[scip]"' in ran.err
