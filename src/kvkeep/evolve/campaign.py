"""A whole search: samples, the loop, what it must beat, and whether what it found holds elsewhere; all in one log."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvkeep.errors import ResultsError
from kvkeep.evolve.cascade import Cascade
from kvkeep.evolve.controls import Control, run_control
from kvkeep.evolve.evaluating import Evaluator
from kvkeep.evolve.evaluation import Evaluation
from kvkeep.evolve.history import Candidate, History, SearchLog
from kvkeep.evolve.loop import Progress, SearchResult, SearchSettings, search
from kvkeep.evolve.mutators.protocol import Mutator
from kvkeep.evolve.program import Program
from kvkeep.evolve.promotion import OTHER, Measured, PromotionSettings, Verdict, cells, measure_cell, verdicts
from kvkeep.evolve.sample_store import SampleStore
from kvkeep.evolve.sandbox import Sandbox
from kvkeep.tasks.protocols import Task

BEST = "best"
OTHERS = 4
# How keys in the log begin. A control has a record for each batch, and one for the whole.
CONTROLS, PARTS, PROMOTION = "controls/", "control-parts/", "promotion/"


@dataclass(frozen=True)
class Campaign:
    """A search and what belongs to it; each part goes on where it was interrupted.

    Attributes:
        log: made with what `search_facts` gave.
        settings: of the search.
        cascade: judges candidates.
        mutator: proposes them.
        seeds: programs to begin with.
    """

    log: SearchLog
    settings: SearchSettings
    cascade: Cascade
    mutator: Mutator
    seeds: Sequence[Program]

    def search(self, candidates: int, on_progress: Callable[[Progress], None] = lambda progress: None) -> SearchResult:
        """Search until so many candidates were proposed; see `loop.search`."""
        return search(
            self.log,
            self.settings,
            self.cascade,
            self.mutator,
            self.seeds,
            candidates=candidates,
            on_progress=on_progress,
        )

    def control(
        self,
        names: Sequence[str],
        evaluations: int,
        mutator: Mutator,
        on_control: Callable[[str, int, int], None] = lambda name, done, total: None,
    ) -> list[Control]:
        """Spend the same number of evaluations on each control; see `controls`.

        Args:
            names: of controls.
            evaluations: of each.
            mutator: for children of the seed; one of the search's kind that has not been asked yet.
            on_control: told which control is at work, how many of its evaluations are done, and how many there will be.
        """
        found = []
        for name in names:
            key = f"{CONTROLS}{name}/{evaluations}"
            if key not in self.log:
                control = run_control(
                    name,
                    self.cascade,
                    self.seeds[0],
                    mutator,
                    evaluations=evaluations,
                    chance=self.settings.seed,
                    on_done=lambda done, total, name=name: on_control(name, done, total),  # type: ignore[misc]
                    kept=partial(self._kept, key.replace(CONTROLS, PARTS, 1)),
                )
                self.log.append({"key": key, **control.to_dict()})
            found.append(Control.from_dict(self.log.history.others[key]))
        return found

    def _kept(self, control: str, batch: str, judge: Callable[[], list[Evaluation]]) -> list[Evaluation]:
        """What a batch of a control came to: read from the log, or judged and written down."""
        key = f"{control}/{batch}"
        if key not in self.log:
            self.log.append({"key": key, "evaluations": [evaluation.to_dict() for evaluation in judge()]})
        return [Evaluation.from_dict(each) for each in self.log.history.others[key]["evaluations"]]

    def promote(
        self,
        settings: PromotionSettings,
        evaluator: Evaluator,
        sandbox: Sandbox,
        store: SampleStore,
        tasks: Sequence[Task],
        unseen: Sequence[Task] = (),
        *,
        model_name: str,
        on_cell: Callable[[str, int, int], None] = lambda cell, done, total: None,
    ) -> list[Verdict]:
        """Measure the best program, its seed and the best of each control elsewhere; see `promotion`.

        Args:
            settings: where.
            evaluator: of this or another model.
            sandbox: an open one.
            store: of recorded samples.
            tasks: that the search had.
            unseen: tasks that it had not.
            model_name: of the evaluator's model, for the results.
            on_cell: told what is measured, how many cells are done, and how many there are.
        """
        history = self.log.history
        contestants = contestants_of(history)
        everything = cells(settings)
        mark = _mark(contestants, settings, [task.name for task in (*tasks, *unseen)])
        for done, cell in enumerate(everything):
            on_cell(str(cell), done, len(everything))
            key = f"{PROMOTION}{mark}/{model_name}/{cell}"
            if key not in self.log:
                rows = measure_cell(
                    cell, settings, contestants, evaluator, sandbox, store, tasks, unseen, model_name=model_name
                )
                self.log.append({"key": key, "rows": [row.to_dict() for row in rows]})
        return verdicts_of(self.log.history)


def contestants_of(history: History, others: int = OTHERS) -> dict[str, Program | str]:
    """The best program, and what it must beat: the first seed, and the best of each control.

    Args:
        history: of the search.
        others: so many more of its candidates, spread over their ranks: whether what is better in the search is better
            elsewhere can be told only of several programs.

    Raises:
        ResultsError: nothing was evaluated yet.
    """
    best = history.best
    if best is None:
        raise ResultsError(expected="a search that has found something", received="none", remedy="search first")
    found: dict[str, Program | str] = {BEST: _program(best)}
    seed = history.candidates[0]
    if seed.digest != best.digest:
        found[f"seed {seed.name}"] = _program(seed)
    for control in controls_of(history):
        at = control.best
        if at is not None and control.name != "seed" and control.evaluations[at].digest != best.digest:
            source = control.sources[at]
            found[control.name] = Program(source, control.names[at]) if source else control.names[at]
    ranked = sorted(
        (c for c in history.candidates if c.evaluation and c.evaluation.fitness is not None),
        key=lambda c: (-(c.evaluation.fitness if c.evaluation and c.evaluation.fitness else 0.0), c.order),
    )
    rest = [c for c in ranked if c.digest not in (best.digest, seed.digest)]
    for at in sorted({round(place) for place in np.linspace(0, len(rest) - 1, min(others, len(rest)))}):
        found[f"{OTHER}{rest[at].order}"] = _program(rest[at])
    return found


def controls_of(history: History) -> list[Control]:
    """The controls that were run, each with the number of evaluations that it was given last."""
    found = [Control.from_dict(record) for key, record in history.others.items() if key.startswith(CONTROLS)]
    return list({control.name: control for control in found}.values())


def measured_of(history: History) -> list[Measured]:
    """Everything that was measured for promotion, of the contestants that came last."""
    keys = [key for key in history.others if key.startswith(PROMOTION)]
    last = keys[-1].split("/")[1] if keys else ""
    return [Measured(**row) for key in keys if key.split("/")[1] == last for row in history.others[key]["rows"]]


def verdicts_of(history: History) -> list[Verdict]:
    """What the measurements say of the best program; nothing where there are none."""
    measured = measured_of(history)
    return verdicts(measured, BEST) if measured else []


def _program(candidate: Candidate) -> Program:
    return Program(candidate.source, candidate.name)


def _mark(contestants: dict[str, Program | str], settings: PromotionSettings, tasks: Sequence[str]) -> str:
    """Tells one promotion from another in the same log: the same contestants on the same samples.

    The model is no part of it, so that those of two models stand together.
    """
    names: list[Any] = [
        (name, given if isinstance(given, str) else given.digest) for name, given in sorted(contestants.items())
    ]
    return hashlib.sha256(repr((names, settings, sorted(tasks))).encode()).hexdigest()[:12]
