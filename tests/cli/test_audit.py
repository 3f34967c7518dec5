from __future__ import annotations

import json
import random

import pytest

from .conftest import check_text


@pytest.fixture(scope="session")
def haystack(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    draw = random.Random(0)
    words = [f"{a}{b}" for a in ("bar", "fin", "lor", "mest", "tun") for b in ("al", "ed", "ish", "or")]
    sentences = (" ".join(draw.choices(words, k=draw.randint(4, 9))).capitalize() + "." for _ in range(300))
    path.write_text(" ".join(sentences), encoding="utf-8")
    return path


@pytest.fixture
def audit(kvkeep, folder, haystack, tmp_path):
    usual = ("--length", 700, "--samples", 1, "--max-new-tokens", 3, "--haystack", haystack)

    def call(*words, policy="snapkv+ada"):
        out = tmp_path / "out"
        return kvkeep("audit", "--model", folder, "--out", out, "--policy", policy, *usual, *words)

    return call


def test_tables_rows_and_json(audit, tmp_path):
    ran = audit("--policy", "knorm+threshold")
    check_text(ran)
    for words in (
        "not-enforced",
        "capped",
        "ragged",
        "masked",
        "Question hidden",
        "rows of the document",
        "answers in",
        "ragged - not-enforced",
        "visible - document",
        "note: no interval: one context",
    ):
        assert words in ran.out
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    record = audit("--policy", "knorm+threshold", "--json").json
    assert record["rows"] == len(rows) == 4 * (1 + 2 * 4) + 2
    assert {s["storage"] for s in record["stored"]} == {"not-enforced", "capped", "ragged", "masked"}
    assert {w["policy"] for w in record["weights"]} == {"adasnapkv", "knorm+threshold"}
    assert record["masking"]["compared"] == 2 * 4


def test_other_tasks(audit):
    record = audit("--task", "niah", "--json").json
    assert record["weights"] == []  # no text by itself
    assert {s["kl_text"] for s in record["stored"]} == {None}
    assert {c["name"] for c in record["contrasts"]} == {"enforcement", "cap", "visibility", "ranking"}


@pytest.mark.parametrize(
    ("words", "policy", "said"),
    [
        (("--task", "niahh"), "snapkv", "did you mean 'niah'"),
        ((), "snapvk", "did you mean 'snapkv'"),
        ((), "full", "at least one policy that evicts"),
        (("--compression-ratio", 1.5), "snapkv", "below 1"),
        (("--compression-ratio", 0), "snapkv", "above 0"),
    ],
)
def test_what_cannot_be_audited_is_refused_before_it_begins(audit, words, policy, said, tmp_path):
    ran = audit(*words, "--json", policy=policy)
    assert ran.status == 2
    assert said in ran.out
    assert not (tmp_path / "out").exists()


def test_help_fits(kvkeep):
    check_text(kvkeep("audit", "--help"))
