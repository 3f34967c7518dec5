"""Where memory is short, each cache reads the text by itself, and the rows are the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kvkeep import Budget, KeepCache
from kvkeep.bench.prefilling import Prefill, Text, bytes_alone
from kvkeep.bench.worker import Worker
from kvkeep.errors import BudgetError
from kvkeep.hf.prompting import Prompting
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.shared_prompt import shared_prompt_bytes
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

from .test_bench import rows_of, settings_for
from .toy import Toy

POLICIES = ("snapkv[window=8]", "h2o", "kvzip", "knorm+threshold")


def length_of_the_text(task: Toy) -> int:
    _, tokenizer = fake_model(dtype=torch.float64, layers=3)
    sample = next(iter(task.samples(tokenizer, length=400, count=1)))
    return len(Prompting(tokenizer).context(sample.context).ids)


@pytest.mark.parametrize("task", [Toy(questions=2), Toy(talking=True)], ids=["questions", "talk"])
def test_rows_are_the_same_with_a_prefill_each(task: Toy) -> None:
    settings = settings_for(samples=1, policies=POLICIES, budgets=(Budget(entries=12),))
    loaded = fake_model(dtype=torch.float64, layers=3)
    (sample,) = task.samples(loaded[1], length=400, count=1)
    together = {row.key: row for row in Worker(settings, loaded).rows((sample, frozenset()))}
    apart = list(Worker(settings, loaded, memory_limit=1).rows((sample, frozenset())))
    assert {row.key for row in apart} == set(together)
    assert len(apart) == len(together)
    for row in apart:
        twin = together[row.key]
        assert row.prediction == twin.prediction
        assert row.score == twin.score
        assert row.entries_per_cell == twin.entries_per_cell
        assert row.kept_needle_share == twin.kept_needle_share
        # What a policy over all layers needs at its peak hangs on its scores: a shared prefill tells the bound.
        assert row.memory == dataclasses.replace(twin.memory, peak_bytes=row.memory.peak_bytes)
        assert row.memory.peak_bytes <= twin.memory.peak_bytes
        assert row.fidelity.kl == pytest.approx(twin.fidelity.kl, abs=1e-9)
        assert row.fidelity.reference_logprob == pytest.approx(twin.fidelity.reference_logprob, abs=1e-9)
        assert row.times.prefill_s is not None
        assert row.times.prefill_s > 0


def test_the_limit_decides_which_way_is_taken() -> None:
    model, _ = fake_model(dtype=torch.float64, layers=3)
    text = Text(list(range(3, 63)), None, RepeatPrompt())
    cuts = [("knorm", Budget(compression_ratio=0.5)), ("h2o", Budget(compression_ratio=0.5))]
    needed = shared_prompt_bytes(model, ["knorm", "h2o"], 60)
    for limit, shared in ((None, True), (needed, True), (needed - 1, False)):
        prefill = Prefill(model, text, cuts, memory_limit=limit)
        assert prefill.is_shared == shared
        assert [len(group) for group in prefill.groups(cuts, 16)] == ([2] if shared else [1, 1])
        cache, seconds = prefill.cut(*cuts[0])
        assert cache.lengths == [60]
        assert seconds > 0


def test_what_one_cache_needs_is_told_before() -> None:
    model, _ = fake_model(dtype=torch.float64, layers=3)
    ids = torch.randint(3, 128, (1, 80), generator=torch.Generator().manual_seed(0))
    queries = 80 * model.config.num_attention_heads * 16 * 8  # of the layer that is judged at the moment
    for policy, beside in (("knorm", 0), ("h2o", queries), ("full", 0)):
        budget = Budget(compression_ratio=0.0 if policy == "full" else 0.5)
        cache = KeepCache(model, policy, budget=budget)
        with torch.no_grad():
            model(ids, **{CACHE_ARGUMENT: cache})
        assert bytes_alone(model, policy, budget, 80, RepeatPrompt()) == cache.ledger.peak_bytes + beside


def test_a_text_that_does_not_fit_is_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    full = bytes_alone(model, "full", Budget(compression_ratio=0.0), length_of_the_text(Toy()), RepeatPrompt())
    forwards = []
    monkeypatch.setattr(type(model.get_decoder()), "forward", lambda *args, **kwargs: forwards.append(args))
    for protocol in ("query-agnostic", "query-aware"):
        settings = settings_for(samples=3, policies=("h2o",), protocols=(protocol,))
        with pytest.raises(BudgetError, match=f"received {full // 2:,} bytes") as error:
            rows_of(settings, tmp_path / protocol, memory_limit=full // 2)
        assert "full" in error.value.expected
        assert "toy/colours" in error.value.expected
    assert not forwards
    assert tokenizer is not None


def test_other_executors_keep_to_the_limit_too(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    for part in fake_model(dtype=torch.float32, layers=3):
        part.save_pretrained(folder)
    settings = settings_for(folder, samples=1, policies=("h2o",), protocols=("query-agnostic",))
    model, _ = fake_model(dtype=torch.float32, layers=3)
    limit = shared_prompt_bytes(model, settings.policies, length_of_the_text(Toy())) - 1
    alone = rows_of(settings, tmp_path / "serial", memory_limit=limit)
    shared = rows_of(settings, tmp_path / "processes", memory_limit=limit, executor="processes")
    assert [row.prediction for row in shared] == [row.prediction for row in alone]
    with pytest.raises(BudgetError):
        rows_of(settings, tmp_path / "none", memory_limit=10, executor="processes")
