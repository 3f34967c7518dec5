from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from kvkeep.cli import demo as command
from kvkeep.data import load_demo
from kvkeep.demo import MAX_NEW_TOKENS, POLICIES, QUESTIONS, RATIOS, run_demo, spread, steps
from kvkeep.testing import fake_model

from .conftest import check_text

ROW_KEYS = {
    "policy",
    "compression_ratio",
    "prompt_tokens",
    "right",
    "questions",
    "entries",
    "held_bytes",
    "fraction",
    "peak_bytes",
    "prefill_s",
    "decode_tokens_per_s",
    "kl",
    "answers",
    "notes",
}


@pytest.fixture
def short(monkeypatch):
    """The demo with a short text: the tiny model's tokens are bytes."""
    document = load_demo()
    document = dataclasses.replace(document, text=document.text[:600])
    monkeypatch.setattr("kvkeep.data.load_demo", lambda: document)
    return document


def test_the_defaults_are_what_the_demo_promises():
    assert len(POLICIES) >= 6
    assert RATIOS == (0.5, 0.75)
    assert QUESTIONS >= 8
    defaults = {name: parameter.default for name, parameter in inspect.signature(command.demo).parameters.items()}
    assert (defaults["questions"], defaults["max_new_tokens"]) == (QUESTIONS, MAX_NEW_TOKENS)


def test_questions_are_spread_over_the_document():
    questions = load_demo().questions
    chosen = spread(questions, 8)
    assert len(chosen) == len({question.question for question in chosen}) == 8
    assert (chosen[0], chosen[-1]) == (questions[0], questions[-1])
    assert [question.depth for question in chosen] == sorted(question.depth for question in chosen)
    assert spread(questions, 99) == list(questions)
    assert spread(questions, 1) == [questions[0]]


def test_rows_begin_with_the_full_cache_and_count_every_step(short):
    model, tokenizer = fake_model()
    told = []
    rows = list(run_demo(model, tokenizer, short, ["knorm", "snapkv"], [0.5, 0.0], questions=2, on_step=told.append))
    assert [(row.policy, row.compression_ratio) for row in rows] == [
        ("full", 0.0),
        ("knorm", 0.5),
        ("knorm", 0.0),
        ("snapkv", 0.5),
        ("snapkv", 0.0),
    ]
    assert len(told) == steps(2, ["knorm", "snapkv"], [0.5, 0.0])
    full = rows[0]
    assert full.kl == 0
    for row in rows[1:]:
        assert row.entries == 4 * int(full.prompt_tokens * (1 - row.compression_ratio))
        assert row.peak_bytes > row.held_bytes
        # Nothing removed is no difference; something removed is one.
        assert row.kl == pytest.approx(0, abs=1e-5) if row.compression_ratio == 0 else row.kl > 1e-3
        assert row.compression_ratio or row.answers == full.answers


def test_right_answers_are_counted(short):
    model, tokenizer = fake_model()
    question = short.questions[0]
    [row] = run_demo(model, tokenizer, short, [], questions=1)
    said = dataclasses.replace(question, answers=("nowhere", row.answers[0].strip().upper()[:3]))
    [again] = run_demo(model, tokenizer, dataclasses.replace(short, questions=(said,)), [])
    assert (row.right, again.right) == (0, 1)


def test_the_command_prints_one_table_of_80_columns(kvkeep, folder, short, tmp_path):
    file = tmp_path / "demo.json"
    words = ("--policy", "expected-attention", "--policy", "knorm", "--compression-ratio", 0.5)
    ran = kvkeep("demo", "--model", folder, *words, "--questions", 2, "--max-new-tokens", 3, "--out", file)
    check_text(ran)
    lines = ran.out.splitlines()
    for start in ("policy ", "full  ", "expected-attention ", "knorm "):
        assert sum(line.startswith(start) for line in lines) == 1
    for heading in ("ratio", "right", "entries", "held", "of", "peak", "prefill", "tok/s", "KL"):
        assert heading in ran.out
    record = json.loads(file.read_text(encoding="utf-8"))
    assert [row["policy"] for row in record["rows"]] == ["full", "expected-attention", "knorm"]
    assert all(set(row) == ROW_KEYS for row in record["rows"])
    assert len(record["questions"]) == 2


def test_json(kvkeep, folder, short):
    words = ("--policy", "knorm", "--compression-ratio", 0.5, "--questions", 1, "--max-new-tokens", 2, "--json")
    record = kvkeep("demo", "--model", folder, *words).json
    assert {"schema_version", "model", "model_sha256", "protocol", "document", "questions", "rows"} <= set(record)


def test_an_unknown_policy_is_refused_before_the_work(kvkeep):
    ran = kvkeep("demo", "--model", "no-such-model", "--policy", "snapk", "--json")
    assert (ran.status, ran.json["error"]) == (2, "PolicyError")
