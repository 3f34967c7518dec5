from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from .conftest import TEXT, check_text

KEYS = {
    "schema_version",
    "model",
    "model_sha256",
    "dtype",
    "policy",
    "budget",
    "protocol",
    "rerotate_keys",
    "prompt_tokens",
    "answers",
    "cache",
    "timings",
    "process_peak_bytes",
    "seed",
    "notes",
    "versions",
}
CACHE_KEYS = {
    "logical_length",
    "entries",
    "entries_full",
    "uncut_entries",
    "payload_bytes",
    "slack_bytes",
    "metadata_bytes",
    "state_bytes",
    "held_bytes",
    "window_bytes",
    "peak_bytes",
    "full_bytes",
    "fraction",
}
TIMING_KEYS = {"prefill_s", "evict_s", "time_to_first_token_s", "decode_tokens_per_s"}
CELLS = 4  # of the tiny model: two layers, two KV heads


@pytest.fixture
def run(kvkeep, folder, context):
    def call(*words, text=context, policy="snapkv", budget=("--compression-ratio", 0.75)):
        making = () if text is None else ("--context", text, "--policy", policy, *budget)
        return kvkeep("run", "--model", folder, *making, "--max-new-tokens", 6, *words)

    return call


def test_json_has_the_keys_that_it_promises(run):
    record = run("--question", "When?", "--question", "Why?", "--json").json
    assert set(record) == KEYS
    assert set(record["cache"]) == CACHE_KEYS
    assert set(record["timings"]) == TIMING_KEYS
    assert [set(answer) for answer in record["answers"]] == [{"question", "answer", "new_tokens"}] * 2
    assert [answer["question"] for answer in record["answers"]] == ["When?", "Why?"]
    assert set(record["versions"]) == {"kvkeep", "torch", "transformers", "python"}
    assert record["policy"] == "snapkv"
    assert record["budget"] == {"compression_ratio": 0.75}
    assert record["protocol"] == "query-agnostic"


def test_the_cache_is_counted_after_the_cut_and_before_the_questions(run):
    record = run("--question", "When?", "--json").json
    cache = record["cache"]
    length = record["prompt_tokens"]
    assert cache["logical_length"] == length
    assert cache["entries"] == CELLS * int(length * 0.25)
    assert cache["entries_full"] == CELLS * length
    assert cache["uncut_entries"] == cache["slack_bytes"] == cache["state_bytes"] == 0
    assert cache["held_bytes"] == cache["payload_bytes"] + cache["metadata_bytes"] < cache["peak_bytes"]
    assert cache["fraction"] == cache["held_bytes"] / cache["full_bytes"]
    assert record["timings"]["prefill_s"] >= record["timings"]["evict_s"] > 0
    assert record["process_peak_bytes"] > cache["peak_bytes"]


def test_a_question_does_not_see_the_one_before(run):
    together = run("--question", "When?", "--question", "Why?", "--json").json["answers"]
    alone = run("--question", "Why?", "--json").json["answers"]
    assert together[1] == alone[0]


@pytest.mark.parametrize(
    ("budget", "entries"),
    [(("--entries", 10), 10 * CELLS), (("--bytes", "10KiB"), None), (("--compression-ratio", 0.5), None)],
)
def test_each_kind_of_budget_holds(run, budget, entries):
    record = run("--question", "When?", "--json", budget=budget).json
    if entries is not None:
        assert record["cache"]["entries"] == entries
    if "--bytes" in budget:
        assert record["budget"] == {"bytes": 10 * 1024}
        assert record["cache"]["held_bytes"] <= 10 * 1024


def test_text_shows_answers_and_counts_in_80_columns(run):
    long = "Why does the harbour, which is cold, open at ten when the café is at nine, and nobody knows the reason? "
    ran = run("--question", long, "--compare-full")
    check_text(ran)
    for word in ("snapkv, compression_ratio=0.75, query-agnostic", "full cache", "Q Why", "A ", "entries kept", "peak"):
        assert word in ran.out


def test_the_text_may_come_from_stdin(run, monkeypatch):
    expected = run("--question", "When?", "--json").json
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert run("--question", "When?", "--json", text="-").json["answers"] == expected["answers"]


