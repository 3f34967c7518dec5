"""Several answers to each problem: drawn with seeds of their own, the same for all policies, graded and counted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep import Budget
from kvkeep.bench.rollouts import pass_at_1, problem_of, rollouts_of
from kvkeep.bench.runner import run
from kvkeep.bench.settings import Settings
from kvkeep.errors import ResultsError
from kvkeep.hf.sampling import Sampling
from kvkeep.results import Row, read_rows
from kvkeep.results.metrics import measurements, metric_named
from kvkeep.results.statistics import mean_interval
from kvkeep.tasks.reasoning import ReasoningTask, pass_at_k, read_reasoning
from kvkeep.testing import fake_model

from .toy import Toy

SAMPLING = Sampling(temperature=0.6, top_p=0.95, top_k=20)


def settings_for(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": "tiny",
        "tasks": ("reasoning/small",),
        "lengths": (4096,),
        "samples": 3,
        "policies": ("knorm", "snapkv[window=8]"),
        "budgets": (Budget(entries=12),),
        "protocols": ("query-aware",),
        "max_new_tokens": 8,
        "sampling": SAMPLING,
        "rollouts": 3,
    }
    return Settings(**(values | changes))


def rows_of(settings: Settings, folder: Path, task: Any = None, **options: Any) -> list[Row]:
    loaded = fake_model(dtype=torch.float64, layers=3)
    return list(read_rows(run(settings, [task or ReasoningTask("small")], folder, loaded=loaded, **options)))


def test_each_problem_is_answered_several_times(tmp_path: Path) -> None:
    rows = rows_of(settings_for(), tmp_path)
    problems = read_reasoning("small")[:3]
    assert len(rows) == 3 * 3 * 3
    assert {row.cluster for row in rows} == {problem.key for problem in problems}
    assert {row.options["rollout"] for row in rows} == {0, 1, 2}
    assert {row.metric for row in rows} == {"boxed"}
    assert all(row.score in (0, 1) and row.fidelity.kl is None for row in rows)
    answers = {row.key: row.prediction for row in rows}
    by_rollout = [{row.prediction for row in rows if row.options["rollout"] == number} for number in range(3)]
    assert len(set.union(*by_rollout)) > 3  # greedy answers would be the same for all rollouts
    again = rows_of(settings_for(), tmp_path / "again", batch_rows=1)
    assert {row.key: row.prediction for row in again} == answers


def test_a_policy_that_keeps_everything_says_what_the_full_cache_says(tmp_path: Path) -> None:
    """All policies draw with the same random numbers."""
    rows = rows_of(settings_for(policies=("knorm",), budgets=(Budget(entries=10_000),)), tmp_path)
    full = {row.sample: row.prediction for row in rows if row.policy == "full"}
    assert len(set(full.values())) > 3
    assert {row.sample: row.prediction for row in rows if row.policy == "knorm"} == full


def test_a_run_that_was_stopped_goes_on_with_the_same_answers(tmp_path: Path) -> None:
    whole = rows_of(settings_for(), tmp_path)
    log = tmp_path / "rows.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:11]) + lines[11][:30])
    filled = rows_of(settings_for(), tmp_path)
    assert {row.key: row.prediction for row in filled} == {row.key: row.prediction for row in whole}
    with pytest.raises(ResultsError, match="rollouts"):
        rows_of(settings_for(rollouts=4), tmp_path)


def test_seeds_follow_the_run_and_the_rollout(tmp_path: Path) -> None:
    first = {row.key: row.prediction for row in rows_of(settings_for(samples=1), tmp_path / "0")}
    other = {row.key: row.prediction for row in rows_of(settings_for(samples=1, seed=7), tmp_path / "7")}
    assert set(first) == set(other)  # boxed problems are the same for every seed
    assert first != other
    more = {row.key: row.prediction for row in rows_of(settings_for(samples=1, rollouts=5), tmp_path / "5")}
    assert first.items() <= more.items()


def test_pass_at_1_counts_problems_and_not_rollouts(tmp_path: Path) -> None:
    rows = [row for row in rows_of(settings_for(), tmp_path) if row.policy == "knorm"]
    right = {0: [1, 1, 0], 1: [0, 0, 0], 2: [1, 0, 0]}
    problems = sorted({row.cluster for row in rows})
    graded = [
        dataclasses.replace(row, score=float(right[problems.index(row.cluster)][int(row.options["rollout"])]))
        for row in rows
    ]
    assert pass_at_1(graded) == pytest.approx(1 / 3)
    assert pass_at_1(graded) == pass_at_k(list(right.values()))
    assert pass_at_1(graded[1:]) == pytest.approx((right[0][1] / 2 + right[0][2] / 2 + 0 + 1 / 3) / 3)
    estimate = mean_interval(measurements(graded, metric_named("score")))
    assert (estimate.clusters, estimate.mean) == (3, pytest.approx(1 / 3))
    assert pass_at_1([dataclasses.replace(row, score=0.5) for row in rows]) is None
    assert pass_at_1([dataclasses.replace(row, options={}) for row in rows]) is None


def test_an_answer_is_graded_by_its_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = read_reasoning("small")[0]
    said = iter([rf"so \boxed{{{problem.turns[0].references[0]}}}", r"\boxed{-1}", "I do not know"])
    monkeypatch.setattr("kvkeep.bench.measuring.Measurer._text", lambda self, answer: next(said))
    rows = rows_of(settings_for(samples=1, policies=("full",), budgets=()), tmp_path)
    assert [row.score for row in rows] == [1, 0, 0]
    assert pass_at_1(rows) == pytest.approx(1 / 3)


def test_any_task_can_be_drawn(tmp_path: Path) -> None:
    settings = settings_for(tasks=("toy/colours",), lengths=(512,), samples=1, rollouts=2, max_new_tokens=0)
    rows = rows_of(settings, tmp_path, Toy())
    assert {row.options["rollout"] for row in rows} == {0, 1}
    assert all(row.fidelity.kl is not None for row in rows)


def test_rollouts_are_samples_of_one_problem() -> None:
    sample = read_reasoning("small")[0]
    several = list(rollouts_of(sample, 3))
    assert len({each.key for each in several}) == 3
    assert {problem_of(each) for each in several} == {sample.key} == {problem_of(sample)}


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ResultsError, match="the likeliest tokens are always the same"):
        settings_for(sampling=None)
    with pytest.raises(ResultsError, match="at least one rollout"):
        settings_for(rollouts=0)


def test_runs_without_sampling_are_recorded_as_they_were() -> None:
    record = settings_for(sampling=None, rollouts=1).to_dict()
    assert not {"sampling", "rollouts"} & set(record)
    drawn = settings_for().to_dict()
    assert json.loads(json.dumps(drawn))["sampling"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
