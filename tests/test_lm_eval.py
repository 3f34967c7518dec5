"""lm-evaluation-harness under a policy: its own numbers where nothing is cut, and those of the cut cache elsewhere.

The harness and what it brings along weigh 350 MB, so it is not among the packages of the group `dev`; without it these
tests are skipped. To run them: `pip install -e ".[lm-eval]"`, then `pytest tests/test_lm_eval.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep import KeepCache
from kvkeep.errors import BudgetError, CacheStateError, PolicyError, ResultsError, UnsupportedError
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

pytest.importorskip("lm_eval", reason="needs lm-eval, which is an extra")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from kvkeep.lm_eval import KvkeepLM

# The harness's own business, and that of the packages that it brings along.
pytestmark = pytest.mark.filterwarnings("ignore")

CONTEXT = "The boat is red. The door is blue. The hat is green. The cat is grey. Question: what colour is the door? "
POLICY = {"policy": "snapkv[window=4]", "compression_ratio": 0.5}


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    return fake_model(dtype=torch.float64, layers=3)


def asked(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def ours(parts: tuple[Any, Any], **options: Any) -> KvkeepLM:
    return KvkeepLM(parts[0], tokenizer=parts[1], **options)


def token_by_token(model: Any, cache: KeepCache, ids: list[int], told: list[int]) -> float:
    """Log-likelihood of `told` behind `ids`, of which all but the last is read and cut; one forward a token."""
    total = 0.0
    with torch.no_grad():
        model(torch.tensor([ids[:-1]]), **{CACHE_ARGUMENT: cache})
        last = ids[-1]
        for token in told:
            logits = model(torch.tensor([[last]]), **{CACHE_ARGUMENT: cache}).logits[0, -1]
            total += float(logits.float().log_softmax(-1)[token])
            last = token
    return total


def test_the_harness_knows_it_by_name() -> None:
    assert get_model("kvkeep") is KvkeepLM


def test_a_full_cache_gives_the_harness_s_own_numbers(parts: tuple[Any, Any]) -> None:
    theirs, mine = HFLM(pretrained=parts[0], tokenizer=parts[1]), ours(parts)
    pairs = [(CONTEXT, "blue"), (CONTEXT, "red and so on"), ("", "The boat"), ("a", "b"), (CONTEXT + " ", " green")]
    for left, right in zip(
        mine.loglikelihood(asked("loglikelihood", *pairs)),
        theirs.loglikelihood(asked("loglikelihood", *pairs)),
        strict=True,
    ):
        assert left[0] == pytest.approx(right[0], abs=1e-4)
        assert left[1] == right[1]
    texts = [(CONTEXT,), (CONTEXT * 3,), ("a",)]
    small = HFLM(pretrained=parts[0], tokenizer=parts[1], max_length=64)
    for pieces in (7, 512):
        mine = ours(parts, rolling_tokens=pieces, max_length=64)
        assert mine.loglikelihood_rolling(asked("loglikelihood_rolling", *texts)) == pytest.approx(
            small.loglikelihood_rolling(asked("loglikelihood_rolling", *texts)), abs=1e-3
        )
    options = {"until": ["zz"], "max_gen_toks": 12}
    requests = asked("generate_until", *((text, options) for text in (CONTEXT, "a bc", "d")))
    mine = ours(parts)
    assert mine.generate_until(requests) == theirs.generate_until(requests)
    assert mine.get_model_info()["kvkeep"]["evicted_share"] == 0


@pytest.mark.parametrize("policy", ["snapkv[window=4]", "knorm+ada", "kvzip", "h2o"])
def test_continuations_are_scored_behind_the_cut(parts: tuple[Any, Any], policy: str) -> None:
    model, tokenizer = parts
    mine = ours(parts, policy=policy, compression_ratio=0.5)
    pairs = [(CONTEXT, "blue as the sea"), (CONTEXT, "red"), (CONTEXT[:40], "green")]
    found = mine.loglikelihood(asked("loglikelihood", *pairs))
    for (context, continuation), (likelihood, _) in zip(pairs, found, strict=True):
        ids, told = mine._encode_pair(context, continuation)
        cache = KeepCache(model, policy, compression_ratio=0.5, repeat_prompt=RepeatPrompt.of(tokenizer))
        assert likelihood == pytest.approx(token_by_token(model, cache, ids, told), abs=1e-4)
    full = ours(parts).loglikelihood(asked("loglikelihood", *pairs))
    assert all(abs(cut[0] - whole[0]) > 1e-3 for cut, whole in zip(found, full, strict=True))
    about = mine.get_model_info()["kvkeep"]
    assert (about["contexts"], about["evicted_share"], about["protocol"]) == (2, 1.0, "query-aware")  # one is shared
    assert 0.4 < about["held_fraction"] < 0.7


def test_greedy_answers_are_recognised(parts: tuple[Any, Any]) -> None:
    mine = ours(parts, **POLICY)
    ids, told = mine.tok_encode(CONTEXT), list[int]()
    cache = KeepCache(parts[0], POLICY["policy"], compression_ratio=0.5)
    with torch.no_grad():
        parts[0](torch.tensor([ids[:-1]]), **{CACHE_ARGUMENT: cache})
        for _ in range(5):
            last = torch.tensor([[*ids, *told][-1:]])
            told.append(int(parts[0](last, **{CACHE_ARGUMENT: cache}).logits[0, -1].argmax()))
    ((_, greedy), (_, other)) = mine._loglikelihood_tokens([(None, ids, told), (None, ids, [*told[:-1], 7])])
    assert greedy
    assert not other


def test_rolling_pieces_are_predicted_from_what_is_left(parts: tuple[Any, Any]) -> None:
    model, _ = parts
    mine = ours(parts, rolling_tokens=16, policy="knorm", compression_ratio=0.5)
    (found,) = mine.loglikelihood_rolling(asked("loglikelihood_rolling", (CONTEXT,)))
    ids = [mine.prefix_token_id, *mine.tok_encode(CONTEXT)]
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    cache.cut_on_request()
    total = 0.0
    for at, (token, told) in enumerate(itertools.pairwise(ids), 1):
        if at % 16 == 0:
            cache.cut_next()
        with torch.no_grad():
            logits = model(torch.tensor([[token]]), **{CACHE_ARGUMENT: cache}).logits[0, -1]
        total += float(logits.float().log_softmax(-1)[told])
    assert found == pytest.approx(total, abs=1e-4)
    (full,) = ours(parts).loglikelihood_rolling(asked("loglikelihood_rolling", (CONTEXT,)))
    assert abs(found - full) > 1e-3
    assert mine.get_model_info()["kvkeep"]["contexts"] == -(-(len(ids) - 1) // 16)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_answers_do_not_hang_on_the_batch(parts: tuple[Any, Any], batch_size: int) -> None:
    contexts = [CONTEXT, CONTEXT[:30], "a", CONTEXT * 2, ""]
    options = {"until": ["\n\n"], "max_gen_toks": 10}
    together = ours(parts, batch_size=batch_size, **POLICY)
    found = together.generate_until(asked("generate_until", *((text, options) for text in contexts)))
    for text, answer in zip(contexts, found, strict=True):
        alone = ours(parts, policy="snapkv[window=4]", compression_ratio=0.5, short_contexts="count")
        try:
            assert alone.generate_until(asked("generate_until", (text, options))) == [answer]
        except ResultsError:  # alone, one that is too short is an error
            assert len(text) < 2


def test_answers_end_before_their_stop_sequence(parts: tuple[Any, Any]) -> None:
    mine = ours(parts, **POLICY)
    (whole,) = mine.generate_until(asked("generate_until", (CONTEXT, {"until": [], "max_gen_toks": 20})))
    stop = whole[len(whole) // 2 :][:3]
    (ended,) = mine.generate_until(asked("generate_until", (CONTEXT, {"until": stop, "max_gen_toks": 20})))
    assert ended == whole.split(stop)[0]
    mine = ours(parts, think_end_token=stop, **POLICY)
    (thought,) = mine.generate_until(asked("generate_until", (CONTEXT, {"until": [], "max_gen_toks": 20})))
    assert thought == whole.split(stop)[-1].lstrip()


def test_drawn_answers_can_be_repeated(parts: tuple[Any, Any]) -> None:
    options = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "until": [], "max_gen_toks": 8}
    requests = asked("generate_until", *([(CONTEXT, options)] * 3))
    first, again = (ours(parts, **POLICY).generate_until(requests) for _ in range(2))
    assert first == again
    assert len(set(first)) == 3  # the same request, drawn anew
    assert ours(parts, seed=1, **POLICY).generate_until(requests) != first
    with pytest.raises(UnsupportedError, match="repetition_penalty"):
        ours(parts, **POLICY).generate_until(
            asked("generate_until", (CONTEXT, {"until": [], "repetition_penalty": 1.2}))
        )


def test_contexts_too_short_to_evict_from(parts: tuple[Any, Any]) -> None:
    short, long = ("a b", "c"), (CONTEXT, "blue")
    counted = ours(parts, policy="knorm", entries=20)
    counted.loglikelihood(asked("loglikelihood", short, long))
    assert counted.get_model_info()["kvkeep"]["evicted_share"] == 0.5
    with pytest.raises(ResultsError, match="all of which were kept whole"):
        counted.loglikelihood(asked("loglikelihood", short))
    with pytest.raises(ResultsError, match="all of which were kept whole"):
        counted.generate_until(asked("generate_until", ("a b", {"until": [], "max_gen_toks": 2})))
    refusing = ours(parts, policy="knorm", entries=20, short_contexts="refuse")
    refusing.loglikelihood(asked("loglikelihood", long))
    with pytest.raises(CacheStateError, match="a context that is long enough"):
        refusing.loglikelihood(asked("loglikelihood", long, short))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"policy": "snapvk", "entries": 9}, PolicyError, "did you mean 'snapkv'"),
        ({"policy": "snapkv"}, BudgetError, "received none"),
        ({"policy": "snapkv", "entries": 9, "bytes": "1MiB"}, BudgetError, "exactly one"),
        ({"entires": 9}, UnsupportedError, "did you mean 'entries'"),
        ({"batch_size": "auto"}, UnsupportedError, "whole number"),
        ({"short_contexts": "ignore"}, UnsupportedError, "count or refuse"),
        ({"tokenizer": None}, UnsupportedError, "tokenizer="),
    ],
)
def test_arguments_that_make_no_sense(
    parts: tuple[Any, Any], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        KvkeepLM(parts[0], **({"tokenizer": parts[1]} | options))


TASKS = {
    "kvkeep_choice": """
        output_type: multiple_choice
        doc_to_text: "{{context}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: "{{right}}"
        metric_list: [{metric: acc}]
    """,
    "kvkeep_answer": """
        output_type: generate_until
        doc_to_text: "{{context}}"
        doc_to_target: "blue"
        generation_kwargs: {until: ["."], max_gen_toks: 4}
        metric_list: [{metric: exact_match}]
    """,
    "kvkeep_text": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{context}}"
        metric_list: [{metric: bits_per_byte}]
    """,
}


