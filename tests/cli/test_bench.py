from __future__ import annotations

import json

import pytest

from .conftest import check_text


@pytest.fixture
def bench(kvkeep, folder, tmp_path):
    def call(*words, family="key_value", out=tmp_path / "out"):
        usual = ("--length", 2048, "--samples", 1, "--policy", "snapkv", "--compression-ratio", 0.5)
        return kvkeep("bench", family, "--model", folder, "--out", out, *usual, "--max-new-tokens", 3, *words)

    return call


def test_rows_means_and_a_page(bench, kvkeep, tmp_path):
    ran = bench("--policy", "knorm", "--protocol", "query-agnostic", "--protocol", "query-aware")
    check_text(ran)
    assert "query" not in ran.out.splitlines()[1]  # the column says which protocol, not that it is one
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert {(row["policy"], row["protocol"]) for row in rows} == {
        (policy, protocol) for policy in ("full", "snapkv", "knorm") for protocol in ("query-agnostic", "query-aware")
    }
    again = bench("--policy", "knorm", "--protocol", "query-agnostic", "--protocol", "query-aware", "--json").json
    assert again["rows"] == len(rows)
    assert {mean["policy"] for mean in again["means"]} == {"full", "snapkv", "knorm"}
    pytest.importorskip("vl_convert")
    page = kvkeep("report", tmp_path / "out")
    assert page.status == 0, page.err
    assert (tmp_path / "out" / "index.html").stat().st_size > 10_000
    assert (tmp_path / "out" / "table.md").exists()


def test_a_published_set_from_a_file(bench, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {
        "context": "The door is red. " * 20,
        "question": "What colour is the door?",
        "answer_prefix": "It is",
        "answer": ["red"],
        "task": "niah_single_1",
        "max_new_tokens": 4,
    }
    path.write_text("".join(json.dumps(row | {"context": row["context"] + str(i)}) + "\n" for i in range(3)))
    ran = bench("--data", path, "--json", family="published")
    assert ran.status == 0, ran.err
    assert ran.json["rows"] == 2


def test_problems_with_several_answers_each(bench):
    drawn = ("--temperature", 0.6, "--top-p", 0.95, "--top-k", 20, "--rollouts", 2)
    ran = bench("--task", "small", *drawn, "--json", family="reasoning")
    assert ran.status == 0, ran.err
    assert ran.json["rows"] == 4
    assert all(mean["pass_at_1"] == mean["score"] in (0, 0.5, 1) for mean in ran.json["means"])
    table = bench("--task", "small", *drawn, family="reasoning")
    assert "pass@1" in table.out
    check_text(table)


def test_a_limit_on_memory(bench, tmp_path):
    usual = bench("--json").json
    short = bench("--json", "--memory-limit", "3MiB", out=tmp_path / "short").json
    assert short["means"] == usual["means"]
    none = bench("--json", "--memory-limit", "10kB", out=tmp_path / "none")
    assert none.status == 2
    assert "a memory limit of at least" in none.out


@pytest.mark.parametrize(
    ("words", "family", "said"),
    [
        (("--task", "vtt"), "ruler", "did you mean"),
        ((), "rular", "did you mean"),
        ((), "published", "--data for published sets"),
        (("--wording", "compat"), "key_value", "options that a task of key_value knows"),
        (("--policy", "snapvk"), "key_value", "did you mean 'snapkv'"),
        (("--compression-ratio", 1.5), "key_value", "0 <= ratio < 1"),
        (("--executor", "slurm"), "key_value", "slurm"),
        (("--memory-limit", "8 elephants"), "key_value", "bytes such as 64MiB"),
        (("--rollouts", 2), "key_value", "--temperature beside"),
        (("--temperature", 0.6, "--top-p", 7), "key_value", "top_p with 0 < p <= 1"),
        ((), "reasoning", "--task small comes along"),
        (("--task", "aime52"), "reasoning", "did you mean 'aime25'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_begins(bench, words, family, said, tmp_path):
    ran = bench(*words, "--json", family=family, out=tmp_path / "none")
    assert ran.status == 2
    assert said in ran.out
    assert not (tmp_path / "none").exists()


def test_a_policy_without_a_budget_is_refused(kvkeep, folder, tmp_path):
    ran = kvkeep("bench", "key_value", "--model", folder, "--out", tmp_path / "x", "--policy", "snapkv")
    assert ran.status == 2
    assert "a budget for it" in ran.err
    page = kvkeep("report", tmp_path / "nothing")
    assert page.status == 2
