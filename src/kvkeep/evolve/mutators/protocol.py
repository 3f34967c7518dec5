"""What every mutator does: parents in, a proposal out; and what it must remember to go on after a stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvkeep.errors import KvkeepError
from kvkeep.evolve.program import Program


class MutatorError(KvkeepError):
    """A mutator that cannot go on: a missing package or key, an endpoint that is gone, a spend that is used up."""


class SpendLimitReached(MutatorError):
    """The tokens that were granted are used up; what was proposed until then stands."""


@dataclass(frozen=True)
class Parent:
    """A program that a proposal starts from.

    Attributes:
        program: its source.
        score: its fitness, higher is better; None where it was not fully evaluated.
        feedback: what its evaluation said in words: errors, refusals, artefacts. May hold text that the program wrote.
    """

    program: Program
    score: float | None = None
    feedback: str = ""


@dataclass(frozen=True)
class Proposal:
    """What a mutator came up with.

    Attributes:
        program: the child, which passes `guard.check_source`; None if the answer gave no valid program.
        mutator: the name of the mutator.
        parents: digests of the programs that it was made from.
        note: what was changed, or why there is no program, in words.
        tokens: prompt and completion tokens that it cost; 0 where no language model was asked.
        rejection: a short word for the reason why there is no program; empty if there is one.
    """

    program: Program | None
    mutator: str
    parents: tuple[str, ...]
    note: str = ""
    tokens: int = 0
    rejection: str = ""


class Mutator(Protocol):
    """Makes new programs from old ones.

    The same state, parents and random numbers give the same proposal, save for what a language model answers.
    """

    name: str

    def propose(self, parents: Sequence[Parent], random: np.random.Generator) -> Proposal:
        """A child of the first parent; the others are for crossover, or examples.

        Raises:
            MutatorError: no parent; the mutator cannot go on.
        """
        ...

    def propose_many(
        self, batches: Sequence[Sequence[Parent]], randoms: Sequence[np.random.Generator]
    ) -> list[Proposal]:
        """One proposal for each batch of parents, each with random numbers of its own, in the same order.

        Raises:
            MutatorError: as `propose`; what could be proposed is returned first where it cost something.
        """
        return [self.propose(parents, random) for parents, random in zip(batches, randoms, strict=True)]

    def state(self) -> dict[str, Any]:
        """What it must remember, as JSON can write it: spend, position in a recording."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave.

        Raises:
            MutatorError: it was not made by such a mutator.
        """
        return None


def first_of(parents: Sequence[Parent]) -> Parent:
    """The parent to change.

    Raises:
        MutatorError: there is none.
    """
    if not parents:
        raise MutatorError(
            expected="at least one parent", received="none", remedy="pass a seed program, such as seed_program('frc')"
        )
    return parents[0]
