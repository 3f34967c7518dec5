"""The mutator that needs no language model: small random changes of programs that it can read as recipes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvkeep.evolve.guard import PolicyRefused, check_source
from kvkeep.evolve.mutators import definitions
from kvkeep.evolve.mutators.constants import change_number
from kvkeep.evolve.mutators.edits import Edited, cross, edit
from kvkeep.evolve.mutators.protocol import Mutator, Parent, Proposal, first_of
from kvkeep.evolve.mutators.reading import read
from kvkeep.evolve.mutators.recipe import Recipe
from kvkeep.evolve.mutators.rendering import named, program_of
from kvkeep.evolve.program import Program, ProgramError

# Draws before it gives up: a change may lead back to a parent.
_TRIALS = 32


class Grammar(Mutator):
    """Changes weights, terms, features, scales, smoothing and the selection of programs, and crosses two of them.

    A program that it has written, and a seed, is read as a recipe and changed as one. Of any other program it changes a
    number, or takes the scoring and gives it another parent's selection. All works on syntax trees. It remembers
    nothing: the random numbers alone decide.

    Args:
        crossing: how often two parents are crossed, where there are two that can be.
        more: the chance of each further change after the first.
    """

    name = "grammar"

    def __init__(self, crossing: float = 0.25, more: float = 0.35) -> None:
        self._crossing, self._more = crossing, more

    def propose(self, parents: Sequence[Parent], random: np.random.Generator) -> Proposal:
        """A program that differs from all parents; a rejection where the first one has nothing that could be changed.

        Raises:
            MutatorError: no parent.
        """
        first = first_of(parents).program
        recipe = read(first)
        digests = tuple(parent.program.digest for parent in parents)
        used = digests[:1]
        for _ in range(_TRIALS):
            if recipe is not None:
                others = [(p.program, r) for p in parents[1:] if (r := read(p.program)) is not None]
                program, note, used = self._from_recipe(first, recipe, others, random)
            else:
                found = self._from_text(first, [parent.program for parent in parents[1:]], random)
                if found is None:
                    break
                program, note, used = found
            if program.digest not in digests:
                return Proposal(program, self.name, used, note)
        return Proposal(None, self.name, used, "no number in it that could be changed", rejection="unchanged")

    def _from_recipe(
        self,
        first: Program,
        recipe: Recipe,
        others: Sequence[tuple[Program, Recipe]],
        random: np.random.Generator,
    ) -> tuple[Program, str, tuple[str, ...]]:
        used, notes = [first.digest], list[str]()
        edited = Edited(recipe, "")
        if others and random.random() < self._crossing:
            second, other = others[int(random.integers(len(others)))]
            used.append(second.digest)
            edited = cross(recipe, other, random)
            notes.append(edited.note)
        if not notes or random.random() < 0.5:
            edited = edit(edited.recipe, random)
            notes.append(edited.note)
            while random.random() < self._more:
                edited = edit(edited.recipe, random)
                notes.append(edited.note)
        return program_of(edited.recipe), "; ".join(notes), tuple(used)

    def _from_text(
        self, first: Program, others: Sequence[Program], random: np.random.Generator
    ) -> tuple[Program, str, tuple[str, ...]] | None:
        if others and random.random() < self._crossing:
            second = others[int(random.integers(len(others)))]
            program = _child(first, definitions.graft(first.block, second.block))
            if program is not None:
                return program, f"the selection of {second.name}", (first.digest, second.digest)
        block, notes = first.block, list[str]()
        while not notes or random.random() < self._more:
            changed = change_number(block, random)
            if changed is None:
                return None
            block = changed.block
            notes.append(changed.note)
        program = _child(first, block)
        return None if program is None else (program, "; ".join(notes), (first.digest,))


def _child(parent: Program, block: str | None) -> Program | None:
    """The parent with another block, if that is a program that may run."""
    if block is None:
        return None
    try:
        program = named(parent.with_block(block), Grammar.name)
        check_source(program.source)
    except (ProgramError, PolicyRefused):
        return None
    return program
