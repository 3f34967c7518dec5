"""Rank correlations of a search: is what it went by related to what it was after?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import scipy.stats

from kvkeep.evolve.campaign import contestants_of, controls_of, measured_of
from kvkeep.evolve.history import History
from kvkeep.evolve.mutators.weights import frc_weight_share
from kvkeep.evolve.program import Program
from kvkeep.evolve.promotion import Measured

Pairs = list[tuple[float, float, str]]


@dataclass(frozen=True)
class Ranks:
    """A rank correlation.

    Attributes:
        what: in words.
        value: Spearman's rho; None where it cannot be told.
        n: programs.
        note: why there is none, or its p-value.
        pairs: both numbers of each program, and its name.
    """

    what: str
    value: float | None
    n: int
    note: str
    pairs: Pairs


def rank_correlations(history: History) -> list[Ranks]:
    """Stage 1 with FRC's share of the weights, and the search's scores with held-out ones."""
    return [
        first_stage_and_frc(history),
        search_and_heldout(history, measured_of(history), _fitness_by_contestant(history)),
    ]


def first_stage_and_frc(history: History) -> Ranks:
    """Whether programs that are more like FRC did better in stage 1.

    CacheCraft 2026 (arXiv 2608.14555) reports 0.51 over 621 linear scorers.
    """
    pairs: Pairs = []
    for candidate in history.candidates:
        score = candidate.evaluation.stage1 if candidate.evaluation else None
        share = frc_weight_share(Program(candidate.source, candidate.name)) if candidate.source else None
        if score is not None and share is not None:
            pairs.append((share, score.mean, f"candidate {candidate.order}"))
    return _ranks("stage-1 score with the weight share of FRC's features", pairs)


def search_and_heldout(history: History, measured: Sequence[Measured], scores: dict[str, float]) -> Ranks:
    """Whether what did better in the search does better on held-out samples.

    Args:
        history: of the search.
        measured: on held-out samples.
        scores: fitness in the search, of each contestant that has one.
    """
    model = history.settings.get("model")
    protocol = history.settings.get("samples", {}).get("protocol")
    rows = [row for row in measured if row.model == model and row.protocol == protocol]
    pairs: Pairs = []
    for name, fitness in scores.items():
        mine = [row.logprob for row in rows if row.contestant == name]
        if mine:
            pairs.append((fitness, sum(mine) / len(mine), name))
    return _ranks("search score with log-probability on held-out samples", pairs)


def _ranks(what: str, pairs: Pairs) -> Ranks:
    if len(pairs) < 3 or len({x for x, _, _ in pairs}) < 2 or len({y for _, y, _ in pairs}) < 2:
        return Ranks(what, None, len(pairs), "fewer than three programs that differ", pairs)
    found = scipy.stats.spearmanr([x for x, _, _ in pairs], [y for _, y, _ in pairs])
    return Ranks(what, float(found.statistic), len(pairs), f"p {float(found.pvalue):.2g}", pairs)


def _fitness_by_contestant(history: History) -> dict[str, float]:
    """Of those that stood in the promotion, what they had reached in the search."""
    known = {c.digest: c for c in history.candidates if c.evaluation and c.evaluation.fitness is not None}
    found: dict[str, float] = {}
    for name, given in contestants_of(history).items():
        evaluation = known[given.digest].evaluation if not isinstance(given, str) and given.digest in known else None
        if evaluation is not None and evaluation.fitness is not None:
            found[name] = evaluation.fitness
    for control in controls_of(history):
        at = control.best
        fitness = None if at is None else control.evaluations[at].fitness
        if fitness is not None:
            found.setdefault(control.name, fitness)
    return found
