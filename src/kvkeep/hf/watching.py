"""Full cells read under a policy that watches attention: many tokens in one go, with the result of one by one.

Who leaves with a token depends on the attention of the token before, so that the decisions follow one another. What
they decide about does not: the products of a block's queries with all keys that they may see, and those of the weights
with the values, are computed for all tokens at once. Between the two stands a loop over a few numbers an entry.

Shapes: `R` rows of equal length, `H` query heads, `H_kv` KV heads, `G = H / H_kv`, `n` new tokens, `N` entries of a
full cell, in the order of `store/slots.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.attention.joint import scaled
from kvkeep.policies.online import WatchingPolicy, check_priorities
from kvkeep.policies.running import take_slot


@dataclass(frozen=True, eq=False)
class FullCells:
    """What the cells of some rows hold; all of them are full.

    Attributes:
        keys: `[R, H_kv, N, D]`.
        values: `[R, H_kv, N, D]`.
        priorities: `[R, H_kv, N]` float32.
        slot_positions: `[R, H_kv, k]` int64 of the entries in the slots, which come last.
        sinks: s.
        window: w.
        length: tokens seen.
    """

    keys: Tensor
    values: Tensor
    priorities: Tensor
    slot_positions: Tensor
    sinks: int
    window: int
    length: int


@dataclass(frozen=True, eq=False)
class Watched:
    """A block that was read.

    Attributes:
        output: `[R, H, n, D]`.
        taken: `[R, H_kv, n]` the slot that the token takes which leaves the window with each new one; -1 if it is
            dropped.
        priorities: `[R, H_kv, N]` float32 behind the block.
        seconds: that the decisions took.
    """

    output: Tensor
    taken: Tensor
    priorities: Tensor
    seconds: float


def read_watched(
    policy: WatchingPolicy,
    cells: FullCells,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    pinned: Callable[[Tensor, Tensor], Tensor] | None,
    layer: int,
) -> Watched:
    """Read new tokens one after the other: someone leaves, the token comes, its attention changes priorities.

    Args:
        policy: says what attention does to priorities.
        cells: before the tokens; nothing in it is changed.
        query: `[R, H, n, D]`.
        key: `[R, H_kv, n, D]`.
        value: `[R, H_kv, n, D]`.
        scaling: factor on the products.
        pinned: given priorities and positions of their shape, priorities that nobody reaches for protected ones; None
            where nothing is protected.
        layer: index of the layer, for messages.

    Raises:
        PolicyError: priorities of another shape or type, or that are not finite.
    """
    rows, kv_heads = cells.keys.shape[:2]
    count, group = query.shape[2], query.shape[1] // kv_heads
    asking = scaled(query, scaling).reshape(rows, kv_heads, group * count, -1)
    keys = torch.cat([cells.keys, key], dim=2)
    scores = (asking @ keys.to(asking.dtype).transpose(2, 3)).view(rows, kv_heads, group, count, -1)
    started = time.perf_counter()
    weights, taken, priorities = _decide(policy, cells, scores, pinned, layer)
    seconds = time.perf_counter() - started
    values = torch.cat([cells.values, value], dim=2)
    output = weights.flatten(2, 3) @ values.to(weights.dtype)
    return Watched(output.view(rows, kv_heads * group, count, -1).to(query.dtype), taken, priorities, seconds)


def _decide(
    policy: WatchingPolicy,
    cells: FullCells,
    scores: Tensor,
    pinned: Callable[[Tensor, Tensor], Tensor] | None,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of the size of the scores `[R, H_kv, G, n, N + n]`, zero for what a token does not see; and the rest."""
    rows, kv_heads, group, count, _ = scores.shape
    held, first = cells.keys.shape[2], cells.sinks + cells.window
    shape = (rows, kv_heads, held)
    # Where each column of a cell stands among the scores. One more column of each takes what is dropped.
    place = torch.arange(held + 1, device=scores.device).expand(rows, kv_heads, -1).clone()
    positions = torch.cat([cells.slot_positions, cells.slot_positions[..., :1]], dim=2)
    priorities = torch.cat([cells.priorities, cells.priorities[..., :1]], dim=2)
    weights, taken = torch.zeros_like(scores), []
    slots = slice(first, held)
    for step in range(count):
        now = cells.length + step
        leaving = now - cells.window
        column = cells.sinks + (now - cells.sinks) % cells.window  # of the token that leaves, and of the one that comes
        mine = slice(column, column + 1)
        incoming, rivals = priorities[..., mine], priorities[..., slots]
        if pinned is not None:
            incoming = pinned(incoming, positions.new_full((rows, kv_heads, 1), leaving))
            rivals = pinned(rivals, positions[..., :-1])
        chosen = take_slot(incoming.flatten(), rivals.flatten(0, 1), positions[..., :-1].flatten(0, 1))
        chosen = chosen.view(rows, kv_heads, 1)
        taken.append(chosen)
        target = torch.where(chosen < 0, held - first, chosen)
        place.scatter_(2, target + first, place[..., mine].clone())
        priorities.scatter_(2, target + first, priorities[..., mine].clone())
        positions.scatter_(2, target, leaving)
        place[..., column] = held + step
        priorities[..., column] = 0
        where = place[:, :, None, :held].expand(-1, -1, group, -1)
        seen = scores[:, :, :, step].gather(3, where).softmax(-1)
        weights[:, :, :, step].scatter_(3, where, seen)
        found = policy.observe(priorities[..., :held], seen.detach().mean(2).float()[:, :, None])
        check_priorities(found, shape, policy, layer)
        priorities[..., :held] = found.detach()
    return weights, torch.cat(taken, dim=2), priorities[..., :held]
