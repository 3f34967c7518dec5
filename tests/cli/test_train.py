"""`kvkeep train kvpop`: a folder that is a policy, which goes on where it stood."""

from __future__ import annotations

import pytest

from kvkeep.cli.train import own_device

from .conftest import TEXT, check_text


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    for number in range(4):
        (path / f"{number}.txt").write_text(f"{number} " + TEXT * 2, encoding="utf-8")
    return path


def test_a_folder_becomes_a_policy(kvkeep, folder, context, texts, tmp_path):
    out = tmp_path / "scorer"
    words = ("train", "kvpop", "--model", folder, "--text", texts, "--length", "64", "--entries", "24", "--out", out)
    words += ("--window", "4", "--width", "2", "--pairs", "8", "--heldout", "1", "--evaluate-every", "2")
    ran = kvkeep(*words, "--sequences", "3")
    assert ran.status == 0, ran.err
    assert "note: " in ran.err
    assert "parameters; beside the model" in ran.err
    assert "step 2/3" in ran.err
    assert f"--policy kvpop:{out}" in ran.out
    assert "recall" in ran.out
    assert "<svg" in (out / "index.html").read_text(encoding="utf-8")
    again = kvkeep(*words, "--sequences", "3", "--json").json
    assert again["policy"] == f"kvpop:{out}"
    assert again["step"] == 3
    assert again["settings"]["config"]["budget"] == 24
    other = kvkeep(*words, "--sequences", "4")
    assert other.status == 2
    assert "sequences" in other.err
    question = ("--context", context, "--question", "When?", "--max-new-tokens", "2")
    answered = kvkeep("run", "--model", folder, "--policy", f"kvpop:{out}", "--entries", "24", *question)
    assert answered.status == 0, answered.err


def test_a_model_is_trained_with_its_scorer(kvkeep, folder, context, texts, tmp_path):
    out = tmp_path / "both"
    words = ("train", "kvpop", "--model", folder, "--text", texts, "--length", "64", "--entries", "24", "--out", out)
    words += ("--window", "4", "--width", "2", "--pairs", "8", "--heldout", "1", "--sequences", "2", "--finetune")
    ran = kvkeep(*words, "--model-rate", "0.001")
    assert ran.status == 0, ran.err
    for word in ("for the model as it was", "for the gradients of a sequence", "in all; about"):
        assert word in " ".join(ran.err.split())
    assert f"use it as --model {out / 'model'} --policy kvpop:{out}" in ran.out
    assert "with nothing evicted" in ran.out
    question = ("--entries", "24", "--context", context, "--question", "When?", "--max-new-tokens", "2")
    answered = kvkeep("run", "--model", out / "model", "--policy", f"kvpop:{out}", *question)
    assert answered.status == 0, answered.err
    refused = kvkeep("run", "--model", folder, "--policy", f"kvpop:{out}", *question)
    assert refused.status == 2
    control = kvkeep(*words[:11], tmp_path / "control", *words[12:], "--control", "streaming-llm", "--json").json
    assert control["policy"] == "online-streaming-llm"
    assert control["finetune"]["control"] == "streaming-llm"
    alone = kvkeep(*words[:-1], "--control", "dense")
    assert alone.status == 2
    assert "add --finetune" in " ".join(alone.err.split())


def test_each_process_of_a_launch_has_its_device(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [own_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]


def test_what_cannot_be_is_refused(kvkeep, folder, texts, context, tmp_path):
    words = ("train", "kvpop", "--model", folder, "--out", tmp_path / "out", "--entries", "24")
    one = kvkeep(*words, "--text", context)
    assert one.status == 2
    assert "two different documents" in one.err
    short = kvkeep(*words, "--text", texts, "--length", "5000", "--window", "4", "--width", "2")
    assert short.status == 2
    assert "5000 tokens" in short.err
    small = kvkeep(*words[:-1], "8", "--text", texts)
    assert small.status == 2
    assert "above sinks, window and state" in small.err.replace("\n", " ")


def test_a_model_without_a_scorer_says_what_to_do(kvkeep, folder, context):
    ran = kvkeep(
        "run", "--model", folder, "--policy", "kvpop", "--entries", "24", "--context", context, "--question", "When?"
    )
    assert ran.status == 2
    assert "kvkeep train kvpop" in " ".join(ran.err.split())


def test_help(kvkeep):
    check_text(kvkeep("train", "kvpop", "--help"))
    check_text(kvkeep("train", "--help"))


def test_policies_side_by_side(kvkeep, folder, texts, tmp_path):
    words = ("train", "evaluate", "--model", folder, "--text", texts, "--length", "64", "--entries", "24")
    words += ("--documents", "2", "--policy", "online-random", "--policy", "online-h2o", "--oracle")
    ran = kvkeep(*words, "--out", tmp_path / "out")
    assert ran.status == 0, ran.err
    for word in ("online-random: ", "online-h2o: ", "oracle: ", "KL less that of online-random", "held"):
        assert word in ran.out
    found = kvkeep(*words, "--out", tmp_path / "out", "--json").json
    assert len(found["rows"]) == 6
    assert [one["policy"] for one in found["policies"]] == ["online-random", "online-h2o", "oracle"]
    refused = kvkeep(*words, "--policy", "snapkv", "--out", tmp_path / "other")
    assert refused.status == 2
    assert "cuts where a text ends" in refused.err.replace("\n", " ")
