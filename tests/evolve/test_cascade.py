"""The cascade: who stops where, what a stage is made of, and that nothing half evaluated has a fitness."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvkeep import Budget
from kvkeep.errors import PolicyError, ResultsError
from kvkeep.evolve.cascade import WEIGHTS, Cascade
from kvkeep.evolve.evaluating import Evaluator, Job, Reading, full_job, job_of, random_job
from kvkeep.evolve.evaluation import CascadeSettings, Evaluation, Score, Yardstick
from kvkeep.evolve.program import Program, seed_program
from kvkeep.evolve.sample_store import SampleSet
from kvkeep.evolve.sandbox import Sandbox

from .toys import collected, tiny

RATIO = 0.6

BLOCK = """
def score_tokens(context):
    return {scores}


def select_tokens_to_keep(scores, context):
    return {kept}
"""


def program(scores: str = "context.global_attention", kept: str = "") -> Program:
    kept = kept or "np.sort(np.argsort(-scores, kind='stable')[: context.K])"
    return seed_program("frc").with_block(BLOCK.format(scores=scores, kept=kept), "made")


class Reads:
    """Reads on the model, and counts; or says what it is told to."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.jobs, self.calls = evaluator, 0, 0
        self.lift = 0.0

    def __call__(self, jobs: Any) -> list[Reading]:
        self.jobs += len(jobs)
        self.calls += 1
        found = self.evaluator.read(jobs)
        return [replace(reading, logprobs=tuple(x + self.lift for x in reading.logprobs)) for reading in found]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluator, SampleSet]:
    """A random model for which the full cache is the better one: that is what the samples' answers are made of."""
    model, tokenizer = tiny()
    evaluator = Evaluator(model, tokenizer, batch_rows=16)
    samples = collected(tmp_path_factory.mktemp("samples"), (model, tokenizer), stage1=2, stage2=3)
    return evaluator, SampleSet({split: told_by_model(evaluator, of) for split, of in samples.splits.items()})


def told_by_model(evaluator: Evaluator, samples: Any) -> Any:
    """The same texts with the answers that the full cache gives: a random model knows no others."""
    found = []
    writer = Evaluator(evaluator.model, evaluator.tokenizer, generate=True)
    for sample in samples:
        text = writer.read([full_job(sample)])[0].text
        ids = tuple(evaluator.tokenizer(text, add_special_tokens=False)["input_ids"])[:4] or sample.facts.reference
        facts = replace(sample.facts, reference=ids)
        told = type(sample)(facts, sample.path)
        full = evaluator.read([full_job(told)])[0].logprobs
        found.append(type(sample)(replace(facts, full=full), sample.path))
    return tuple(found)


@pytest.fixture
def reads(loaded: Any) -> Reads:
    return Reads(loaded[0])


@pytest.fixture(scope="module")
def sandbox() -> Any:
    with Sandbox() as opened:
        yield opened


def cascade_of(loaded: Any, reads: Any, sandbox: Any, **changes: Any) -> Cascade:
    settings = CascadeSettings(Budget(compression_ratio=RATIO), **changes)
    return Cascade(loaded[1], settings, reads, sandbox)


def test_points_are_the_share_of_the_gap_between_random_and_full(loaded: Any, reads: Reads, sandbox: Any) -> None:
    cascade = cascade_of(loaded, reads, sandbox)
    yardstick = cascade.measure_yardstick()
    pool = loaded[1].of("stage1", "stage2")
    by_task: dict[str, list[float]] = {}
    for sample in pool:
        drawn = [loaded[0].read([random_job(sample, sample.entries(cascade.settings.budget), d)])[0] for d in (0, 1)]
        by_task.setdefault(sample.facts.task, []).append(float(np.mean([r.logprob for r in drawn])))
    assert yardstick.zero == pytest.approx(np.mean([np.mean(values) for values in by_task.values()]), abs=1e-5)
    assert yardstick.points(yardstick.hundred) == 100
    assert yardstick.points(yardstick.zero) == 0
    first, second = (yardstick.full[stage] for stage in ("stage1", "stage2"))
    assert (first.n, second.n) == (4, 6)
    assert (4 * first.mean + 6 * second.mean) / 10 == pytest.approx(100, abs=1e-6)
    assert yardstick.gate == 0.5 * first.mean
    assert Yardstick.from_dict(json.loads(json.dumps(yardstick.to_dict()))) == yardstick


