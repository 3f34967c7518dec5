"""`kvkeep calibrate`: a file for each model, which policies then find."""

from __future__ import annotations

import pytest

from .conftest import TEXT, check_text


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    for number in range(3):
        (path / f"{number}.txt").write_text(f"{number} " + TEXT * 2, encoding="utf-8")
    return path


def test_a_policy_wants_the_command_and_finds_its_file(kvkeep, folder, context, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    question = ("--context", context, "--question", "When?", "--compression-ratio", "0.5", "--max-new-tokens", "2")
    refused = kvkeep("run", "--model", folder, "--policy", "qfilter", *question)
    assert refused.status == 2
    assert "kvkeep calibrate --model" in refused.err.replace("\n", " ")
    ran = kvkeep("calibrate", "--model", folder, "--text", texts, "--length", "64", "--texts", "4")
    check_text_but_paths(ran)
    assert "4 texts of 64 tokens of texts: 240 queries of each head, 2 layers" in ran.out
    for policy in ("qfilter", "duo", "expected-attention[statistics=model]"):
        assert kvkeep("run", "--model", folder, "--policy", policy, *question).status == 0


def check_text_but_paths(ran):
    assert ran.status == 0, ran.err
    assert "\x1b" not in ran.out + ran.err


def test_another_file(kvkeep, folder, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    out = tmp_path / "mine.safetensors"
    record = kvkeep(
        "calibrate", "--model", folder, "--text", texts, "--length", "64", "--texts", "2", "--out", out, "--json"
    ).json
    assert record["file"] == str(out)
    assert out.is_file()
    assert (record["texts"], record["queries"], record["layers"], record["corpus"]) == (2, 120, [0, 1], "texts")
    assert not (tmp_path / "home").exists()
    plain = kvkeep("calibrate", "--model", folder, "--text", texts, "--length", "64", "--texts", "1", "--out", out)
    assert f"--policy qfilter[statistics={out}]" in plain.out


def test_what_cannot_be_is_refused_early(kvkeep, folder, context, tmp_path):
    nowhere = kvkeep("calibrate", "--model", "no/such", "--text", context, "--out", tmp_path / "none" / "x")
    assert nowhere.status == 2
    assert "--out" in nowhere.err
    short = kvkeep("calibrate", "--model", folder, "--text", context, "--length", "4000")
    assert short.status == 2
    assert "a text of at least 4000 tokens" in short.err


def test_help(kvkeep):
    check_text(kvkeep("calibrate", "--help"))
