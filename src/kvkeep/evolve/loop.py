"""The search: parents are drawn, programs proposed, judged together, and kept where they are the best of their kind.

Everything that is left to chance is drawn from the run's seed and from counters (generation and place), so that a
search which is killed and begun again draws the same. What it found stands in the log, and is read back from there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kvkeep.errors import ResultsError
from kvkeep.evolve.archive import Archive
from kvkeep.evolve.cascade import Cascade
from kvkeep.evolve.diagnosis import diagnosis_of
from kvkeep.evolve.evaluation import CascadeSettings, Evaluation
from kvkeep.evolve.history import Candidate, Generation, History, SearchLog, with_evaluation
from kvkeep.evolve.mutators.protocol import Mutator, Parent, Proposal, SpendLimitReached
from kvkeep.evolve.program import Program

PARENTS, MUTATION = 0, 1  # streams of chance


@dataclass(frozen=True)
class SearchSettings:
    """How a search goes about it.

    Attributes:
        islands: apart but for migration.
        generation: candidates that are judged together.
        migration: generations between two migrations.
        parents: programs that a proposal may look at: the first is changed.
        seed: of everything that is left to chance.
        seed_again: generations between two times that the seed program is judged again, to see that the same program
            still has the same score.
    """

    islands: int = 4
    generation: int = 8
    migration: int = 5
    parents: int = 2
    seed: int = 0
    seed_again: int = 5

    def __post_init__(self) -> None:
        least = {name: value for name, value in asdict(self).items() if name != "seed"}
        if min(least.values()) < 1:
            raise ResultsError(
                expected="islands, generation, migration, parents and seed_again of at least 1",
                received=f"{least}",
                remedy="for example SearchSettings(islands=4, generation=8)",
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """How far a search is, for whoever watches it.

    Attributes:
        done: candidates that were judged.
        total: candidates that there will be.
        stage: that some are in now; empty between generations.
        going: how many are in it.
        best: fitness of the best; None if there is none.
        seed: fitness of the first seed.
        counts: candidates by status.
    """

    done: int
    total: int
    stage: str = ""
    going: int = 0
    best: float | None = None
    seed: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchResult:
    """What a search came to.

    Attributes:
        history: all of it.
        archive: islands at the end.
        stopped: why it ended before all candidates were there; empty if it did not.
        diagnosis: why it may have stopped to get better, in words.
    """

    history: History
    archive: Archive
    stopped: str
    diagnosis: tuple[str, ...]


def search_facts(
    settings: SearchSettings, cascade: CascadeSettings, mutator: Mutator, seeds: Sequence[Program], **more: Any
) -> dict[str, Any]:
    """What the numbers of a search hang on, as its log keeps it; a search goes on with the same ones only.

    Args:
        settings: how it goes about it.
        cascade: how candidates are judged.
        mutator: proposes them.
        seeds: programs to begin with.
        more: model, samples, versions; JSON-able.
    """
    return {
        "search": settings.to_dict(),
        "cascade": cascade.to_dict(),
        "mutator": mutator.name,
        "seeds": [[seed.name, seed.digest] for seed in seeds],  # in order: islands begin with them
        **more,
    }


def search(
    log: SearchLog,
    settings: SearchSettings,
    cascade: Cascade,
    mutator: Mutator,
    seeds: Sequence[Program],
    *,
    candidates: int,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> SearchResult:
    """Search, or go on with a search that was interrupted.

    Args:
        log: made with what `search_facts` gave.
        settings: how.
        cascade: judges candidates.
        mutator: proposes them.
        seeds: programs to begin with, at least one; island i begins with seed i, i + n, and so on.
        candidates: to propose, seeds not counted. The same folder may be given a larger number later.
        on_progress: told how far it is.

    Raises:
        ResultsError: no seed that can be evaluated.
        MutatorError: the mutator cannot go on at all.
    """
    if not seeds:
        raise ResultsError(expected="a seed program", received="none", remedy="for example seed_program('frc')")
    return _Search(log, settings, cascade, mutator, seeds, candidates, on_progress).run()


class _Search:
    """One run of the loop."""

    def __init__(
        self,
        log: SearchLog,
        settings: SearchSettings,
        cascade: Cascade,
        mutator: Mutator,
        seeds: Sequence[Program],
        candidates: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.log, self.settings, self.cascade, self.mutator = log, settings, cascade, mutator
        self.seeds, self.total, self.on_progress = seeds, candidates, on_progress
        self.archive = Archive.of(settings.islands)
        self.known: dict[str, Candidate] = {}  # by digest
        self.behaviours: dict[str, str] = {}  # digests
        self.generations: list[Generation] = []

    @property
    def history(self) -> History:
        """What is known by now."""
        return replace(self.log.history, generations=tuple(self.generations))

    def run(self) -> SearchResult:
        history = self.log.history
        if history.yardstick is None:
            self._say("yardstick", 0)
            yardstick = self.cascade.measure_yardstick()
            self.log.append({"key": "yardstick", "yardstick": yardstick.to_dict()})
        else:
            self.cascade.yardstick = history.yardstick
        for generation in history.generations:
            self._take(generation)
        if not history.generations:
            self._append(self._first())
        elif history.generations[-1].mutator_state:
            self.mutator.restore(history.generations[-1].mutator_state)
        stopped = ""
        while not stopped and (missing := self.total + len(self.seeds) - self._count()) > 0:
            try:
                self._append(self._next(min(missing, self.settings.generation)))
            except SpendLimitReached as limit:
                stopped = str(limit)
            self._say("", 0)
        return self._result(stopped)

    # -- generations -----------------------------------------------------------------------------------------------

    def _first(self) -> Generation:
        """The seeds, which pass the gate whatever they reach."""
        started = time.perf_counter()
        evaluations = self.cascade.evaluate(self.seeds, gated=False, on_stage=self._say)
        candidates = [
            Candidate(order, 0, order % self.settings.islands, p.source, p.name, p.digest, "seed", evaluation=e)
            for order, (p, e) in enumerate(zip(self.seeds, evaluations, strict=True))
        ]
        if not any(evaluation.fitness is not None for evaluation in evaluations):
            raise ResultsError(
                expected="a seed program that can be evaluated to the end",
                received="; ".join(f"{c.name}: {e.detail}" for c, e in zip(candidates, evaluations, strict=True)),
                remedy="mend the seed, or begin with one of kvkeep's: --seed-program frc",
            )
        return Generation(0, tuple(candidates), self.mutator.state(), seconds=time.perf_counter() - started)

    def _next(self, count: int) -> Generation:
        started = time.perf_counter()
        number, first = len(self.generations), self._count()
        islands = [(first - len(self.seeds) + place) % self.settings.islands for place in range(count)]
        batches = [self._parents(number, place, island) for place, island in enumerate(islands)]
        randoms = [self._random(number, place, MUTATION) for place in range(count)]
        self._say("proposing", count)
        proposals = self.mutator.propose_many(batches, randoms)
        candidates = [
            _candidate(proposal, first + place, number, islands[place]) for place, proposal in enumerate(proposals)
        ]
        judged = self._judge(candidates, proposals)
        again = None if number % self.settings.seed_again else self._judge_seed()
        seconds = time.perf_counter() - started
        return Generation(number, tuple(judged), self.mutator.state(), seconds=seconds, seed_again=again)

    def _judge_seed(self) -> Evaluation | None:
        """Judge the seed as if it were new: what it is told to have now must be what it had at first."""
        seed = self.history.reference
        if seed is None:
            return None
        (again,) = self.cascade.evaluate([Program(seed.source, seed.name)], gated=False, on_stage=self._say)
        return again

    def _judge(self, candidates: Sequence[Candidate], proposals: Sequence[Proposal]) -> list[Candidate]:
        """Evaluate those whose text is new."""
        new: dict[str, Program] = {}
        for proposal in proposals:
            if proposal.program is not None and proposal.program.digest not in self.known:
                new.setdefault(proposal.program.digest, proposal.program)
        found = self.cascade.evaluate(list(new.values()), self.behaviours, on_stage=self._say) if new else []
        evaluations = {evaluation.digest: evaluation for evaluation in found}
        judged = []
        for candidate in candidates:
            if not candidate.digest:
                judged.append(candidate)
                continue
            # The first candidate of a text takes its evaluation; others, also of this generation, are duplicates.
            evaluation = evaluations.pop(candidate.digest, None) or _same_text(candidate.digest)
            judged.append(with_evaluation(candidate, evaluation))
        return judged

    def _append(self, generation: Generation) -> None:
        """Take a new generation in, and write it down with the migrations at its end."""
        moves = self._take(generation)
        self.generations[-1] = replace(generation, migrations=tuple(moves))
        self.log.append(self.generations[-1].to_dict())

    def _take(self, generation: Generation) -> list[tuple[int, int, str]]:
        """Bring the state of the search behind a generation, new or read from the log."""
        self.generations.append(generation)
        for candidate in generation.candidates:
            evaluation = candidate.evaluation
            if evaluation is None:
                continue
            self.known.setdefault(candidate.digest, candidate)
            if evaluation.behaviour:
                self.behaviours.setdefault(evaluation.behaviour, candidate.digest)
            if evaluation.fitness is not None:
                self.archive.add(
                    candidate.island, candidate.digest, evaluation.fitness, evaluation.traits, candidate.order
                )
        if generation.number == 0:
            seeds = [c.evaluation for c in generation.candidates if c.evaluation and c.evaluation.stage1]
            self.cascade.lower_gate(max(seeds, key=lambda e: e.stage1.mean if e.stage1 else 0.0))
        if generation.number and generation.number % self.settings.migration == 0:
            return self.archive.migrate()
        return []

    # -- chance ----------------------------------------------------------------------------------------------------

    def _random(self, generation: int, place: int, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.settings.seed, generation, place, stream])

    def _parents(self, generation: int, place: int, island: int) -> list[Parent]:
        elites = self.archive.parents(island, self.settings.parents, self._random(generation, place, PARENTS))
        found = []
        for elite in elites:
            candidate = self.known[elite.digest]
            program = Program(candidate.source, candidate.name)
            found.append(Parent(program, elite.fitness, feedback_of(candidate.evaluation)))
        return found

    # -- telling ---------------------------------------------------------------------------------------------------

    def _count(self) -> int:
        return sum(len(generation.candidates) for generation in self.generations)

    def _say(self, stage: str, going: int) -> None:
        candidates = [candidate for generation in self.generations for candidate in generation.candidates]
        seed, best = candidates[0].evaluation if candidates else None, self.archive.best()
        self.on_progress(
            Progress(
                done=max(0, len(candidates) - len(self.seeds)),
                total=self.total,
                stage=stage,
                going=going,
                best=None if best is None else best.fitness,
                seed=None if seed is None else seed.fitness,
                counts=Counter(candidate.status for candidate in candidates),
            )
        )

    def _result(self, stopped: str) -> SearchResult:
        history = self.history
        return SearchResult(history, self.archive, stopped, tuple(diagnosis_of(history, self.archive)))


def replay(history: History) -> Archive:
    """The islands of a search, rebuilt from its log."""
    settings = SearchSettings(**history.settings["search"])
    archive = Archive.of(settings.islands)
    for generation in history.generations:
        for candidate in generation.candidates:
            evaluation = candidate.evaluation
            if evaluation is not None and evaluation.fitness is not None:
                archive.add(candidate.island, candidate.digest, evaluation.fitness, evaluation.traits, candidate.order)
        if generation.number and generation.number % settings.migration == 0:
            archive.migrate()
    return archive


def feedback_of(evaluation: Evaluation | None) -> str:
    """What an evaluation says to whoever changes the program, in words."""
    if evaluation is None:
        return ""
    lines = []
    for name, score in (("stage 1", evaluation.stage1), ("stage 2", evaluation.stage2)):
        if score is not None:
            between = "" if score.low is None or score.high is None else f" [{score.low:.1f}, {score.high:.1f}]"
            lines.append(f"{name}: {score.mean:.1f} points{between} on {score.n} samples; 100 is the full cache")
    if evaluation.traits is not None:
        t = evaluation.traits
        lines.append(
            f"kept: {t.overlap:.0%} in common with SnapKV, runs of {t.run_length:.1f} positions, {t.recent:.0%} among "
            f"the last 64, {t.mass:.0%} of the attention"
        )
    if evaluation.detail:
        lines.append(f"{evaluation.status} at {evaluation.stage}: {evaluation.detail}")
    return "\n".join(lines)


def _candidate(proposal: Proposal, order: int, generation: int, island: int) -> Candidate:
    program = proposal.program
    return Candidate(
        order=order,
        generation=generation,
        island=island,
        source="" if program is None else program.source,
        name="" if program is None else program.name,
        digest="" if program is None else program.digest,
        mutator=proposal.mutator,
        parents=proposal.parents,
        note=proposal.note,
        tokens=proposal.tokens,
        rejection=proposal.rejection,
    )


def _same_text(digest: str) -> Evaluation:
    return Evaluation(digest, "duplicate", "source", "text", "the same program was proposed before", twin=digest)