def test_a_program_that_goes_through_has_the_fitness_of_both_stages(loaded: Any, reads: Reads, sandbox: Any) -> None:
    cascade = cascade_of(loaded, reads, sandbox, gate=0.0)
    cascade.measure_yardstick()
    seed = seed_program("frc")
    (found,) = cascade.evaluate([seed], gated=False)
    assert (found.status, found.stage, found.digest) == ("evaluated", "stage2", seed.digest)
    assert found.stage1 is not None
    assert found.stage2 is not None
    assert found.fitness == pytest.approx(WEIGHTS[0] * found.stage1.mean + WEIGHTS[1] * found.stage2.mean)
    assert found.guard_seconds > 0
    assert found.model_seconds > 0
    functions = seed.functions()
    for stage, score in (("stage1", found.stage1), ("stage2", found.stage2)):
        for sample, points in zip(loaded[1][stage], score.values, strict=True):
            contexts = sample.contexts(sample.entries(cascade.settings.budget))
            kept = [functions.select_tokens_to_keep(functions.score_tokens(c), c) for c in contexts]
            alone = loaded[0].read([job_of(sample, kept)])[0]
            assert points == pytest.approx(cascade.yardstick.points(alone.logprob), abs=1e-3)  # type: ignore[union-attr]
    assert Evaluation.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("candidate", "stage", "reason"),
    [
        (program("open('/etc/passwd')"), "source", "name"),
        (program(kept="np.arange(context.L)"), "probe", "count"),
        (program("context.global_attention / 0"), "probe", "nonfinite"),
        (program("context.global_attention[:3]"), "probe", "shape"),
        (program("1.0 - context.recency"), "probe", "position-keyed"),
    ],
)
def test_what_breaks_a_rule_is_refused_before_any_forward(
    loaded: Any, reads: Reads, sandbox: Any, candidate: Program, stage: str, reason: str
) -> None:
    cascade = cascade_of(loaded, reads, sandbox)
    cascade.measure_yardstick()
    before = reads.jobs
    found, fine = cascade.evaluate([candidate, seed_program("frc")], gated=False)
    assert (found.status, found.stage, found.reason) == ("refused", stage, reason)
    assert found.fitness is None
    assert found.detail
    assert fine.status == "evaluated"
    assert reads.jobs == before + 10  # the other one's samples


def test_what_breaks_on_a_later_sample_is_refused_before_any_forward(loaded: Any, reads: Reads, sandbox: Any) -> None:
    """Else it would stand in the way of one that keeps the same entries of the probe, and does not break."""
    cascade = cascade_of(loaded, reads, sandbox)
    cascade.measure_yardstick()
    last = float(cascade.contexts("stage2")[-1].key_norm.sum())
    fragile = program(f"context.global_attention + np.zeros(1)[int(float(context.key_norm.sum()) == {last!r})]")
    before = reads.jobs
    broken, sound = cascade.evaluate([fragile, program("context.global_attention")], {}, gated=False)
    assert (broken.status, broken.stage, broken.reason, broken.behaviour) == ("refused", "probe", "crash", "")
    assert sound.status == "evaluated"
    assert reads.jobs == before + 10


def test_what_keeps_the_same_entries_is_not_evaluated_twice(loaded: Any, reads: Reads, sandbox: Any) -> None:
    cascade = cascade_of(loaded, reads, sandbox)
    cascade.measure_yardstick()
    one, twin = program("context.global_attention"), program("2 * context.global_attention")
    before = reads.jobs
    first, second = cascade.evaluate([one, twin], {}, gated=False)
    assert first.status == "evaluated"
    assert (second.status, second.twin, second.fitness) == ("duplicate", one.digest, None)
    assert second.behaviour == first.behaviour
    assert reads.jobs == before + 10
    (again,) = cascade.evaluate([twin], {first.behaviour: one.digest})
    assert again.status == "duplicate"
    (whole,) = cascade.evaluate([twin], gated=False)  # where nothing is known, it is
    assert whole.fitness == pytest.approx(first.fitness, abs=1e-3)


def test_below_the_gate_stage_two_is_not_run(loaded: Any, reads: Reads, sandbox: Any) -> None:
    cascade = cascade_of(loaded, reads, sandbox)
    yardstick = cascade.measure_yardstick()
    cascade.yardstick = replace(yardstick, gate=1e6)
    before = reads.jobs
    (found,) = cascade.evaluate([program()])
    assert (found.status, found.stage, found.reason) == ("gated", "stage1", "gate")
    assert found.stage1 is not None
    assert (found.stage2, found.fitness) == (None, None)
    assert reads.jobs == before + 4
    seed = Evaluation("x", "evaluated", "stage2", stage1=Score(30.0, None, None, 2, "", (30.0,)))
    cascade.lower_gate(seed)
    assert cascade.yardstick.gate == 15
    cascade.yardstick = yardstick
    cascade.lower_gate(replace(seed, stage1=Score(-20.0, None, None, 2, "", (-20.0,))))
    assert cascade.yardstick.gate == -30  # below what the seed reached, also where that is below nothing
    cascade.yardstick = yardstick
    cascade.lower_gate(replace(seed, stage1=Score(1000.0, None, None, 2, "", (1000.0,))))
    assert cascade.yardstick.gate == yardstick.gate


