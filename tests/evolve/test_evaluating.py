"""A choice of entries is worth what the model says with a cache of only those; the harness believes nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep import Budget, KeepCache
from kvkeep.errors import PolicyError
from kvkeep.evolve.evaluating import (
    Evaluator,
    Job,
    ReaderMaker,
    check_cache,
    full_job,
    job_of,
    job_of_policy,
    random_job,
)
from kvkeep.evolve.reconstruction import reconstruction_error
from kvkeep.evolve.samples import Asked, Recorded
from kvkeep.hf.models import load_model
from kvkeep.hf.pools import make_pool
from kvkeep.hf.prompting import Prompting
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.lab.instance import Instance, forced_error
from kvkeep.policies import parse_policy
from kvkeep.tasks.metrics import score

from ..bench.toy import Toy
from .toys import collected, tiny

POLICIES = ("snapkv[window=8]", "chunkkv[window=8,length=5]", "frc", "snapkv[window=8]+ada", "knorm")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, tokenizer = tiny(request.param, torch.float64)
    samples = collected(tmp_path_factory.mktemp("samples"), (model, tokenizer), [Toy()], stage2=4)
    return model, tokenizer, samples.of("stage1", "stage2")


def said_by(model: Any, tokenizer: Any, place: int, policy: str, entries: int) -> tuple[list[float], str]:
    """The log-probabilities and the answer that a live cache gives, sample by sample."""
    sample = next(iter(Toy().samples(tokenizer, length=300, count=1, first=place + 1)))
    asked = Asked.of(sample, Prompting(tokenizer), "query-aware")
    cache = KeepCache(model, policy, entries=entries, question=asked.question)
    with torch.no_grad():
        model(torch.tensor([asked.ids]), **{CACHE_ARGUMENT: cache})
        fed = torch.tensor([[*asked.prompt, *asked.reference[:-1]]])
        logits = model(fed, **{CACHE_ARGUMENT: cache}).logits[0, -len(asked.reference) :].float().log_softmax(-1)
        cache.rewind()
        new: list[int] = []
        step = torch.tensor([list(asked.prompt)])
        while len(new) < 6 and not (new and new[-1] == tokenizer.eos_token_id):
            new.append(int(model(step, **{CACHE_ARGUMENT: cache}).logits[0, -1].argmax()))
            step = torch.tensor([[new[-1]]])
    told = logits.gather(1, torch.tensor(asked.reference)[:, None])[:, 0].tolist()
    return told, str(tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_readings_are_those_of_a_live_cache(loaded: Any, policy: str) -> None:
    model, tokenizer, samples = loaded
    jobs = [job_of_policy(sample, parse_policy(policy), 20) for sample in samples]
    readings = Evaluator(model, tokenizer, generate=True, batch_rows=3).read(jobs)
    for place, (sample, reading) in enumerate(zip(samples, readings, strict=True)):
        logprobs, text = said_by(model, tokenizer, place, policy, 20)
        assert reading.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert reading.text == text
        assert reading.score == score("match_all", text, sample.facts.references)


def test_the_full_cache_says_what_was_recorded(loaded: Any) -> None:
    model, tokenizer, samples = loaded
    for batch_rows in (1, 2, 16):
        readings = Evaluator(model, tokenizer, batch_rows=batch_rows).read([full_job(sample) for sample in samples])
        for sample, reading in zip(samples, readings, strict=True):
            assert reading.logprobs == pytest.approx(sample.facts.full, abs=1e-5)
            assert reading.score is None


def test_what_is_read_beside_it_changes_nothing(loaded: Any) -> None:
    model, tokenizer, samples = loaded
    evaluator = Evaluator(model, tokenizer, batch_rows=4)
    alone = [evaluator.read([random_job(sample, 15, 1)])[0] for sample in samples]
    jobs = [job for sample in samples for job in (full_job(sample), random_job(sample, 15, 1), random_job(sample, 4))]
    together = evaluator.read(jobs)[1::3]
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    assert random_job(samples[0], 15, 1).kept[0].sum() == 15
    assert not torch.equal(random_job(samples[0], 15, 1).kept[0], random_job(samples[0], 15, 2).kept[0])


def test_a_cache_that_holds_anything_else_is_found_out(loaded: Any) -> None:
    model, tokenizer, samples = loaded
    evaluator = Evaluator(model, tokenizer)
    jobs = [random_job(sample, 12) for sample in samples]
    cache = evaluator.cache_of(jobs)
    check_cache(cache, jobs)
    other = [*jobs[:-1], random_job(samples[-1], 12, seed=9)]
    with pytest.raises(PolicyError, match="other entries"):
        check_cache(cache, other)
    more = [*jobs[:-1], full_job(samples[-1])]
    with pytest.raises(PolicyError, match="other entries"):
        check_cache(cache, more)
    facts = replace(samples[0].facts, length=samples[0].facts.length + 1)
    kept = tuple(torch.cat([mask, mask[..., :1] & False], dim=-1) for mask in jobs[0].kept)
    longer = [Job(Recorded(facts, samples[0].path), kept), *jobs[1:]]
    with pytest.raises(PolicyError, match="logical lengths"):
        check_cache(cache, longer)
    grown = evaluator.cache_of(jobs)
    with torch.no_grad():
        positions = torch.tensor(grown.lengths)[:, None]
        model(torch.ones(len(jobs), 1, dtype=torch.long), position_ids=positions, **{CACHE_ARGUMENT: grown})
    with pytest.raises(PolicyError):
        check_cache(grown, jobs)


def test_policies_that_need_more_than_was_recorded_are_refused(loaded: Any, tmp_path: Path) -> None:
    _, _, samples = loaded
    for name in ("expected-attention", "kvzip", "compactor"):
        with pytest.raises(PolicyError, match="last"):
            job_of_policy(samples[0], parse_policy(name), 20)


def test_reconstruction_is_the_forced_error_of_the_laboratory(loaded: Any) -> None:
    _, _, samples = loaded
    for sample in samples[:2]:
        job = random_job(sample, 17)
        errors = []
        for ordinal, kept in enumerate(job.kept):
            keys, values, queries = (
                sample.tensors[f"layers.{ordinal}.{name}"][0].double() for name in ("keys", "values", "answering")
            )
            group = queries.shape[0] // keys.shape[0]
            for head in range(queries.shape[0]):
                for row in range(queries.shape[1]):
                    logits = queries[head, row] @ keys[head // group].T * sample.facts.scaling[ordinal]
                    instance = Instance(logits.softmax(-1).numpy(), values[head // group].numpy())
                    forced = forced_error(instance, np.flatnonzero(kept[0, 0].numpy()))
                    errors.append(forced / np.linalg.norm(instance.mean))
        assert reconstruction_error(job) == pytest.approx(float(np.mean(errors)), rel=1e-4)
        assert reconstruction_error(full_job(sample)) < 1e-5 < reconstruction_error(job)


def test_indices_in_any_order_make_the_same_job(loaded: Any) -> None:
    _, _, samples = loaded
    sample = samples[0]
    layers = len(sample.facts.layers)
    one = job_of(sample, [np.array([3, 1, 2])] * layers)
    other = job_of(sample, [np.array([1, 2, 3], dtype=np.int32)] * layers)
    assert all(torch.equal(a, b) for a, b in zip(one.kept, other.kept, strict=True))
    assert sample.entries(Budget(compression_ratio=0.5)) == sample.facts.length // 2


@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_workers_read_what_this_process_reads(executor: str, tmp_path: Path) -> None:
    if executor == "ray":
        pytest.importorskip("ray")
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    evaluator = Evaluator(*load_model(tmp_path / "model"), batch_rows=3)
    samples = collected(tmp_path / "samples", (evaluator.model, tokenizer), [Toy()]).of("stage1", "stage2", "heldout")
    jobs = [job for sample in samples for job in (full_job(sample), random_job(sample, 9))]
    with make_pool(executor, ReaderMaker(str(tmp_path / "model")), 2, evaluator.read_together) as pool:
        assert evaluator.read_on(pool)(jobs) == evaluator.read(jobs)
