"""Programs after `--policy`: they run like every policy, rows name them, and a refusal is one object."""

from __future__ import annotations

import json

import pytest

from kvkeep.evolve.program import seed_program

BUDGET = ("--compression-ratio", 0.75)


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(seed_program("v1-generic").source, encoding="utf-8")
    return path


@pytest.fixture
def run(kvkeep, folder, context):
    def call(policy, *words):
        making = ("--model", folder, "--context", context, "--policy", policy, *BUDGET, "--max-new-tokens", 2)
        return kvkeep("run", *making, "--question", "When?", *words)

    return call


def test_run_names_the_program_by_its_digest(run, program):
    record = run(f"program:{program}", "--json").json
    assert record["policy"] == f"program:{program}@{seed_program('v1-generic').digest[:12]}"
    tokens = record["prompt_tokens"]
    assert record["cache"]["entries"] - record["cache"]["uncut_entries"] == 4 * (tokens // 4)
    assert run(record["policy"], "--json").json["answers"] == record["answers"]


def test_rows_of_bench_carry_the_digest(kvkeep, folder, tmp_path, program):
    usual = ("--length", 2048, "--samples", 1, "--max-new-tokens", 3, "--out", tmp_path / "out", *BUDGET)
    policies = ("--policy", f"program:{program}", "--policy", "program:frc", "--policy", "frc")
    ran = kvkeep("bench", "key_value", "--model", folder, *usual, *policies)
    assert ran.status == 0, ran.err
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    digests = {name: seed_program(name).short_digest for name in ("v1-generic", "frc")}
    seed = f"program:frc@{digests['frc']}"
    assert {row["policy"] for row in rows} == {"full", "frc", f"program:{program}@{digests['v1-generic']}", seed}
    alike = {
        policy: [(row["prediction"], row["entries_per_cell"]) for row in rows if row["policy"] == policy]
        for policy in ("frc", seed)
    }
    assert alike["frc"] == alike[seed]


def changed(program, old, new):
    text = program.read_text(encoding="utf-8")
    assert old in text
    program.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[: context.K]", "[: context.K + 1]", "count"),
        ("[: context.K]", "", "count"),
        ("0.4 * attention", "attention / 0", "nonfinite"),
        ("0.4 * attention", "open('scores')", "name"),
    ],
)
def test_a_refusal_is_one_object(run, program, old, new, reason):
    changed(program, old, new)
    ran = run(f"program:{program}", "--json")
    assert ran.status == 2
    assert {"error": "policy_refused", "reason": reason}.items() <= ran.json.items()
    assert {"expected", "received", "remedy"} <= set(ran.json)
    told = run(f"program:{program}")
    assert told.status == 2
    assert "expected" in told.err


def test_what_is_no_program_is_told(run, tmp_path):
    ran = run(f"program:{tmp_path / 'absent.py'}", "--json")
    assert (ran.status, ran.json["error"]) == (2, "ProgramError")
