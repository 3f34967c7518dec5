"""What can be refused without a model is refused before one is loaded, or fetched."""

from __future__ import annotations

import json

import pytest

from kvkeep.cli import main


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["run", "--question", "Why?", "--policy", "snapkv"], "BudgetError"),
        (["run", "--question", "Why?", "--policy", "snapkv", "--compression-ratio", "1.5"], "BudgetError"),
        (["run", "--question", "Why?", "--policy", "snapkv", "--entries", "3", "--bytes", "1MiB"], "BudgetError"),
        (["run", "--question", "Why?", "--policy", "snapvk", "--entries", "3"], "PolicyError"),
        (
            ["run", "--question", "Why?", "--policy", "online-h2o", "--entries", "9", "--rerotate-keys"],
            "CacheStateError",
        ),
        (["demo", "--compression-ratio", "0.5", "--compression-ratio", "1.5"], "BudgetError"),
        (["demo", "--policy", "snapkv+adda"], "PolicyError"),
    ],
)
def test_refused_before_a_model_is_loaded(words, error, monkeypatch, tmp_path, capsys):
    def never(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvkeep.cli.loading.load", never)
    context = tmp_path / "text.txt"
    context.write_text("Some words.")
    extra = ["--context", str(context)] if words[0] == "run" else []
    assert main([words[0], "--model", "some-model", *words[1:], *extra, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == error


@pytest.mark.parametrize("words", [["--policy", "snapkv"], ["--policy", "snapvk", "--entries", "3"]])
def test_show_refuses_before_a_model_is_loaded(words, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("kvkeep.cli.loading.load", lambda *a, **k: pytest.fail("a model was loaded"))
    context = tmp_path / "text.txt"
    context.write_text("Some words.")
    assert main(["show", "--model", "some-model", "--context", str(context), *words]) == 2
    assert "expected" in capsys.readouterr().err
