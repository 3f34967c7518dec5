"""What a search must beat to have found anything: the same number of evaluations, spent without searching.

    seed            the first seed again: nothing but noise may tell it from its first evaluation
    random-weights  the seed's terms with weights drawn at random
    best-of-n       children of the seed, none of which is ever a parent
    grid            FRC's three weights on a grid
    snapkv          the built-in policy (heads apart), its window and kernel tuned on the same samples
    chunkkv         likewise, with the length of its chunks

"Best-of-N without history" reached 0.9924 where a search reached 0.9927 in a public report on OpenEvolve: without these
arms, nobody can tell what a search is worth.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvkeep.errors import ResultsError, near_names
from kvkeep.evolve.cascade import Cascade
from kvkeep.evolve.evaluation import Evaluation
from kvkeep.evolve.mutators.protocol import Mutator, MutatorError, Parent
from kvkeep.evolve.mutators.reading import read
from kvkeep.evolve.mutators.rendering import program_of
from kvkeep.evolve.mutators.weights import random_weights, weight_grid
from kvkeep.evolve.program import Program

CONTROLS = ("seed", "random-weights", "best-of-n", "grid", "snapkv", "chunkkv")
BATCH = 8  # candidates that are judged together, as in a search

WINDOWS = (8, 16, 24, 32, 48, 64)
KERNELS = (1, 3, 5, 7, 9, 13, 17, 25, 33)
CHUNKS = (5, 10, 15, 20, 25, 30, 40)

Kept = Callable[[str, Callable[[], list[Evaluation]]], list[Evaluation]]
_Given = TypeVar("_Given", Program, str)


@dataclass(frozen=True)
class Control:
    """What one control came to.

    Attributes:
        name: one of `CONTROLS`.
        evaluations: in order; each counts as one, whatever became of it.
        names: what each was, in words: a policy, or a program's name.
        sources: of programs; empty for policies.
    """

    name: str
    evaluations: tuple[Evaluation, ...]
    names: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def best(self) -> int | None:
        """Which evaluation has the highest fitness; None if none has one."""
        found = [(e.fitness, -at) for at, e in enumerate(self.evaluations) if e.fitness is not None]
        return -max(found)[1] if found else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; of the sources, the best one's."""
        best = self.best
        return {
            "name": self.name,
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
            "names": list(self.names),
            "best": best,
            "source": "" if best is None else self.sources[best],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Control:
        """What `to_dict` gave, read back from JSON."""
        sources = [""] * len(record["names"])
        if record["best"] is not None:
            sources[record["best"]] = record["source"]
        evaluations = tuple(Evaluation.from_dict(each) for each in record["evaluations"])
        return cls(record["name"], evaluations, tuple(record["names"]), tuple(sources))


def run_control(
    name: str,
    cascade: Cascade,
    seed: Program,
    mutator: Mutator,
    *,
    evaluations: int,
    chance: int = 0,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    kept: Kept = lambda batch, judge: judge(),
) -> Control:
    """Spend a number of evaluations on a control.

    Args:
        name: one of `CONTROLS`.
        cascade: the one that the search was judged by, with its yardstick.
        seed: the program that the search began with.
        mutator: of the search, or another one of its kind; it is asked for children of the seed alone.
        evaluations: how many; fewer where a grid has fewer points, and one for the seed.
        chance: seed of everything that is drawn.
        on_done: told how many are done, and how many there will be.
        kept: gives what a batch came to, by what names the batch: what is known of it from before, or what judging it
            gives.

    Raises:
        ResultsError: an unknown control.
        MutatorError: weights or a grid of a seed that the grammar cannot read.
    """
    if name not in CONTROLS:
        raise ResultsError(expected="a control", received=repr(name), remedy=near_names(name, CONTROLS))
    if name in ("snapkv", "chunkkv"):
        policies = tuned_policies(name, evaluations, chance)
        found = _in_batches(policies, cascade.evaluate_policies, on_done, kept)
        return Control(name, tuple(found), tuple(policies), ("",) * len(policies))
    programs = _control_programs(name, seed, mutator, evaluations, chance)
    found = _in_batches(programs, partial(cascade.evaluate, gated=name != "seed"), on_done, kept)
    return Control(name, tuple(found), tuple(p.name for p in programs), tuple(p.source for p in programs))


def tuned_policies(name: str, count: int, chance: int = 0) -> list[str]:
    """Settings of a built-in policy to tune over, its defaults first, then others in an order drawn by chance."""
    if name == "snapkv":
        grid = [f"snapkv[window={w},kernel={k}]" for w, k in itertools.product(WINDOWS, KERNELS)]
    else:
        grid = [f"chunkkv[window={w},kernel={k},length={c}]" for w, k, c in itertools.product(WINDOWS, KERNELS, CHUNKS)]
    order = np.random.default_rng([chance, *name.encode()]).permutation(len(grid))
    return [name, *(grid[int(at)] for at in order)][:count]


def _control_programs(name: str, seed: Program, mutator: Mutator, count: int, chance: int) -> list[Program]:
    if name == "seed":
        return [seed]
    if name == "grid":
        grid = weight_grid(_points_for(count))
        order = np.random.default_rng([chance, *b"grid"]).permutation(len(grid))
        return [program_of(grid[int(at)]) for at in sorted(order[:count])]
    recipe = read(seed)
    if name == "random-weights" and recipe is None:
        raise MutatorError(
            expected="a seed whose terms the grammar can read",
            received=seed.name,
            remedy="leave the control random-weights out for this seed",
        )
    found: list[Program] = []
    for place in range(count):
        random = np.random.default_rng([chance, *name.encode(), place])
        if name == "random-weights" and recipe is not None:
            found.append(program_of(random_weights(recipe, random)))
        elif (child := mutator.propose([Parent(seed)], random).program) is not None:
            found.append(child)
    return found


def _points_for(count: int) -> int:
    """The least number of steps of a weight for which three weights that sum to one have at least `count` points."""
    points = 2
    while (points + 1) * points // 2 < count:
        points += 1
    return points


def _in_batches(
    candidates: Sequence[_Given],
    judge: Callable[[Sequence[_Given]], list[Evaluation]],
    on_done: Callable[[int, int], None],
    kept: Kept,
) -> list[Evaluation]:
    found: list[Evaluation] = []
    for first in range(0, len(candidates), BATCH):
        batch = candidates[first : first + BATCH]
        found += kept(_named(first, batch), partial(judge, batch))
        on_done(len(found), len(candidates))
    return found


def _named(first: int, batch: Sequence[Program | str]) -> str:
    """Tells a batch from all others of its control: a language model may propose other programs the next time."""
    digests = [given if isinstance(given, str) else given.digest for given in batch]
    return f"{first}-{hashlib.sha256(repr(digests).encode()).hexdigest()[:12]}"
