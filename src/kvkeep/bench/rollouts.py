"""Rollouts: one question that is answered several times, each time with other random numbers.

In results a rollout is a sample of its own, whose options tell its number; its cluster is the problem, so that
intervals are drawn over problems and not over rollouts. The random numbers hang on problem, question and rollout: all
policies are given the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvkeep.results import Row
from kvkeep.tasks.protocols import Sample
from kvkeep.tasks.reasoning import pass_at_k

ROLLOUT = "rollout"


def rollouts_of(sample: Sample, count: int) -> Iterator[Sample]:
    """The sample once for each rollout."""
    for number in range(count):
        yield replace(sample, options=(*sample.options, (ROLLOUT, number)))


def problem_of(sample: Sample) -> str:
    """Names what all rollouts of a sample have in common; the sample's own key where it is none."""
    return replace(sample, options=tuple(option for option in sample.options if option[0] != ROLLOUT)).key


def pass_at_1(rows: Iterable[Row]) -> float | None:
    """The chance that one answer is right, from all rollouts: their mean within a problem, then over problems.

    Args:
        rows: of one policy, budget and protocol.

    Returns:
        None where there are no rollouts, or scores between right and wrong.
    """
    outcomes: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if ROLLOUT not in row.options:
            continue
        if row.score not in (0, 1):
            return None
        outcomes.setdefault((row.cluster, row.turn), []).append(float(row.score))
    return pass_at_k(list(outcomes.values()), k=1) if outcomes else None
