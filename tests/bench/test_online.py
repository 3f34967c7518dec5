"""Policies that hold a cap while they generate: each reads and answers by itself, and is weighed behind its answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvkeep import Budget, KeepCache
from kvkeep.bench.settings import is_online
from kvkeep.errors import ResultsError
from kvkeep.hf.prompting import Prompting
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

from .test_bench import generated, rows_of, settings_for
from .test_rollouts import rows_of as rollout_rows
from .test_rollouts import settings_for as rollouts_for
from .toy import Toy

ONLINE = "online-streaming-llm"


def test_rows_are_what_the_policy_gives_alone(tmp_path: Path) -> None:
    settings = settings_for(samples=1, policies=(ONLINE, "knorm"))
    rows = [row for row in rows_of(settings, tmp_path, Toy(questions=2)) if row.policy == ONLINE]
    assert [(row.turn, row.budget, row.protocol) for row in rows] == [
        (0, {"entries": 12}, "query-agnostic"),
        (1, {"entries": 12}, "query-agnostic"),
        (0, {"entries": 12}, "query-aware"),
        (1, {"entries": 12}, "query-aware"),
    ]
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    prompting = Prompting(tokenizer)
    (sample,) = Toy(questions=2).samples(tokenizer, length=400, count=1)
    context = prompting.context(sample.context)
    for row in rows:
        question = prompting.question(context.end, sample.turns[row.turn])
        cache = KeepCache(model, ONLINE, entries=12)
        with torch.no_grad():
            model(torch.tensor([context.ids]), **{CACHE_ARGUMENT: cache})
        new = generated(model, cache, question, 6, {tokenizer.eos_token_id})
        assert row.prediction == tokenizer.decode(new, skip_special_tokens=True)
        assert row.memory.held_bytes == cache.ledger.held_bytes
        assert row.memory.logical_length == len(context.ids) + len(question) + len(new) - 1
        assert row.memory.uncut_entries == 0
        assert row.entries_per_cell == ((12, 12),) * 3
        assert row.fidelity.kl is not None
        assert row.fidelity.kl > 0


def test_a_talk_goes_on_under_the_cap(tmp_path: Path) -> None:
    settings = settings_for(samples=1, policies=(ONLINE,), budgets=(Budget(entries=12),), protocols=("query-agnostic",))
    rows = [row for row in rows_of(settings, tmp_path, Toy(talking=True)) if row.policy == ONLINE]
    assert [row.turn for row in rows] == [0, 1]
    assert {row.entries_per_cell for row in rows} == {((12, 12),) * 3}
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    prompting, ends = Prompting(tokenizer), {tokenizer.eos_token_id}
    (sample,) = Toy(talking=True).samples(tokenizer, length=400, count=1)
    context = prompting.context(sample.context)
    cache = KeepCache(model, ONLINE, entries=12)
    with torch.no_grad():
        model(torch.tensor([context.ids]), **{CACHE_ARGUMENT: cache})
    first = generated(model, cache, prompting.question(context.end, sample.turns[0]), 6, ends)
    second = generated(model, cache, first[-1:] + prompting.follow_up(sample.turns[1]), 6, ends)
    said = [tokenizer.decode(new, skip_special_tokens=True) for new in (first, second)]
    assert [row.prediction for row in rows] == said


def test_drawn_answers_stay_under_the_cap(tmp_path: Path) -> None:
    rows = rollout_rows(rollouts_for(samples=1, policies=(ONLINE, "knorm"), max_new_tokens=24), tmp_path)
    for row in rows:
        held = {count for layer in row.entries_per_cell or () for count in layer}
        if row.policy == ONLINE:
            assert held == {12}
            assert row.memory.logical_length > 100
    assert len({row.prediction for row in rows if row.policy == ONLINE}) > 1


def test_a_cap_has_no_ratio() -> None:
    settings = settings_for(policies=(ONLINE, "knorm"))
    assert (ONLINE, Budget(entries=12)) in settings.cuts
    assert not [cut for cut in settings.cuts if cut[0] == ONLINE and cut[1].compression_ratio is not None]
    with pytest.raises(ResultsError, match=f"entries or bytes as a budget for {ONLINE}"):
        settings_for(policies=(ONLINE,), budgets=(Budget(compression_ratio=0.5),))
    assert [is_online(name) for name in (ONLINE, "knorm", "full")] == [True, False, False]
