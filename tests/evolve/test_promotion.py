"""Promotion: samples that the search has not seen, both protocols apart, sample by sample against its rivals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep import Budget
from kvkeep.errors import ResultsError, TaskError
from kvkeep.evolve.evaluating import Evaluator, full_job, job_of_policy, random_job
from kvkeep.evolve.guard import PolicyRefused
from kvkeep.evolve.program import seed_program
from kvkeep.evolve.promotion import (
    FULL,
    RANDOM,
    Cell,
    Measured,
    PromotionSettings,
    cells,
    check_samples,
    measure_cell,
    verdicts,
)
from kvkeep.evolve.sample_store import SampleStore
from kvkeep.evolve.sandbox import Sandbox
from kvkeep.policies import parse_policy

from ..bench.toy import Toy
from .toys import OtherToy, sample_settings, tiny


def settings_for(**changes: Any) -> PromotionSettings:
    values: dict[str, Any] = {
        "lengths": (400,),
        "ratios": (0.5, 0.75),
        "seeds": (0,),
        "protocols": ("query-aware",),
        "samples": 2,
        "search": sample_settings(),
    }
    return PromotionSettings(**(values | changes))


def rows(
    better: float, noise: float, protocol: str = "query-aware", unseen: bool = False, n: int = 12
) -> list[Measured]:
    random = np.random.default_rng([int(1000 * abs(better)), unseen])
    found = []
    for at in range(n):
        base = float(random.normal())
        for name, lift in (("best", better), ("seed frc", 0.0), (FULL, 1.0), (RANDOM, -1.0)):
            value = base + lift + noise * float(random.normal())
            task = "new" if unseen else "old"
            found.append(Measured(name, "tiny", protocol, task, unseen, 400, 0.5, f"{task}/{at}", value))
    return found


def test_contestants_are_measured_on_what_the_search_has_not_seen(tmp_path: Path) -> None:
    model, tokenizer = tiny()
    store, evaluator = SampleStore(tmp_path, 2**28), Evaluator(model, tokenizer)
    seen = store.collect(model, tokenizer, [Toy()], sample_settings(), splits=("probe", "stage1", "stage2"))
    keys = {sample.facts.sample for split in ("probe", "stage1", "stage2") for sample in seen[split]}
    contestants = {"best": seed_program("frc"), "snapkv": "snapkv[window=8]"}
    with Sandbox() as sandbox:
        found = measure_cell(
            Cell("query-aware", 400, 0),
            settings_for(),
            contestants,
            evaluator,
            sandbox,
            store,
            [Toy()],
            [OtherToy()],
            model_name="tiny",
        )
        cheat = seed_program("frc").with_block(
            "def score_tokens(context):\n    return context.key_norm\n\n\n"
            "def select_tokens_to_keep(scores, context):\n    return np.arange(context.L)"
        )
        with pytest.raises(PolicyRefused):
            measure_cell(
                Cell("query-aware", 400, 0), settings_for(), {"best": cheat}, evaluator, sandbox, store, [Toy()]
            )
    assert len(found) == 4 * 2 * 2 * 2  # contestants and bounds, ratios, tasks, samples
    assert not keys & {row.sample for row in found}
    assert {row.unseen for row in found if row.task == "toy/shades"} == {True}
    assert {row.unseen for row in found if row.task == "toy/colours"} == {False}
    held = store.collect(model, tokenizer, [Toy(), OtherToy()], sample_settings(), splits=("heldout",))["heldout"]
    for sample in held:
        for ratio in (0.5, 0.75):
            entries = sample.entries(Budget(compression_ratio=ratio))
            jobs = {
                FULL: full_job(sample),
                RANDOM: random_job(sample, entries),
                "snapkv": job_of_policy(sample, parse_policy("snapkv[window=8]"), entries),
                "best": job_of_policy(sample, parse_policy("frc"), entries),
            }
            for name, job in jobs.items():
                (row,) = [r for r in found if (r.contestant, r.sample, r.ratio) == (name, sample.facts.sample, ratio)]
                assert row.logprob == pytest.approx(evaluator.read([job])[0].logprob, abs=1e-5)
    assert Measured(**json.loads(json.dumps(found[0].to_dict()))) == found[0]


def test_a_clear_gain_is_better_and_noise_is_not() -> None:
    clear = {v.against: v for v in verdicts(rows(0.5, 0.05), "best")}
    assert clear["seed frc"].better
    assert clear["seed frc"].difference == pytest.approx(0.5, abs=0.06)
    assert clear["seed frc"].p_holm is not None
    assert clear["seed frc"].n == 12
    assert clear[FULL].difference < 0
    assert clear[FULL].p_holm is None  # a bound, no rival
    assert not clear[RANDOM].better
    assert not next(v for v in verdicts(rows(0.01, 1.0), "best") if v.against == "seed frc").better
    assert not next(v for v in verdicts(rows(-0.5, 0.05), "best") if v.against == "seed frc").better


def test_protocols_and_unseen_tasks_stand_apart() -> None:
    mixed = rows(0.5, 0.05) + rows(-0.4, 0.05, "query-agnostic") + rows(-0.3, 0.05, unseen=True)
    found = {(v.protocol, v.part): v for v in verdicts(mixed, "best") if v.against == "seed frc"}
    assert set(found) == {
        ("query-aware", "all"),
        ("query-aware", "seen tasks"),
        ("query-aware", "unseen tasks"),
        ("query-agnostic", "all"),
    }
    assert found["query-aware", "seen tasks"].difference == pytest.approx(0.5, abs=0.06)
    assert found["query-aware", "unseen tasks"].difference == pytest.approx(-0.3, abs=0.06)
    assert found["query-aware", "all"].difference == pytest.approx(0.1, abs=0.06)  # tasks count alike
    assert found["query-agnostic", "all"].difference == pytest.approx(-0.4, abs=0.06)
    other = [replace(row, model="second") for row in rows(0.5, 0.05)]
    assert {v.model for v in verdicts(mixed + other, "best")} == {"tiny", "second"}


def test_cells_are_all_that_was_asked_for() -> None:
    settings = settings_for(lengths=(200, 400), seeds=(0, 1), protocols=("query-aware", "query-agnostic"))
    assert len({str(cell) for cell in cells(settings)}) == 8
    with pytest.raises(ResultsError, match="two samples"):
        settings_for(samples=1)


def test_what_cannot_be_drawn_is_known_before() -> None:
    _, tokenizer = tiny()
    check_samples(settings_for(), tokenizer, [Toy(), OtherToy()])
    with pytest.raises(TaskError):
        check_samples(settings_for(lengths=(400, 20)), tokenizer, [Toy()])
