"""Islands of elites: MAP-Elites (Mouret and Clune 2015, arXiv 1504.04909) over what programs do, not over their text.

Each island holds a grid. A cell is a range of four traits (see `traits`); its bounds are fixed, so that the cell of a
program never changes. A cell holds one program, the fittest that came; of equals the first. Islands are apart but for
migration: now and then the best of each comes to the next one on a ring. Only what was evaluated to the end is ever
compared.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvkeep.errors import ResultsError
from kvkeep.evolve.traits import Traits

# Inner bounds of the bins of each trait: n bounds make n + 1 bins.
BOUNDS: Mapping[str, tuple[float, ...]] = {
    "overlap": (0.2, 0.35, 0.5, 0.65, 0.8, 0.95),
    "run_length": (1.5, 2.5, 4.0, 8.0, 16.0, 24.0),
    "recent": (0.05, 0.15, 0.3, 0.5, 0.8),
    "mass": (0.4, 0.6, 0.75, 0.85, 0.93),
}

Cell = tuple[int, ...]

# How a parent is chosen: of the island's elites any with this chance, else by rank.
EXPLORE = 0.3
RANK_DECAY = 0.7  # the chance of each elite is this share of that of the next better one


@dataclass(frozen=True)
class Elite:
    """A program that was evaluated to the end.

    Attributes:
        digest: of the program.
        fitness: higher is better.
        traits: what it does.
        order: which candidate it was, from 0; of equals the earlier one stays.
    """

    digest: str
    fitness: float
    traits: Traits
    order: int


def cell_of(traits: Traits) -> Cell:
    """The cell of a program that does this."""
    return tuple(bisect.bisect_right(bounds, getattr(traits, name)) for name, bounds in BOUNDS.items())


@dataclass
class Archive:
    """Islands, each a grid of elites.

    Attributes:
        islands: by cell, in the order in which cells were filled.
    """

    islands: list[dict[Cell, Elite]] = field(default_factory=list)

    @classmethod
    def of(cls, islands: int) -> Archive:
        """Empty islands.

        Raises:
            ResultsError: less than one.
        """
        if islands < 1:
            raise ResultsError(expected="at least one island", received=f"{islands}", remedy="for example --islands 4")
        return cls([{} for _ in range(islands)])

    def add(self, island: int, digest: str, fitness: float | None, traits: Traits | None, order: int) -> bool:
        """Put a program into its cell, if it is fitter than the one that is there.

        Returns:
            Whether it stays.

        Raises:
            ResultsError: it was not evaluated to the end.
        """
        if fitness is None or traits is None or not np.isfinite(fitness):
            raise ResultsError(
                expected="a program that was evaluated to the end",
                received=f"{digest[:12]} with fitness {fitness}",
                remedy="what stopped at an earlier stage has no number that could be compared",
            )
        grid, cell = self.islands[island], cell_of(traits)
        there = grid.get(cell)
        if there is not None and (there.fitness, -there.order) >= (fitness, -order):
            return False
        grid[cell] = Elite(digest, fitness, traits, order)
        return True

    def migrate(self) -> list[tuple[int, int, str]]:
        """Bring the best of each island to the next one on the ring; all leave before any arrives.

        Returns:
            `(from, to, digest)` of those that stay where they came to.
        """
        if len(self.islands) == 1:
            return []
        leaving = [(island, ranked[0]) for island, ranked in enumerate(map(_ranked, self.islands)) if ranked]
        moved = []
        for island, elite in leaving:
            to = (island + 1) % len(self.islands)
            known = any(other.digest == elite.digest for other in self.islands[to].values())
            if not known and self.add(to, elite.digest, elite.fitness, elite.traits, elite.order):
                moved.append((island, to, elite.digest))
        return moved

    def parents(self, island: int, count: int, random: np.random.Generator) -> list[Elite]:
        """Different elites of an island, by chance: better ones more often, but no cell is without a chance.

        Args:
            island: its number; an empty one borrows from all the others.
            count: at most so many.
            random: what chance is drawn from.
        """
        ranked = _ranked(self.islands[island]) or _ranked(self._all())
        chosen: list[Elite] = []
        while ranked and len(chosen) < count:
            weights = RANK_DECAY ** np.arange(len(ranked))
            uniform = random.random() < EXPLORE
            chances = np.full(len(ranked), 1 / len(ranked)) if uniform else weights / weights.sum()
            chosen.append(ranked.pop(int(random.choice(len(ranked), p=chances))))
        return chosen

    def best(self) -> Elite | None:
        """The fittest of all islands."""
        ranked = _ranked(self._all())
        return ranked[0] if ranked else None

    def filled(self) -> int:
        """Cells that are filled on at least one island."""
        return len({cell for grid in self.islands for cell in grid})

    def to_dict(self) -> list[list[dict[str, Any]]]:
        """As JSON holds it."""
        return [
            [
                {"cell": list(cell), "digest": e.digest, "fitness": e.fitness, "traits": e.traits.to_dict()}
                for cell, e in sorted(grid.items())
            ]
            for grid in self.islands
        ]

    def _all(self) -> dict[Any, Elite]:
        return {(island, cell): elite for island, grid in enumerate(self.islands) for cell, elite in grid.items()}


def _ranked(grid: Mapping[Any, Elite]) -> list[Elite]:
    """The fittest first; each program once."""
    found: dict[str, Elite] = {}
    for elite in sorted(grid.values(), key=lambda e: (-e.fitness, e.order)):
        found.setdefault(elite.digest, elite)
    return list(found.values())
