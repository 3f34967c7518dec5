"""Contexts to try programs on: of layers with random keys, after a second turn, and with features that hold nothing."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np

from kvkeep.evolve.context import FEATURES, PrefillContext, contexts_of
from kvkeep.evolve.guard import check_scores, check_selection
from kvkeep.evolve.program import Program
from kvkeep.testing import random_observation


@cache
def observed(seed: int = 0, length: int = 150, budget: int = 40, ragged: bool = False) -> PrefillContext:
    return contexts_of(random_observation(length=length, budget=budget, ragged=ragged, seed=seed))[0]


def filled(value: float, length: int = 50, budget: int = 23) -> PrefillContext:
    """All features the same number everywhere, save for the position."""
    features = {name: np.full(length, value, dtype=np.float32) for name in FEATURES}
    features["position"] = np.arange(length, dtype=np.float32)
    return PrefillContext(**features, L=length, K=budget, H=4, Q=64, layer=0)


@cache
def all_kinds() -> tuple[PrefillContext, ...]:
    shapes = [(150, 40), (150, 149), (41, 39), (61, 59), (30, 5), (1, 1), (2, 1), (400, 130)]
    return (
        *(observed(seed, length, budget) for seed, (length, budget) in enumerate(shapes)),
        observed(8, ragged=True),
        filled(0.0),
        filled(1.0),
        filled(1e4),
        filled(1e-25),
    )


def choice(program: Program, context: PrefillContext) -> np.ndarray:
    """What the program keeps, if it obeys the rules of scores and selections and nothing overflows."""
    score_tokens, select = program.functions()
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        scores = check_scores(score_tokens(context), context)
        return check_selection(select(scores, context), context, chunk=program.chunk)