def test_compare_full_shows_what_the_full_cache_says(run):
    record = run("--question", "When?", "--compare-full", "--json").json
    assert set(record) == KEYS | {"full"}
    assert set(record["full"]) == {"answers", "cache", "timings"}
    assert record["full"]["cache"]["entries"] == record["full"]["cache"]["entries_full"]
    everything = run("--question", "When?", "--json", policy="full", budget=()).json
    assert record["full"]["answers"] == everything["answers"]


def test_query_aware_makes_one_cut_for_each_question_and_says_so(run):
    record = run("--question", "When?", "--question", "Why?", "--protocol", "query-aware", "--json").json
    assert record["protocol"] == "query-aware"
    assert [set(answer["cache"]) for answer in record["answers"]] == [CACHE_KEYS] * 2
    assert "processed 2 times" in record["notes"][-1]
    alone = run("--question", "Why?", "--protocol", "query-aware", "--json").json
    assert alone["answers"][0]["answer"] == record["answers"][1]["answer"]
    assert alone["notes"] == record["notes"][:-1]


def test_what_the_policy_had_to_change_is_said(run):
    ran = run("--question", "When?", budget=("--entries", 10))
    check_text(ran)
    assert "note: snapkv: 0 sinks and a window of 32 shrank" in ran.err.replace("\n", " ")


def test_the_seed_reaches_policies_that_draw(run):
    answers = {}
    for words in (("--seed", 0), ("--seed", 7)):
        record = run("--question", "When?", "--json", *words, policy="random").json
        answers[words] = record["policy"]
        assert record["seed"] == words[1]
    assert answers == {("--seed", 0): "random", ("--seed", 7): "random[seed=7]"}
    own = run("--question", "When?", "--json", "--seed", 7, policy="random[seed=3]").json
    assert own["policy"] == "random[seed=3]"


@pytest.mark.parametrize("protocol", ["query-agnostic", "query-aware"])
def test_a_saved_cache_gives_the_same_answers_in_another_process(run, folder, tmp_path, protocol):
    file = tmp_path / "cut.safetensors"
    made = run("--question", "When?", "--protocol", protocol, "--save-cache", file, "--json").json
    words = [*(("--question", "When?") if protocol == "query-agnostic" else ()), "--max-new-tokens", "6", "--json"]
    command = [sys.executable, "-m", "kvkeep", "run", "--model", str(folder), "--load-cache", str(file), *words]
    loaded = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert loaded["answers"] == [{k: v for k, v in a.items() if k != "cache"} for a in made["answers"]]
    for key in ("policy", "budget", "protocol", "prompt_tokens", "cache", "model_sha256"):
        assert loaded[key] == made[key], key
    assert loaded["timings"]["prefill_s"] == 0


