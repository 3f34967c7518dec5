from __future__ import annotations

import pytest
import torch

from kvkeep import Budget, KeepCache, parse_policy
from kvkeep.errors import BudgetError
from kvkeep.hf.planning import plan_cache
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

from .conftest import check_text

COUNTS = ("entries", "entries_full", "payload_bytes", "metadata_bytes", "held_bytes", "window_bytes", "full_bytes")


def ledger_of(model, policy, length, **budget):
    """What a real run counts."""
    cache = KeepCache(model, policy, **budget)
    ids = torch.randint(3, 200, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE_ARGUMENT: cache})
    return cache.ledger.to_dict()


@pytest.mark.parametrize("budget", [{"compression_ratio": 0.75}, {"entries": 7}, {"bytes": 60_000}], ids=str)
@pytest.mark.parametrize("policy", ["snapkv", "knorm", "pyramidkv", "adasnapkv"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [5, 101])
def test_a_plan_is_the_ledger_of_a_run(architecture, policy, budget, length):
    model, _ = fake_model(architecture, layers=4)
    planned = plan_cache(model, parse_policy(policy), Budget(**budget), length)
    counted = ledger_of(model, policy, length, **budget)
    assert planned.held_is_exact
    assert planned.peak_is_exact
    assert {name: getattr(planned, name) for name in COUNTS} == {name: counted[name] for name in COUNTS}
    assert planned.peak_bytes == counted["peak_bytes"]
    assert planned.fraction == counted["fraction"]


@pytest.mark.parametrize("policy", ["chunkkv", "snapkv+threshold", "frc"])
def test_elsewhere_a_plan_is_an_upper_bound_and_says_so(policy):
    model, _ = fake_model(layers=4)
    planned = plan_cache(model, parse_policy(policy), Budget(compression_ratio=0.6), 101)
    counted = ledger_of(model, policy, 101, compression_ratio=0.6)
    assert not planned.peak_is_exact
    assert counted["held_bytes"] <= planned.held_bytes
    assert counted["peak_bytes"] <= planned.peak_bytes


def test_policies_that_wait_for_all_layers_still_hold_exactly_their_budget():
    model, _ = fake_model(layers=4)
    planned = plan_cache(model, parse_policy("snapkv+threshold"), Budget(compression_ratio=0.6), 101)
    assert planned.held_is_exact
    assert planned.held_bytes == ledger_of(model, "snapkv+threshold", 101, compression_ratio=0.6)["held_bytes"]


def test_full_needs_a_budget_for_all():
    model, _ = fake_model()
    assert plan_cache(model, parse_policy("full"), Budget(compression_ratio=0), 50).entries == 4 * 50
    with pytest.raises(BudgetError, match="50 entries per cell"):
        plan_cache(model, parse_policy("full"), Budget(entries=20), 50)


def test_the_command_agrees_with_a_run_of_the_same_folder(kvkeep, folder, context):
    budget = ("--policy", "snapkv", "--compression-ratio", 0.75)
    ran = kvkeep("run", "--model", folder, "--context", context, *budget, "--question", "x", "--json").json
    planned = kvkeep("plan", "--model", folder, "--context-length", ran["prompt_tokens"], *budget, "--json").json
    for name in (*COUNTS, "peak_bytes", "fraction"):
        assert planned[name] == ran["cache"][name], name
    assert {"schema_version", "model", "policy", "budget", "dtype", "context_length", "notes"} <= set(planned)


def test_text_fits_and_says_what_is_not_exact(kvkeep, folder, gemma_folder):
    words = ("--context-length", 32768, "--compression-ratio", 0.75, "--dtype", "bfloat16")
    ran = kvkeep("plan", "--model", folder, *words)
    check_text(ran)
    assert "at most" not in ran.out
    assert "positions up to 4,096" in ran.err.replace("\n", " ")
    windows = kvkeep("plan", "--model", gemma_folder, *words, "--policy", "chunkkv")
    check_text(windows)
    assert "windows" in windows.out
    assert "at most" in windows.out


def test_no_weights_are_needed(kvkeep, folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    words = ("--context-length", 64, "--entries", 8, "--json")
    alone = kvkeep("plan", "--model", tmp_path, *words).json
    assert alone | {"model": None} == kvkeep("plan", "--model", folder, *words).json | {"model": None}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "smollm2", "--context-length", 9, "--entries", 3), "did you mean 'smollm2-135m'"),
        (("--model", "smollm2-135m", "--context-length", 9, "--entries", 3), "kvkeep models fetch smollm2-135m"),
        (("--model", "FOLDER", "--context-length", 9), "exactly one of"),
        (("--model", "FOLDER", "--context-length", 9, "--bytes", "10"), "one entry per cell"),
        (("--model", "FOLDER", "--context-length", 9, "--entries", 3, "--dtype", "float31"), "float32"),
        (("--model", "EMPTY", "--context-length", 9, "--entries", 3), "configuration"),
    ],
)
def test_errors(kvkeep, folder, tmp_path, monkeypatch, words, said):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    named = {"FOLDER": folder, "EMPTY": tmp_path}
    ran = kvkeep("plan", *(named.get(word, word) for word in words))
    assert ran.status == 2
    assert said in " ".join(ran.err.split())
