"""From cheap to dear: what is refused, repeated or hopeless is found before it costs forwards of the model.

    source          the text, by an allow-list
    probe           the program runs in the sandbox, on the contexts of all samples and on canaries: invariants; what it
                    keeps of the probe's samples is hashed. One start of the sandbox serves a batch of candidates
    reconstruction  optional: how far attention to what it keeps is from attention to everything; no forward
    stage1          few samples; below the gate it ends here
    stage2          the others

CacheCraft 2026 (arXiv 2608.14555): fitness is `0.25 S1 + 0.75 S2`, and stage 1 rejects below 45 of 100, about half of
the full cache's score. Here the stages share no sample. A program that does not reach the end has no fitness at all, so
that no lucky first stage is ever compared with a whole evaluation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from kvkeep.errors import PolicyError, ResultsError
from kvkeep.evolve.canaries import Canaries, flag_ceiling, flag_identical
from kvkeep.evolve.context import PrefillContext
from kvkeep.evolve.evaluating import (
    Job,
    Reader,
    Reading,
    full_job,
    job_of_policy,
    jobs_of,
    random_job,
    read_side_by_side,
)
from kvkeep.evolve.evaluation import CascadeSettings, Evaluation, Score, Status, Yardstick
from kvkeep.evolve.guard import PolicyRefused, check_source
from kvkeep.evolve.program import Indices, Program
from kvkeep.evolve.reconstruction import reconstruction_error
from kvkeep.evolve.sample_store import SampleSet
from kvkeep.evolve.samples import Recorded, Split
from kvkeep.evolve.sandbox import Sandbox
from kvkeep.evolve.traits import behaviour_of, snapkv_sets, traits_of
from kvkeep.policies import parse_prompt_policy
from kvkeep.results.statistics import Estimate, Measurement, mean_interval, stratified_mean

ASKED: tuple[Split, ...] = ("probe", "stage1", "stage2")  # splits whose contexts candidates are asked about
WEIGHTS = (0.25, 0.75)
RANDOM_DRAWS = 2
CANARIES = 6  # recorded contexts whose changed twins are tried, at most
DECIMALS = 4  # of log-probabilities that are compared with the full cache's: other sums round otherwise


@dataclass
class _Candidate:
    """One program on its way, or a policy, which has none."""

    program: Program | None
    evaluation: Evaluation
    going: bool = True
    scores: dict[str, Score] = field(default_factory=dict)
    kept: dict[Split, Sequence[Indices]] = field(default_factory=dict)  # of each context, by split

    def stop(self, status: Status, stage: str, reason: str, detail: str, **more: Any) -> None:
        self.going = False
        facts: dict[str, Any] = more | self.scores
        self.note(status=status, stage=stage, reason=reason, detail=detail, **facts)

    def note(self, **facts: Any) -> None:
        self.evaluation = replace(self.evaluation, **facts)


class Cascade:
    """Judges candidates on recorded samples.

    Args:
        samples: with the splits probe, stage1 and stage2.
        settings: how.
        read: reads jobs on the model; `Evaluator.read`, or an executor's.
        sandbox: an open one.
    """

    def __init__(self, samples: SampleSet, settings: CascadeSettings, read: Reader, sandbox: Sandbox) -> None:
        self.samples, self.settings, self._read, self._sandbox = samples, settings, read, sandbox
        self._contexts: dict[Split, list[PrefillContext]] = {}
        probe = self.contexts("probe")
        self._snapkv = snapkv_sets(probe)
        self._canaries = Canaries.of(probe[:: -(-len(probe) // CANARIES)])
        self._random_error: float | None = None
        self.yardstick: Yardstick | None = None

    def contexts(self, split: Split) -> list[PrefillContext]:
        """What programs see of a split: its samples one after the other, the layers of each in order."""
        if split not in self._contexts:
            self._contexts[split] = [
                context
                for sample in self.samples[split]
                for context in sample.contexts(sample.entries(self.settings.budget))
            ]
        return self._contexts[split]

    # -- the yardstick ---------------------------------------------------------------------------------------------

    def measure_yardstick(self) -> Yardstick:
        """Score the full cache and random entries; the gate is half of the full cache's score until a seed is known.

        Raises:
            ResultsError: samples on which the full cache is no better than random entries: nothing can be told there.
        """
        pool = self.samples.of("stage1", "stage2")
        full = self._read([full_job(sample) for sample in pool])
        zero, hundred = 0.0, 1.0
        if self.settings.measure == "logprob":
            jobs = [
                random_job(sample, sample.entries(self.settings.budget), draw)
                for draw in range(RANDOM_DRAWS)
                for sample in pool
            ]
            drawn = self._read(jobs)
            zero = _mean([*pool] * RANDOM_DRAWS, [reading.logprob for reading in drawn])
            hundred = _mean(pool, [reading.logprob for reading in full])
            if not hundred > zero:
                raise ResultsError(
                    expected="samples whose answers the full cache makes more likely than random entries do",
                    received=f"mean log-probabilities {hundred:.3f} and {zero:.3f}",
                    remedy="choose tasks that the model can do, a tighter budget, or more samples",
                )
        yardstick = Yardstick(zero, hundred, {}, 0.0)
        first = len(self.samples["stage1"])
        scores = {
            "stage1": self._score("stage1", full[:first], yardstick),
            "stage2": self._score("stage2", full[first:], yardstick),
        }
        self.yardstick = replace(yardstick, full=scores, gate=self.settings.gate * scores["stage1"].mean)
        return self.yardstick

    def lower_gate(self, seed: Evaluation) -> None:
        """Ask stage 1 for no more than the same share of what the seed reached, where that is less than the full cache.

        Without it a search whose seed keeps less than half would refuse its own seed.

        Args:
            seed: evaluated to the end.
        """
        yardstick = self._yardstick
        if seed.stage1 is not None:
            reached = seed.stage1.mean
            wanted = reached - (1 - self.settings.gate) * abs(reached)
            self.yardstick = replace(yardstick, gate=min(yardstick.gate, wanted))

    # -- candidates ------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        programs: Sequence[Program],
        known: Mapping[str, str] | None = None,
        *,
        gated: bool = True,
        on_stage: Callable[[str, int], None] = lambda stage, going: None,
    ) -> list[Evaluation]:
        """Judge some candidates together.

        Args:
            programs: candidates.
            known: digests of earlier programs by their behaviour; None evaluates duplicates too.
            gated: false lets all that run reach the end, as for seeds and controls.
            on_stage: told before each stage how many go into it.
        """
        candidates = [_Candidate(program, Evaluation(program.digest, "refused", "source")) for program in programs]
        on_stage("source", len(candidates))
        for candidate, program in zip(candidates, programs, strict=True):
            try:
                check_source(program.source)
            except PolicyRefused as refusal:
                _refuse(candidate, refusal, "source")
        self._probe(_going(candidates), known, on_stage)
        if self.settings.reconstruction:
            self._reconstruct(_going(candidates), on_stage)
        for stage in ("stage1", "stage2"):
            self._stage(stage, _going(candidates), gated, on_stage)
        return [_finished(candidate) for candidate in candidates]

    def evaluate_policies(self, policies: Sequence[str], *, gated: bool = True) -> list[Evaluation]:
        """Judge built-in policies on the same samples; they need no sandbox, and heads may keep different entries.

        Args:
            policies: as on the command line; they may need no more than the last queries.
            gated: as in `evaluate`.

        Returns:
            Evaluations without behaviour and traits; the policy's text stands in the place of the digest.
        """
        candidates = [_Candidate(None, Evaluation(policy, "refused", "source")) for policy in policies]
        parsed = [parse_prompt_policy(policy) for policy in policies]
        stages: tuple[Literal["stage1", "stage2"], ...] = ("stage1", "stage2")
        for stage in stages:
            going = [(c, p) for c, p in zip(candidates, parsed, strict=True) if c.going]
            entries = [
                (candidate, [job_of_policy(s, policy, s.entries(self.settings.budget)) for s in self.samples[stage]])
                for candidate, policy in going
            ]
            self._read_stage(stage, entries, gated)
        return [_finished(candidate) for candidate in candidates]

    def metrics(self, source: str) -> dict[str, float]:
        """The numbers of one program, for another engine of search: `combined_score` is its fitness.

        Args:
            source: of the program.

        Raises:
            PolicyError: the program is none, or was not evaluated to the end: it has no numbers.
        """
        (found,) = self.evaluate([Program(source)])
        if found.fitness is None or found.traits is None or found.stage1 is None or found.stage2 is None:
            raise PolicyError(
                expected="a program that is evaluated to the end",
                received=f"{found.status} at {found.stage}: {found.detail}",
                remedy="see the reason; nothing half evaluated has a score",
            )
        stages = {"stage1": found.stage1.mean, "stage2": found.stage2.mean}
        return {"combined_score": found.fitness, **stages, **found.traits.to_dict()}

    def _probe(
        self, candidates: list[_Candidate], known: Mapping[str, str] | None, on_stage: Callable[[str, int], None]
    ) -> None:
        on_stage("probe", len(candidates))
        contexts, seen = self.contexts("probe"), dict(known or {})
        for candidate, kept in self._run(candidates):
            if (refusal := self._canaries.judge(kept)) is not None:
                _refuse(candidate, refusal)
                continue
            behaviour = behaviour_of(candidate.kept["probe"])
            traits = traits_of(contexts, candidate.kept["probe"], self._snapkv)
            candidate.note(stage="probe", behaviour=behaviour, traits=traits)
            digest = candidate.evaluation.digest
            twin = seen.setdefault(behaviour, digest)
            if known is not None and twin != digest:
                detail = f"it keeps on the probe what {twin[:12]} keeps"
                candidate.stop("duplicate", "probe", "behaviour", detail, twin=twin)

    def _reconstruct(self, candidates: list[_Candidate], on_stage: Callable[[str, int], None]) -> None:
        on_stage("reconstruction", len(candidates))
        samples = self.samples["probe"]
        entries = [sample.entries(self.settings.budget) for sample in samples]
        if self._random_error is None:
            jobs = [random_job(sample, count) for sample, count in zip(samples, entries, strict=True)]
            self._random_error = float(np.mean([reconstruction_error(job) for job in jobs]))
        for candidate in candidates:
            error = float(np.mean([reconstruction_error(job) for job in jobs_of(samples, candidate.kept["probe"])]))
            candidate.note(stage="reconstruction", reconstruction=error)
            if error > self._random_error:
                detail = f"error {error:.3f} on rows of attention; random entries have {self._random_error:.3f}"
                candidate.stop("gated", "reconstruction", "reconstruction", detail)

    def _stage(
        self,
        stage: Literal["stage1", "stage2"],
        candidates: list[_Candidate],
        gated: bool,
        on_stage: Callable[[str, int], None],
    ) -> None:
        on_stage(stage, len(candidates))
        jobs = [(candidate, jobs_of(self.samples[stage], candidate.kept[stage])) for candidate in candidates]
        self._read_stage(stage, jobs, gated)

    def _read_stage(
        self, stage: Literal["stage1", "stage2"], entries: Sequence[tuple[_Candidate, Sequence[Job]]], gated: bool
    ) -> None:
        """Score what candidates keep, and stop those that are too good or not good enough.

        Args:
            stage: whose samples the jobs are about.
            entries: candidates, each with one job for each sample.
            gated: false lets all go on.
        """
        yardstick, samples = self._yardstick, self.samples[stage]
        started = time.perf_counter()
        readings = read_side_by_side(self._read, [jobs for _, jobs in entries])
        seconds = (time.perf_counter() - started) / max(1, len(entries))
        for (candidate, _), mine in zip(entries, readings, strict=True):
            score = self._score(stage, mine, yardstick)
            candidate.scores[stage] = score
            candidate.note(stage=stage, model_seconds=candidate.evaluation.model_seconds + seconds)
            full = yardstick.full[stage]
            refusal = flag_identical(
                [np.round(reading.logprobs, DECIMALS) for reading in mine],
                [np.round(sample.facts.full, DECIMALS) for sample in samples],
            )
            if refusal is None and full.low is not None and full.high is not None:
                refusal = flag_ceiling(score.mean, full.low, full.high)
            if refusal is not None:
                candidate.stop("flagged", stage, refusal.reason, str(refusal))
            elif stage == "stage1" and gated and score.mean < yardstick.gate:
                detail = f"{score.mean:.1f} points; the gate asks for {yardstick.gate:.1f}"
                candidate.stop("gated", stage, "gate", detail)

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _yardstick(self) -> Yardstick:
        return self.yardstick or self.measure_yardstick()

    def _run(self, candidates: Sequence[_Candidate]) -> list[tuple[_Candidate, Sequence[Indices]]]:
        """Run candidates on all that they will be asked about, and note what they keep of the splits.

        Returns:
            Those that no guard has refused, each with what it keeps of the canaries.
        """
        if not candidates:
            return []
        asked = {split: self.contexts(split) for split in ASKED}
        everything = [*self._canaries.contexts, *itertools.chain.from_iterable(asked.values())]
        started = time.perf_counter()
        outcomes = self._sandbox.run([c.program for c in candidates if c.program is not None], everything)
        seconds = (time.perf_counter() - started) / len(candidates)
        passed: list[tuple[_Candidate, Sequence[Indices]]] = []
        for candidate, outcome in zip(candidates, outcomes, strict=True):
            candidate.note(guard_seconds=seconds)
            if outcome.refusal is not None or outcome.selections is None:
                _refuse(candidate, outcome.refusal)
                continue
            answers = iter(outcome.selections)
            passed.append((candidate, list(itertools.islice(answers, len(self._canaries.contexts)))))
            candidate.kept = {split: list(itertools.islice(answers, len(asked[split]))) for split in ASKED}
        return passed

    def _score(self, stage: Split, readings: Sequence[Reading], yardstick: Yardstick) -> Score:
        samples = self.samples[stage]
        raw = [r.logprob if self.settings.measure == "logprob" else float(r.score or 0.0) for r in readings]
        values = [yardstick.points(value) for value in raw]
        return score_of(samples, values)


def score_of(samples: Sequence[Recorded], values: Sequence[float]) -> Score:
    """Mean and interval of values in points, one for each sample."""
    estimate: Estimate = mean_interval(measurements(samples, values))
    return Score(estimate.mean, estimate.low, estimate.high, len(values), estimate.note, tuple(values))


def measurements(samples: Sequence[Recorded], values: Sequence[float]) -> list[Measurement]:
    """Values as the statistics take them: strata are tasks at a length, and each sample is a cluster of its own."""
    return [
        Measurement(sample.facts.stratum, sample.facts.sample, sample.facts.sample, value)
        for sample, value in zip(samples, values, strict=True)
    ]


def _mean(samples: Sequence[Recorded], values: Sequence[float]) -> float:
    return stratified_mean(measurements(samples, values))


def _finished(candidate: _Candidate) -> Evaluation:
    """What became of a candidate; only one that went through both stages has a fitness."""
    if not candidate.going:
        return candidate.evaluation
    scores = candidate.scores
    fitness = WEIGHTS[0] * scores["stage1"].mean + WEIGHTS[1] * scores["stage2"].mean
    candidate.note(
        status="evaluated", stage="stage2", fitness=fitness, stage1=scores["stage1"], stage2=scores["stage2"]
    )
    return candidate.evaluation


def _going(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    return [candidate for candidate in candidates if candidate.going]


def _refuse(candidate: _Candidate, refusal: PolicyRefused | None, stage: str = "probe") -> None:
    if refusal is None:
        candidate.stop("refused", stage, "output", "it gave no selection")
        return
    candidate.stop("refused", stage, refusal.reason, str(refusal))
