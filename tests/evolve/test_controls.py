"""Controls spend the same number of evaluations, and are no searches: no child is ever a parent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvkeep.errors import ResultsError
from kvkeep.evolve.controls import CONTROLS, Control, run_control, tuned_policies
from kvkeep.evolve.evaluation import Evaluation
from kvkeep.evolve.mutators.grammar import Grammar
from kvkeep.evolve.mutators.protocol import MutatorError, Parent, Proposal
from kvkeep.evolve.mutators.reading import read
from kvkeep.evolve.program import Program, seed_program
from kvkeep.policies import parse_policy

from .test_loop import Pretended


class Judge(Pretended):
    """Also judges policies, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.measure_yardstick()
        self.programs: list[Program] = []
        self.policies: list[str] = []
        self.ungated = 0

    def evaluate(self, programs: Sequence[Program], known: Any = None, **rest: Any) -> list[Evaluation]:
        assert known is None  # a control that draws the same twice has spent two evaluations
        self.programs += programs
        self.ungated += 0 if rest.get("gated", True) else len(programs)
        return super().evaluate(programs, known, gated=rest.get("gated", True), on_stage=None)

    def evaluate_policies(self, policies: Sequence[str], *, gated: bool = True) -> list[Evaluation]:
        self.policies += policies
        return [Evaluation(policy, "evaluated", "stage2", fitness=float(len(policy))) for policy in map(str, policies)]


class Noting(Grammar):
    """Notes whose children it made."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: set[str] = set()

    def propose(self, parents: Sequence[Parent], random: np.random.Generator) -> Proposal:
        self.parents |= {parent.program.digest for parent in parents}
        return super().propose(parents, random)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_spends_what_it_may(name: str) -> None:
    judge: Any = Judge()
    mutator, seed = Noting(), seed_program("frc")
    told: list[tuple[int, int]] = []
    control = run_control(
        name, judge, seed, mutator, evaluations=20, on_done=lambda done, total: told.append((done, total))
    )
    spent = len(control.evaluations)
    assert spent == (1 if name == "seed" else 20)
    assert len(judge.programs) + len(judge.policies) == spent
    assert told[-1] == (spent, spent)
    assert mutator.parents <= {seed.digest}
    assert (judge.ungated > 0) == (name == "seed")
    best = control.best
    assert best is not None
    fitness = [evaluation.fitness for evaluation in control.evaluations if evaluation.fitness is not None]
    assert control.evaluations[best].fitness == max(fitness)
    again = Control.from_dict(json.loads(json.dumps(control.to_dict())))
    assert again.best == best
    assert again.evaluations == control.evaluations
    assert again.sources[best] == control.sources[best]
    twice: Any = Judge()
    same = run_control(name, twice, seed, Noting(), evaluations=20)
    assert same.names == control.names
    assert [e.digest for e in same.evaluations] == [e.digest for e in control.evaluations]
    other: Any = Judge()
    run_control(name, other, seed, Noting(), evaluations=20, chance=1)
    if name != "seed":
        assert [p.digest for p in other.programs] + other.policies != [
            p.digest for p in twice.programs
        ] + twice.policies


@pytest.mark.parametrize("name", ["random-weights", "snapkv"])
def test_a_control_that_was_stopped_goes_on_with_the_next_batch(name: str) -> None:
    known: dict[str, list[Evaluation]] = {}

    def kept(batch: str, judge: Any, most: int = 100) -> list[Evaluation]:
        if batch not in known:
            if len(known) == most:
                raise KeyboardInterrupt
            known[batch] = judge()
        return known[batch]

    seed, first, second = seed_program("frc"), Judge(), Judge()
    with pytest.raises(KeyboardInterrupt):
        run_control(name, first, seed, Grammar(), evaluations=20, kept=partial(kept, most=2))  # type: ignore[arg-type]
    assert len(first.programs) + len(first.policies) == 16
    control = run_control(name, second, seed, Grammar(), evaluations=20, kept=kept)  # type: ignore[arg-type]
    assert len(second.programs) + len(second.policies) == 4
    judge: Any = Judge()
    assert control == run_control(name, judge, seed, Grammar(), evaluations=20)
    other: Any = Judge()
    run_control(name, other, seed, Grammar(), evaluations=20, chance=1, kept=kept)
    assert len(other.programs) + len(other.policies) == 20  # other candidates are other batches


def test_weights_alone_are_drawn_and_the_grid_covers_its_ends() -> None:
    judge: Any = Judge()
    seed = seed_program("frc")
    run_control("random-weights", judge, seed, Grammar(), evaluations=12)
    recipe = read(seed)
    assert recipe is not None
    for program in judge.programs:
        drawn = read(program)
        assert drawn is not None
        assert drawn.selection == recipe.selection
        assert [term.feature for term in drawn.terms] == [term.feature for term in recipe.terms]
        assert sum(term.weight for term in drawn.terms) == pytest.approx(1, abs=0.02)
    assert len({program.digest for program in judge.programs}) == 12
    grid: Any = Judge()
    run_control("grid", grid, seed, Grammar(), evaluations=21)  # six values of each weight
    assert len({program.digest for program in grid.programs}) == 21
    alone = [r.terms[0].feature for p in grid.programs if (r := read(p)) is not None and len(r.terms) == 1]
    assert sorted(alone) == sorted(term.feature for term in recipe.terms)


@pytest.mark.parametrize("name", ["snapkv", "chunkkv"])
def test_policies_are_tuned_over_settings_that_differ(name: str) -> None:
    policies = tuned_policies(name, 50, 3)
    assert policies[0] == name
    assert len(policies) == len(set(policies)) == 50
    for text in policies:
        needs = parse_policy(text).needs()
        assert needs.queries is not None
        assert needs.queries <= 64


def test_what_is_no_control_is_refused() -> None:
    judge: Any = Judge()
    with pytest.raises(ResultsError, match="did you mean 'grid'"):
        run_control("grids", judge, seed_program("frc"), Grammar(), evaluations=3)
    odd = seed_program("frc")
    odd = replace(odd, source=odd.source.replace("context.local_attention", "context.local_attention ** 1.5", 1))
    with pytest.raises(MutatorError, match="grammar can read"):
        run_control("random-weights", judge, odd, Grammar(), evaluations=3)
