from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from scipy.stats import spearmanr

from kvkeep.lab import ceiling
from kvkeep.lab.ceiling import (
    CeilingError,
    CeilingSettings,
    choose_documents,
    measure_ceiling,
    places_by_document,
    summarise,
)
from kvkeep.lab.ceiling_report import ceiling_dict, markdown, write
from kvkeep.lab.rows import capture_rows
from kvkeep.tasks.text import Message, digest_of
from kvkeep.testing import fake_model

WORDS = ["harbour", "ferry", "cold", "nine", "sharp", "nobody", "knows", "why", "letter", "bread", "window", "seven"]


def documents(count, words=60):
    generator = np.random.default_rng(0)
    return [Message(f"doc{index}", " ".join(generator.choice(WORDS, size=words))) for index in range(count)]


def settings_of(texts, **changes):
    base = CeilingSettings(
        model="tiny",
        model_sha256="0",
        documents=tuple(text.name for text in texts),
        digest=digest_of(texts),
        length=128,
        rows=24,
        seed=0,
        dtype="float32",
        version="0",
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def tiny():
    return fake_model()


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    texts = documents(3)
    folder = tmp_path_factory.mktemp("run")
    return texts, folder, measure_ceiling(*tiny, texts, settings_of(texts), folder)


def test_rows_are_spread_over_documents_and_cells(run):
    texts, _, records = run
    assert len(records) == 24
    for text in texts:
        places = [(r["layer"], r["head"]) for r in records if r["document"] == text.name]
        assert len(places) == len(set(places)) == 8  # one of each of 2 layers x 4 heads
    assert all(64 <= record["position"] < 128 and record["keys"] == record["position"] + 1 for record in records)
    assert all([one["entries"] for one in record["measures"]] == [4, 8, 16, 32] for record in records)


def test_a_killed_run_goes_on_and_ends_alike(run, tiny, tmp_path, monkeypatch):
    texts, _, undisturbed = run

    def killed(done, total, what):
        if done == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_ceiling(*tiny, texts, settings_of(texts), tmp_path, killed)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 11
    asked = []

    def counting(model, tokens, places):
        asked.extend(places)
        return capture_rows(model, tokens, places)

    monkeypatch.setattr(ceiling, "capture_rows", counting)
    resumed = measure_ceiling(*tiny, texts, settings_of(texts), tmp_path)
    assert len(asked) == 13
    assert [r["key"] for r in resumed] == [r["key"] for r in undisturbed]
    for ours, theirs in zip(resumed, undisturbed, strict=True):
        for one, other in zip(ours["measures"], theirs["measures"], strict=True):
            assert one == pytest.approx(other, rel=1e-4)


def test_the_table_is_that_of_the_rows(run):
    records = run[2]
    table = summarise(records, resamples=50)
    assert (table.rows, table.documents, table.cells) == (24, 3, 8)
    found = {(line.metric, line.entries): line.measured for line in table.lines}
    dropped = [one["dropped_mass"] for record in records for one in record["measures"] if one["entries"] == 8]
    assert found["dropped_mass", 8].value == pytest.approx(np.median(dropped))
    share = [
        1 - one["best_error"] / one["top_error"]
        for record in records
        for one in record["measures"]
        if one["entries"] == 16
    ]
    assert found["closable_share", 16].value == pytest.approx(np.median(share))
    assert found["kappa", 16].value == pytest.approx(1 / (1 - np.median(share)), rel=1e-2)
    assert found["penalty", 32].value >= 1
    assert found["beyond", 16].value == pytest.approx(np.mean(np.array(share) > 1 - 1 / 1.11))
    errors = [(one["imbalance"], one["best_error"], one["top_error"]) for r in records for one in r["measures"]]
    mine = errors[2::4]  # s = 16
    assert found["optimal", 16].value == pytest.approx(np.mean([best == top for _, best, top in mine]))
    assert found["imbalance", 16].value == pytest.approx(spearmanr([e[0] for e in mine], [e[1] for e in mine])[0])
    assert found["dropped_mass", 8].note.startswith("fewer than 10 documents")
    assert 0 <= table.flat_cells <= 8


def test_the_report_marks_what_is_published(run, tmp_path):
    pytest.importorskip("vl_convert")
    texts, _, records = run
    table, settings = summarise(records, resamples=20), dataclasses.asdict(settings_of(texts))
    paths = write(tmp_path, table, settings, records)
    assert sorted(path.name for path in paths) == ["ceiling.json", "ceiling.md", "ceiling.svg", "dropped_mass.svg"]
    record = json.loads((tmp_path / "ceiling.json").read_text())
    assert record == json.loads(json.dumps(ceiling_dict(table, settings)))
    line = next(line for line in record["lines"] if (line["metric"], line["entries"]) == ("penalty", 16))
    assert line["published"] == 1.39
    assert "arXiv 2608.25230" in record["published_source"]
    text = markdown(table, settings)
    assert "published*" in text
    assert "not measured here: ContourKV" in text
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 1 + 10 * 4
    for name in ("ceiling.svg", "dropped_mass.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")


def test_documents_must_be_long_enough(tiny):
    tokenizer = tiny[1]
    texts = [Message("short", "a" * 100), *(Message(f"long{i}", "a" * 300) for i in range(5))]
    assert [text.name for text in choose_documents(texts, tokenizer, 200, None)] == [f"long{i}" for i in range(5)]
    assert [text.name for text in choose_documents(texts, tokenizer, 200, 3)] == ["long0", "long2", "long4"]
    with pytest.raises(CeilingError, match="a document of at least 400 tokens; received 6 documents of up to 300"):
        choose_documents(texts, tokenizer, 400, 3)
    with pytest.raises(CeilingError, match="at least 128 tokens"):
        choose_documents(texts, tokenizer, 60, 3)


def test_places_hang_on_the_document_not_on_its_neighbours(tiny):
    one, two = documents(2)
    both = places_by_document(tiny[0], [one, two], 128, 16, 7)
    assert both[0] != both[1]
    assert places_by_document(tiny[0], [two, one], 128, 16, 7) == both[::-1]


def test_other_documents_than_those_of_the_settings_are_refused(tiny, tmp_path):
    texts = documents(2)
    with pytest.raises(CeilingError, match="the documents of the settings"):
        measure_ceiling(*tiny, texts[::-1], settings_of(texts), tmp_path)
