"""The command line with the embedded model: what a first user sees."""

import json
import os
import subprocess
import sys

import pytest

from kvkeep.data import load_demo

pytestmark = pytest.mark.real


def kvkeep(*words):
    """The output of a command in a process of its own, 80 columns wide."""
    command = [sys.executable, "-m", "kvkeep", *map(str, words)]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_answers_from_the_full_cache_and_counts_the_small_one(tmp_path):
    file = tmp_path / "demo.json"
    words = ("--policy", "streaming-llm", "--compression-ratio", 0.75, "--questions", 2, "--out", file)
    table = kvkeep("demo", *words)
    assert max(map(len, table.splitlines())) <= 80
    full, small = json.loads(file.read_text())["rows"]
    assert 1800 < full["prompt_tokens"] < 2200
    assert full["right"] == full["questions"] == 2
    assert full["kl"] == 0 < small["kl"]
    assert 0.25 < small["fraction"] < 0.26
    assert small["entries"] == 90 * int(full["prompt_tokens"] * 0.25)
    # All layers cut but the last, that one dense, and what stays of it.
    layer = full["prompt_tokens"] * (3 * 2 * 64 * 4 + 4)
    assert small["peak_bytes"] == small["held_bytes"] + layer


def test_a_saved_cache_answers_in_another_process_as_it_did(tmp_path):
    text, cache = tmp_path / "text.txt", tmp_path / "cut.safetensors"
    text.write_text(load_demo().text[:3000], encoding="utf-8")
    question = ("--question", load_demo().questions[0].question, "--max-new-tokens", 12, "--json")
    making = ("--context", text, "--policy", "keydiff", "--compression-ratio", 0.5, "--save-cache", cache)
    made = json.loads(kvkeep("run", "--model", "smollm2-135m", *making, *question))
    loaded = json.loads(kvkeep("run", "--model", "smollm2-135m", "--load-cache", cache, *question))
    assert loaded["answers"] == made["answers"]
    assert loaded["cache"] == made["cache"]
    assert cache.stat().st_size < made["cache"]["held_bytes"] * 1.1
