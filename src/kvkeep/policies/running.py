"""Who is in a bounded set while tokens come one by one: the contest that static priorities decide.

A token that leaves the window takes a free slot; where there is none, it takes the slot of the lowest priority, or is
dropped if its own is not higher. Of equal priorities the older token wins. Priorities never change and the contestants
only become more, so that a token which is out never comes back: each is in from one step on, up to another.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from kvkeep.policies.protocols import require


def evict_at(priorities: Tensor, sinks: int, window: int, slots: int) -> Tensor:
    """The first query that no longer sees a token: `visible(q, t) = t <= q and (t < sinks or q < evict_at[t])`.

    A text that is read at once under this mask gives what a cache gives that holds `sinks + window + slots` entries and
    deletes one at each step.

    Args:
        priorities: `[rows, S]`, any type that can be compared; those of the sinks and of the last `window` tokens are
            not looked at.
        sinks: first tokens, which stay.
        window: newest tokens that every query sees, itself included; at least 1.
        slots: tokens that stay beside them; at least 1.

    Returns:
        `[rows, S]` int64: `t + window` at the earliest; S for a token that the last query sees, and for sinks.

    Raises:
        PolicyError: a window or slots below 1, or priorities of another shape.
    """
    require(priorities.ndim == 2, "priorities [rows, S]", f"{tuple(priorities.shape)}", "flatten rows and heads")
    require(
        sinks >= 0 and window >= 1 and slots >= 1,
        "sinks >= 0, window >= 1 and slots >= 1",
        f"sinks={sinks}, window={window}, slots={slots}",
        "a query sees at least itself, and a token that leaves the window needs a slot to compete for",
    )
    rows, length = priorities.shape
    result = torch.full((rows, length), length, dtype=torch.int64, device=priorities.device)
    leaving = slice(sinks, max(sinks, length - window))
    if leaving.stop - leaving.start > slots:
        taken = take_slots(priorities[:, leaving], slots)
        result[:, leaving] = departures(taken) + (sinks + window)  # step j is query sinks + window + j
    return result


def take_slots(incoming: Tensor, slots: int, held: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """The slot that each token takes, one token after the other.

    Args:
        incoming: `[cells, n]` priorities of the tokens, in the order in which they come; all are younger than those
            that are held.
        slots: of each cell.
        held: `[cells, f]` priorities in the first f slots; None for none.
        positions: `[cells, f]` of the tokens in them, to tell the older ones.

    Returns:
        `[cells, n]` int64, -1 for a token that is dropped. Free slots are taken in order.
    """
    cells, count = incoming.shape
    filled = 0 if held is None else held.shape[1]
    free = slots - filled
    if count <= free:
        return (filled + torch.arange(count, device=incoming.device)).expand(cells, count).clone()
    ranks, held_ranks = _ranks(incoming, held, positions)
    taken = [_take(r, h, slots) for r, h in zip(ranks.tolist(), held_ranks.tolist(), strict=True)]
    return torch.tensor(taken, dtype=torch.int64, device=incoming.device)


def take_slot(incoming: Tensor, held: Tensor, positions: Tensor) -> Tensor:
    """`take_slots` for one token and full slots, without waiting for a device.

    Args:
        incoming: `[cells]` priorities.
        held: `[cells, slots]`.
        positions: `[cells, slots]`.

    Returns:
        `[cells]` int64, -1 for a token that is dropped.
    """
    lowest = held.amin(-1, keepdim=True)
    # Of equally low ones the youngest goes.
    victim = positions.masked_fill(held > lowest, -1).argmax(-1)
    return victim.masked_fill(incoming <= lowest[:, 0], -1)


def departures(taken: Tensor) -> Tensor:
    """When each incoming token is out again.

    Args:
        taken: `[cells, n]` what `take_slots` gave.

    Returns:
        `[cells, n]` the number of the incoming token that takes its slot, its own if it was dropped, n if it stays.
    """
    cells, count = taken.shape
    steps = torch.arange(count, device=taken.device).expand(cells, count)
    order = taken.argsort(dim=1, stable=True)  # side by side, those that take one slot, in the order of time
    in_order = taken.gather(1, order)
    following = torch.full_like(order, count)
    following[:, :-1] = order[:, 1:].masked_fill(in_order[:, 1:] != in_order[:, :-1], count)
    return torch.empty_like(order).scatter_(1, order, following).where(taken >= 0, steps)


def first_takers(taken: Tensor, slots: int) -> Tensor:
    """`[cells, slots]` the number of the first token that takes each slot; n for those that nobody takes."""
    cells, count = taken.shape
    steps = torch.arange(count, device=taken.device).expand(cells, count).masked_fill(taken < 0, count)
    nobody = torch.full((cells, slots), count, dtype=torch.int64, device=taken.device)
    return nobody.scatter_reduce_(1, taken.clamp(min=0), steps, "amin")


def _ranks(incoming: Tensor, held: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each token's place among all of its cell, from the worst: `[cells, n]` and `[cells, f]`, no two alike."""
    count = incoming.shape[1]
    youngest_first = incoming.flip(1)
    if held is None or positions is None:
        by_age, values = None, youngest_first
    else:
        by_age = positions.argsort(dim=1, descending=True)
        values = torch.cat([youngest_first, held.gather(1, by_age)], dim=1)
    order = values.argsort(dim=1, stable=True)  # of equal ones the younger stands first, that is, lower
    places = torch.arange(values.shape[1], device=values.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, places)
    if by_age is None:
        return ranks.flip(1), ranks[:, :0]
    return ranks[:, :count].flip(1), torch.empty_like(by_age).scatter_(1, by_age, ranks[:, count:])


def _take(incoming: list[int], held: list[int], slots: int) -> list[int]:
    """One cell: ranks of the tokens that come, and of those in the first slots. A heap has the lowest at hand."""
    slot_of = {rank: slot for slot, rank in enumerate(held)}
    heap = list(held)
    heapq.heapify(heap)
    taken = []
    for rank in incoming:
        if len(heap) < slots:
            slot = len(heap)
            heapq.heappush(heap, rank)
        else:
            lowest = heapq.heappushpop(heap, rank)
            slot = -1 if lowest == rank else slot_of.pop(lowest)
        if slot >= 0:
            slot_of[rank] = slot
        taken.append(slot)
    return taken