@pytest.fixture(scope="module")
def offline_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of the harness on a file of this machine."""
    folder = tmp_path_factory.mktemp("tasks")
    docs = [
        {"context": f"{number} {CONTEXT}Answer:", "choices": [" blue", " red", " as green as grass"], "right": 0}
        for number in range(3)
    ]
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, body in TASKS.items():
        lines = "\n".join(line.strip() for line in body.strip().splitlines())
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\n{lines}\n"
        )
    return folder


def command(offline_tasks: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The harness's own command, in a process of its own."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "kvkeep.lm_eval", "run"),
            *("--model", "kvkeep", "--include_path", str(offline_tasks), *words),
        ],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_its_command_runs_its_tasks(parts: tuple[Any, Any], offline_tasks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    for part in parts:
        part.save_pretrained(folder)
    out = tmp_path / "out"
    ran = command(
        offline_tasks,
        tmp_path,
        *("--tasks", ",".join(TASKS), "--output_path", str(out)),
        *("--model_args", f"pretrained={folder},policy=snapkv,compression_ratio=0.5,dtype=float32"),
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (file,) = out.rglob("results*.json")
    results = json.loads(file.read_text())
    assert set(results["results"]) == set(TASKS)
    about = results["config"]["kvkeep"]
    assert about["policy"] == "snapkv"
    assert about["budget"] == {"compression_ratio": 0.5}
    assert about["evicted_share"] == 1
    assert 0.4 < about["held_fraction"] < 0.75
