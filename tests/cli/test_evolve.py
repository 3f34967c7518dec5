"""`kvkeep evolve` from the first prefill to the page, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvkeep.cli import main
from kvkeep.evolve.history import read_history

from .conftest import check_text


@pytest.fixture
def evolve(kvkeep, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))

    def call(*words, out=tmp_path / "out", candidates=6):
        usual = ("--task", "key_value", "--length", 700, "--samples", 4, "--compression-ratio", 0.9)
        usual += ("--islands", 2, "--generation", 3, "--candidates", candidates, "--gate", 0.0)
        if "--seed" not in words:
            usual += ("--seed", 4)  # a random model: with most seeds it minds nothing that is evicted
        return kvkeep("evolve", "--model", folder, "--out", out, *usual, *words)

    return call


def test_a_search_its_controls_and_what_holds_elsewhere(evolve, kvkeep, folder, context, tmp_path):
    more = ("--controls", "--promote", "--promote-samples", 2, "--promote-length", 700, "--promote-ratio", 0.9)
    ran = evolve(*more, "--json")
    assert ran.status == 0, ran.err
    found = ran.json
    assert found["candidates"] == 6
    assert sum(found["counts"].values()) == 7
    assert found["best"]["fitness"] >= found["seed"]["fitness"]
    assert {control["name"]: control["evaluations"] for control in found["controls"]} == {
        "seed": 1,
        "random-weights": 6,
        "best-of-n": 6,
        "grid": 6,
        "snapkv": 6,
        "chunkkv": 6,
    }
    assert found["controls"][0]["fitness"] == pytest.approx(found["seed"]["fitness"], abs=1e-3)
    assert {verdict["protocol"] for verdict in found["promotion"]} == {"query-agnostic", "query-aware"}
    first, _ = found["rank_correlations"]
    assert 0 < first["n"] <= 7  # the programs that are weighted sums and came through stage 1
    assert found["drift"] == []  # of two generations
    if found["page"] is not None:
        assert Path(found["page"]).stat().st_size > 10_000
    there = (tmp_path / "out" / "rows.jsonl").read_bytes()
    text = evolve(*more)
    check_text(text)
    assert "control grid" in text.out
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == there  # nothing was done again
    best = tmp_path / "out" / "best.py"
    answer = kvkeep(
        *("run", "--model", folder, "--context", context, "--question", "When?", "--max-new-tokens", 2),
        *("--policy", f"program:{best}", "--compression-ratio", 0.5),
    )
    assert answer.status == 0, answer.err


def test_more_candidates_go_on_from_there(evolve, tmp_path):
    first = evolve("--json")
    assert first.status == 0, first.err
    before = read_history(tmp_path / "out").candidates
    assert evolve("--json", candidates=9).json["candidates"] == 9
    after = read_history(tmp_path / "out").candidates
    assert after[: len(before)] == before
    other = evolve("--json", "--seed", 1)
    assert other.status == 2
    assert "settings that the run" in other.json["expected"]


def test_the_best_so_far_is_there_before_the_end(evolve, tmp_path, monkeypatch):
    seen = []

    def look(progress):
        best = tmp_path / "out" / "best.py"
        seen.append((progress.done, progress.stage, best.read_text() if best.exists() else None))
        return ""

    monkeypatch.setattr("kvkeep.cli.evolve.progress_line", look)
    assert evolve("--json").status == 0
    before = {candidate.source for candidate in read_history(tmp_path / "out").candidates}
    last = [text for done, stage, text in seen if done == 3 and stage]
    assert last
    assert all(text in before for text in last)


def test_a_second_model_is_asked_for_before_the_search(evolve, tmp_path):
    ran = evolve("--promote", "--second-model", tmp_path / "no-model", "--json")
    assert ran.status == 2
    assert "no-model" in json.dumps(ran.json)
    assert not (tmp_path / "out" / "rows.jsonl").exists()


def test_a_recording_is_replayed_to_the_same_search(evolve, tmp_path):
    assert evolve("--recording", tmp_path / "proposals").status == 0
    again = evolve("--mutator", "replay", "--recording", tmp_path / "proposals", out=tmp_path / "again")
    assert again.status == 0, again.err
    one, other = (read_history(tmp_path / name).candidates for name in ("out", "again"))
    assert [c.digest for c in one] == [c.digest for c in other]
    assert [c.evaluation.fitness for c in one] == [c.evaluation.fitness for c in other]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seed-program", "frk"), "No such file"),
        (("--mutator", "llm"), "--llm MODEL"),
        (("--llm", "some"), "--llm MODEL"),
        (("--mutator", "replay"), "--recording"),
        (("--task", "ruler/vtt"), "did you mean"),
        (("--compression-ratio", "1.5"), "0 <= ratio < 1"),
        (("--gate", "1.5"), "gate"),
        (("--sample-cache-bytes", "many"), "64MiB"),
        (("--executor", "slurm"), "slurm"),
        (("--token-limit", "100"), "--mutator llm beside --token-limit"),
        (("--second-model", "other"), "--promote beside --second-model"),
        (("--unseen-task", "key_value", "--promote-ratio", "0.5"), "--promote beside --promote-ratio, --unseen-task"),
        (("--promote", "--unseen-task", "ruler/qa_1"), "ruler/qa_1, which --task names too"),
    ],
)
def test_what_cannot_be_searched_is_refused(words, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("kvkeep.cli.evolve.load", lambda *a, **k: pytest.fail("a model was loaded"))
    status = main(["evolve", "--model", "some-model", "--out", str(tmp_path / "none"), *words, "--json"])
    out = capsys.readouterr().out
    assert status == 2, out
    assert said in out or said in json.dumps(json.loads(out))
    assert not (tmp_path / "none").exists()
