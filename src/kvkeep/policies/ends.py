"""Parts of a model that keep all entries beside others that keep the ends of the text; the budget tells how many.

A part is a layer of one row, with all its cells (`simlayer`), or a single cell (`duo`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.policies.allocators import top_mask
from kvkeep.policies.protocols import Judgement


@dataclass(frozen=True)
class Ends:
    """The ends of a text: its first entries and its latest ones.

    Attributes:
        sinks: how many of the first entries.
        recent: how many of the latest ones at least, where half of the budget holds them.
    """

    sinks: int
    recent: int

    def least(self, budget: int) -> int:
        """Entries that a cell of a shortened part keeps for sure."""
        return max(1, min(self.sinks + self.recent, budget // 2))

    def share(self, parts: Sequence[Judgement], eagerness: Sequence[float], total: int) -> tuple[list[int], int]:
        """Which parts are shortened, and how many entries each of their cells keeps.

        As few parts as the total demands, the most eager ones first; what the others leave of it goes to the
        shortened ones, all alike.

        Args:
            parts: of one row.
            eagerness: of each part; of equal ones the earlier part goes first.
            total: entries that all parts may keep together.

        Returns:
            Indexes of the parts in the order in which they were shortened, and the count.
        """
        cells = [_cells(part) for part in parts]
        held = [sum(available for _, available in mine) for mine in cells]
        least = self.least(parts[0].budget)
        order = sorted(range(len(parts)), key=lambda i: (-eagerness[i], i))
        short: list[int] = []
        left = sum(held)
        while left > total:
            index = order[len(short)]
            left -= held[index] - _cost(cells[index], least)
            short.append(index)
        room = total - sum(held[i] for i in order[len(short) :])
        low, high = least, parts[0].length  # the largest count that the room holds
        while low < high:
            middle = (low + high + 1) // 2
            if sum(_cost(cells[i], middle) for i in short) <= room:
                low = middle
            else:
                high = middle - 1
        return short, low

    def of(self, part: Judgement, count: int) -> Tensor:
        """`[1, H_kv, N]` protected entries, sinks and the latest ones, `count` in each cell; sinks at most half."""
        ranks = part.positions.double()
        ranks = ranks.masked_fill(part.positions < min(self.sinks, count // 2), part.length)  # above all positions
        ranks = ranks.masked_fill(part.protected, math.inf).masked_fill(~part.valid, -math.inf)
        return top_mask(ranks, torch.minimum(part.pinned.clamp(min=count), part.available))

    def notes(self, name: str, observation: Observation, what: str) -> tuple[str, ...]:
        """What is said where the budget is too small for the ends.

        Args:
            name: of the policy.
            observation: a layer.
            what: is shortened, in words.
        """
        budget = observation.budget
        if budget >= observation.length or self.least(budget) == self.sinks + self.recent:
            return ()
        return (
            f"{name}: {self.sinks} sinks and {self.recent} recent entries shrank to {self.least(budget)} "
            f"when {what} were counted, half of the {budget} entries per cell",
        )


def part_of(judgement: Judgement, row: int, head: int | None = None) -> Judgement:
    """One row of a judgement, or one cell of it."""
    place = (slice(row, row + 1), slice(None) if head is None else slice(head, head + 1))
    return replace(
        judgement,
        scores=judgement.scores[place],
        positions=judgement.positions[place],
        valid=judgement.valid[place],
        protected=judgement.protected[place],
    )


def _cells(part: Judgement) -> list[tuple[int, int]]:
    """Protected and available entries of each cell."""
    return list(zip(part.pinned[0].tolist(), part.available[0].tolist(), strict=True))


def _cost(cells: Sequence[tuple[int, int]], count: int) -> int:
    """Entries of a part whose cells keep `count`, the protected ones if they are more, or all that they hold."""
    return sum(min(max(pinned, count), available) for pinned, available in cells)
