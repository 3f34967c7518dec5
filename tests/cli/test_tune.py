from __future__ import annotations

import pytest

from .conftest import check_text


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(" ".join(f"word{n} and thing{n * 7 % 13}." for n in range(1500)))
    return path


@pytest.fixture
def tune(kvkeep, folder, mine):
    usual = ("--samples", 10, "--policy", "knorm", "--policy", "streaming-llm")

    def call(*words, text=mine, length=300):
        return kvkeep("tune", "--model", folder, "--text", text, "--length", length, *usual, *words)

    return call


def test_the_smallest_cache_below_a_bound(tune, tmp_path):
    words = ("--compression-ratio", 0.5, "--compression-ratio", 0.1, "--out", tmp_path / "kept")
    found = tune(*words, "--max-kl", 10, "--json").json
    assert [choice["held_bytes"] for choice in found["choices"]] == sorted(c["held_bytes"] for c in found["choices"])
    assert len(found["choices"]) == 4
    assert found["best"] == found["choices"][0]
    assert all(choice["low"] <= choice["kl"] <= choice["high"] for choice in found["choices"])
    assert all(choice["texts"] == 10 for choice in found["choices"])
    bound = found["best"]["high"] * 0.99
    strict = tune(*words, "--max-kl", bound, "--json").json
    assert strict["best"] == next((c for c in found["choices"] if c["high"] <= bound), None) != found["best"]
    none = tune(*words, "--max-kl", 1e-12)
    check_text(none)
    assert "keep more, or allow more" in none.out
    best = tune(*words, "--max-kl", 10)
    check_text(best)
    assert "--compression-ratio 0.5" in best.out


def test_a_sample_that_is_too_small_to_tell_is_refused(tune, mine):
    ran = tune("--json", length=9000)
    assert ran.status == 2
    assert "at least 10 pieces" in ran.out
    assert tune("--max-kl", 0).status == 2
    assert tune(text=mine.with_name("none.txt")).status == 2