def test_a_cache_may_be_saved_without_a_question(run, kvkeep, folder, tmp_path):
    file = tmp_path / "cut.safetensors"
    assert run("--save-cache", file, "--json").json["answers"] == []
    expected = run("--question", "Why?", "--json").json["answers"]
    ran = kvkeep("run", "--model", folder, "--load-cache", file, "--question", "Why?", "--max-new-tokens", 6, "--json")
    assert ran.json["answers"] == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--load-cache", "FILE", "--policy", "snapkv", "--question", "x"), "--policy"),
        (("--load-cache", "FILE", "--context", "TEXT", "--question", "x"), "--context"),
        (("--load-cache", "FILE", "--entries", 3, "--question", "x"), "--entries"),
        (("--load-cache", "FILE", "--protocol", "query-aware", "--question", "x"), "--protocol"),
        (("--load-cache", "FILE", "--compare-full", "--question", "x"), "--compare-full"),
        (("--load-cache", "FILE", "--seed", 1, "--question", "x"), "--seed"),
        (("--load-cache", "FILE", "--rerotate-keys", "--question", "x"), "--rerotate-keys"),
        (("--load-cache", "FILE"), "no --question"),
        (("--load-cache", "TEXT", "--question", "x"), "a whole file that KeepCache.save wrote"),
        (("--context", "TEXT", "--entries", 3, "--question", "x"), "no --policy"),
        (("--context", "TEXT", "--policy", "snapkv", "--question", "x"), "none of them"),
        (("--context", "TEXT", "--policy", "snapkv", "--entries", 3), "neither --question nor --save-cache"),
        (("--context", "gone.txt", "--policy", "snapkv", "--entries", 3, "--question", "x"), "No such file"),
        (("--context", "TEXT", "--policy", "snapk", "--entries", 3, "--question", "x"), "did you mean 'snapkv'"),
        (("--context", "TEXT", "--policy", "snapkv", "--bytes", "3 potatoes", "--question", "x"), "3 potatoes"),
        (("--context", "TEXT", "--policy", "snapkv", "--entries", 3, "--save-cache", "no/folder"), "no/folder"),
    ],
)
def test_errors_say_what_was_expected_received_and_what_to_do(run, kvkeep, folder, context, tmp_path, words, said):
    file = tmp_path / "cut.safetensors"
    if "FILE" in words:
        run("--save-cache", file)
    named = {"FILE": file, "TEXT": context}
    words = [named.get(word, word) for word in words]
    ran = kvkeep("run", "--model", folder, *words)
    assert ran.status == 2
    assert ran.out == ""
    plain = " ".join(ran.err.split())
    for label in ("expected", "received", "remedy"):
        assert label in plain
    assert said in plain
    assert "Traceback" not in ran.err
    as_json = kvkeep("run", "--model", folder, *words, "--json")
    assert as_json.status == 2
    assert set(as_json.json) == {"error", "expected", "received", "remedy"}
    assert as_json.err == ""


def test_a_query_aware_cache_answers_its_own_question_only(run, kvkeep, folder, tmp_path):
    file = tmp_path / "cut.safetensors"
    run("--question", "When?", "--protocol", "query-aware", "--save-cache", file)
    ran = kvkeep("run", "--model", folder, "--load-cache", file, "--question", "Why?", "--json")
    assert (ran.status, ran.json["error"]) == (2, "OptionError")
    two = run("--question", "a", "--question", "b", "--protocol", "query-aware", "--save-cache", file, "--json")
    assert (two.status, two.json["error"]) == (2, "OptionError")
    none = run("--protocol", "query-aware", "--save-cache", file, "--json")
    assert (none.status, none.json["error"]) == (2, "OptionError")


def test_chunks_hold_the_peak_down(run):
    budget = {"policy": "streaming-llm", "budget": ("--entries", 16)}
    words = ("--question", "Where is it?", "--json")
    whole, chunks = run(*words, **budget).json, run(*words, "--chunk-tokens", 20, **budget).json
    assert chunks["cache"]["entries"] == whole["cache"]["entries"]
    assert chunks["cache"]["peak_bytes"] < whole["cache"]["peak_bytes"]
    refused = run(*words, "--chunk-tokens", 20, "--protocol", "query-aware", **budget)
    assert refused.status == 2
    assert "query-aware with --chunk-tokens" in refused.out


def test_keys_may_be_rotated_anew(run, kvkeep, folder, tmp_path):
    file = tmp_path / "cut.safetensors"
    words = ("--rerotate-keys", "--compare-full", "--save-cache", file)
    ran = run("--question", "When?", *words, policy="streaming-llm")
    check_text(ran)
    for word in ("keys rotated anew", "state"):
        assert word in ran.out
    record = run("--question", "When?", *words, "--json", policy="streaming-llm").json
    assert record["rerotate_keys"] is True
    assert record["cache"]["state_bytes"] == record["cache"]["payload_bytes"] // 2  # the moved keys
    assert record["full"]["cache"]["state_bytes"] == 0
    loaded = kvkeep(
        "run", "--model", folder, "--load-cache", file, "--question", "When?", "--max-new-tokens", 6, "--json"
    )
    assert loaded.json["rerotate_keys"] is True
    assert loaded.json["answers"] == record["answers"]
    plain = run("--question", "When?", "--json", policy="streaming-llm").json
    assert plain["rerotate_keys"] is False
    assert plain["cache"]["state_bytes"] == 0