def test_what_is_too_good_is_put_aside(loaded: Any, reads: Reads, sandbox: Any) -> None:
    cascade = cascade_of(loaded, reads, sandbox)
    cascade.measure_yardstick()
    reads.lift = 50.0
    (found,) = cascade.evaluate([program()], gated=False)
    assert (found.status, found.reason, found.fitness) == ("flagged", "above-full", None)
    reads.lift = 0.0

    def keeps_everything(jobs: list[Job]) -> list[Reading]:
        return reads([full_job(job.sample) for job in jobs])

    cheated = Cascade(loaded[1], cascade.settings, keeps_everything, sandbox)
    cheated.yardstick = cascade.yardstick
    (found,) = cheated.evaluate([program()], gated=False)
    assert (found.status, found.reason, found.fitness) == ("flagged", "identical-to-full", None)


def test_reconstruction_stops_what_is_worse_than_chance(loaded: Any, reads: Reads, sandbox: Any) -> None:
    cascade = cascade_of(loaded, reads, sandbox, reconstruction=True)
    cascade.measure_yardstick()
    before = reads.jobs
    good, bad = cascade.evaluate([program(), program("-context.global_attention")], gated=False)
    assert good.reconstruction is not None
    assert bad.reconstruction is not None
    assert good.reconstruction < bad.reconstruction
    assert (bad.status, bad.stage) == ("gated", "reconstruction")
    assert (good.status, reads.jobs) == ("evaluated", before + 10)


def test_another_engine_gets_numbers_or_an_error(loaded: Any, reads: Reads, sandbox: Any) -> None:
    cascade = cascade_of(loaded, reads, sandbox, gate=0.0)
    yardstick = cascade.measure_yardstick()
    cascade.yardstick = replace(yardstick, gate=-1e6)
    seed = seed_program("frc")
    metrics = cascade.metrics(seed.source)
    (found,) = cascade.evaluate([seed], gated=False)
    assert metrics["combined_score"] == pytest.approx(found.fitness, abs=1e-6)
    assert set(metrics) == {"combined_score", "stage1", "stage2", "overlap", "run_length", "recent", "mass"}
    cascade.yardstick = replace(yardstick, gate=1e6)
    with pytest.raises(PolicyError, match="gated at stage1"):
        cascade.metrics(seed.source)
    with pytest.raises(PolicyError):
        cascade.metrics("no program")


def test_policies_are_judged_on_the_same_samples(loaded: Any, reads: Reads, sandbox: Any) -> None:
    cascade = cascade_of(loaded, reads, sandbox)
    cascade.measure_yardstick()
    ours, theirs = cascade.evaluate([seed_program("frc")], gated=False)[0], cascade.evaluate_policies(["frc"])[0]
    assert theirs.digest == "frc"
    if theirs.status == "evaluated":  # the seed keeps what the built-in policy keeps
        assert theirs.fitness == pytest.approx(ours.fitness, abs=1e-2)
    else:
        assert theirs.status == "gated"


def test_the_task_score_of_generated_answers(loaded: Any, sandbox: Any) -> None:
    evaluator, samples = loaded
    reads = Reads(Evaluator(evaluator.model, evaluator.tokenizer, generate=True))
    cascade = cascade_of(loaded, reads, sandbox, measure="task")
    yardstick = cascade.measure_yardstick()
    assert (yardstick.zero, yardstick.hundred) == (0, 1)
    (found,) = cascade.evaluate([seed_program("frc")], gated=False)
    assert found.stage1 is not None
    assert set(found.stage1.values) <= {0.0, 100.0}
    assert len(samples["stage1"]) == found.stage1.n


def test_samples_that_tell_nothing_are_refused(loaded: Any, sandbox: Any) -> None:
    def alike(jobs: list[Job]) -> list[Reading]:
        return [Reading((-1.0,)) for _ in jobs]

    with pytest.raises(ResultsError, match="more likely"):
        cascade_of(loaded, alike, sandbox).measure_yardstick()
    with pytest.raises(ResultsError, match="gate"):
        CascadeSettings(Budget(bytes=1000))
    with pytest.raises(ResultsError, match="gate"):
        CascadeSettings(Budget(entries=10), gate=1.0)


def test_a_run_of_the_same_candidates_gives_the_same_numbers(loaded: Any, reads: Reads, sandbox: Any) -> None:
    first, second = (
        cascade_of(loaded, reads, sandbox).evaluate([seed_program("frc"), seed_program("v1-generic")], gated=False)
        for _ in range(2)
    )

    def timeless(found: list[Evaluation]) -> list[Evaluation]:
        return [replace(each, guard_seconds=0.0, model_seconds=0.0) for each in found]

    assert timeless(first) == timeless(second)
