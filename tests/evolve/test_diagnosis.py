"""What a search says of itself: drift of its seed, and why it does not get better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvkeep.evolve.diagnosis import drift_of, plateau
from kvkeep.evolve.evaluation import Evaluation
from kvkeep.evolve.history import SearchLog
from kvkeep.evolve.loop import SearchSettings, search, search_facts
from kvkeep.evolve.mutators.grammar import Grammar
from kvkeep.evolve.program import seed_program

from .test_loop import SEEDS, Pretended


def test_a_seed_that_does_not_score_as_before_is_told(tmp_path: Path) -> None:
    class Drifting(Pretended):
        def evaluate(self, programs: Any, known: Any = None, *, gated: bool = True, **rest: Any) -> list[Evaluation]:
            found = super().evaluate(programs, known, gated=gated, **rest)
            if gated or len(self.judged) <= len(SEEDS):
                return found
            return [replace(evaluation, fitness=(evaluation.fitness or 0.0) - 3) for evaluation in found]

    cascade: Any = Drifting()
    chosen, seeds = SearchSettings(islands=2, generation=4, seed_again=3), [seed_program(name) for name in SEEDS]
    with SearchLog(tmp_path, search_facts(chosen, cascade.settings, Grammar(), seeds)) as log:
        result = search(log, chosen, cascade, Grammar(), seeds, candidates=26)
    assert result.history.drift() == [(3, pytest.approx(-3)), (6, pytest.approx(-3))]
    assert "after generation 3: -3.0 points" in result.diagnosis[0]
    last = result.history.generations[-1]
    gone = replace(last, seed_again=Evaluation(seeds[0].digest, "refused", "probe", "crash"))
    history = replace(result.history, generations=(*result.history.generations[:2], gone))
    assert "not evaluated to the end" in drift_of(history)[0]
    assert drift_of(replace(history, generations=history.generations[:2])) == []


def test_a_plateau_is_told_in_words() -> None:
    assert plateau([], {}, None, 0) == []
    assert plateau([(0, 50.0), (18, 60.0)], {"evaluated": 20}, 3.0, 9) == []  # it is still getting better
    said = plateau([(0, 50.0), (5, 51.0)], {"evaluated": 12, "duplicate": 40, "gated": 8}, 4.0, 2)
    assert said[0] == "No better program came in the last 54 of 60 candidates; the best is number 5."
    text = " ".join(said)
    assert "67% of the candidates keep the very entries" in text
    assert "1.00 points above the seed, less than the 4.00" in text
    assert "Only 2 cells" in text
    assert "fall at the first stage" not in text
    assert "fall at the first stage" in " ".join(plateau([(0, 50.0)], {"gated": 30, "evaluated": 5}, None, 9))
    assert "refused" in " ".join(plateau([(0, 50.0)], {"refused": 10, "rejected": 10, "evaluated": 15}, None, 9))
    assert "no better member" in plateau([(0, 50.0), (1, 70.0)], {"evaluated": 40}, 1.0, 9)[-1]
