"""`kvkeep run` under an online policy."""

from __future__ import annotations

import json

import pytest

from .conftest import check_text

CAP, CELLS = 48, 4  # of the tiny model: two layers, two KV heads


@pytest.fixture
def run(kvkeep, folder, context):
    def call(*words, policy="online-h2o", budget=("--entries", CAP)):
        making = ("--context", context, "--policy", policy, *budget)
        return kvkeep("run", "--model", folder, *making, "--question", "When?", "--max-new-tokens", 6, *words)

    return call


def test_a_run_holds_the_cap(run):
    check_text(run())
    record = run("--chunk-tokens", 20, "--json").json
    assert record["policy"] == "online-h2o"
    assert record["budget"] == {"entries": CAP}
    assert record["prompt_tokens"] > 2 * CAP
    assert record["cache"]["entries"] == CAP * CELLS
    assert record["cache"]["uncut_entries"] == 0
    assert record["answers"][0]["new_tokens"] == 6
    assert record["timings"]["evict_s"] > 0


def test_a_cache_goes_through_a_file(run, kvkeep, folder, tmp_path):
    first = run("--save-cache", tmp_path / "cache.safetensors", "--json").json
    words = ("--question", "When?", "--max-new-tokens", 6, "--json")
    again = kvkeep("run", "--model", folder, "--load-cache", tmp_path / "cache.safetensors", *words).json
    assert again["answers"] == first["answers"]
    assert again["cache"]["entries"] == first["cache"]["entries"]


def test_the_seed_is_that_of_a_policy_that_draws(run):
    assert run("--seed", 3, "--json", policy="online-random").json["policy"] == "online-random[seed=3]"
    assert run("--seed", 3, "--json", policy="online-random[seed=5]").json["policy"] == "online-random[seed=5]"


@pytest.mark.parametrize(
    ("words", "budget", "said"),
    [
        ((), ("--compression-ratio", 0.5), "a cap at every step"),
        ((), ("--entries", 1), "at least one entry"),
        (("--protocol", "query-aware"), ("--entries", CAP), "without its question"),
    ],
)
def test_what_makes_no_sense_is_refused(run, words, budget, said):
    ran = run(*words, "--json", budget=budget)
    assert ran.status == 2
    assert said in json.loads(ran.out)["expected"]


def test_commands_for_cuts_refuse_a_cap(kvkeep, folder):
    for words in (("plan", "--context-length", 100), ("plan", "--context-length", 100, "--json")):
        ran = kvkeep(*words, "--model", folder, "--policy", "online-tova", "--entries", 20)
        assert ran.status == 2
        assert "a cap at every step" in " ".join((ran.out + ran.err).split())
