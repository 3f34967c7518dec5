"""Who stays, by priority: decay, ranks, boundaries, and what a query may see.

Source: KVpop (arXiv 2607.05061), section 3 and appendix B. Scores fade by `log gamma` with each step, the same for all
entries of a cell, so that the order of two entries never changes: an entry has one static priority, and one position
`evict_at` from which on no query sees it (`kvkeep.policies.running`). The paper stores a rank for each entry and a
cutoff for each query instead; both say the same, since the set that may stay only grows and an evicted entry never
comes back.

Shapes: `...` stands for any leading dimensions, usually `[B, C]` (C cells); S positions; `T = S - w` of them have a
score or a target, the last w never leave the window.

Ties: the older entry wins. Everything here is float32, or float64 where it is given float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvkeep.learn.config import LearnError
from kvkeep.policies import running
from kvkeep.policies.online import Geometry


def log_gamma(alpha: Tensor, decay: tuple[float, float]) -> Tensor:
    """The logarithm of each cell's decay, kept between bounds (equation 21).

    Args:
        alpha: any shape; what is learned.
        decay: lowest and highest gamma, each between 0 and 1.

    Returns:
        `log gmin + sigmoid(alpha) (log gmax - log gmin)`, of alpha's shape.
    """
    low, high = math.log(decay[0]), math.log(decay[1])
    return low + torch.sigmoid(_wide(alpha)) * (high - low)


def static_priority(scores: Tensor, log_gamma: Tensor, start: int = 0) -> Tensor:
    """`r_t - t log gamma`: what ranks entries the same way at every query (equations 19 and 20).

    Args:
        scores: `[..., T]` of the positions from `start` on.
        log_gamma: `[...]`, or what broadcasts to it.
        start: position of the first score.
    """
    scores = _wide(scores)
    positions = torch.arange(start, start + scores.shape[-1], device=scores.device, dtype=scores.dtype)
    return scores - positions * log_gamma[..., None].to(scores.dtype)


def effective_score(scores: Tensor, positions: Tensor, queries: Tensor, log_gamma: Tensor) -> Tensor:
    """`r_t + (q - t) log gamma`: a score as a query at q finds it (equation 5, decay at every step).

    Args:
        scores: of any shape.
        positions: t, of that shape.
        queries: q, of that shape or what broadcasts to it.
        log_gamma: likewise.
    """
    return scores + (queries - positions).to(scores.dtype) * log_gamma


def evict_at(priorities: Tensor, geometry: Geometry, length: int) -> Tensor:
    """The position from which on no query sees an entry; see `kvkeep.policies.running.evict_at`.

    Args:
        priorities: `[..., T]`, static ones, `T >= S - w`; what there is of the last w is never compared.
        geometry: sinks, window, slots.
        length: S.

    Returns:
        `[..., S]` int64: entry t is visible to queries `t <= q < evict_at[t]`; S for what is never evicted.

    Raises:
        LearnError: priorities of too few or too many positions.
    """
    *leading, count = priorities.shape
    if not length - geometry.window <= count <= length:
        raise LearnError(
            expected=f"priorities of {max(0, length - geometry.window)} to {length} positions",
            received=f"{count}",
            remedy="all but the window's need one",
        )
    known = pad(priorities.detach(), (0, length - count))
    found = running.evict_at(known.reshape(-1, length), geometry.sinks, geometry.window, geometry.slots)
    return found.reshape(*leading, length)


def visible_mask(evicted: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Which entries the queries of a range see.

    Args:
        evicted: `[..., S]` from `evict_at`.
        start: first query position.
        stop: behind the last one; None is S.

    Returns:
        `[..., stop - start, S]` bool.
    """
    length = evicted.shape[-1]
    positions = torch.arange(length, device=evicted.device)
    queries = positions[start : length if stop is None else stop, None]
    return (positions <= queries) & (queries < evicted[..., None, :])


def kept_after(evicted: Tensor, tokens: int | None = None) -> Tensor:
    """What a cell holds when so many tokens have been read.

    Args:
        evicted: `[..., S]` from `evict_at`, of this many tokens or more.
        tokens: P; None is S.

    Returns:
        `[..., P]` bool.
    """
    tokens = evicted.shape[-1] if tokens is None else tokens
    return evicted[..., :tokens] > tokens - 1


def recall(student: Tensor, teacher: Tensor, queries: Tensor, geometry: Geometry) -> Tensor:
    """The share of the teacher's slots that the student holds as well.

    Args:
        student: `[..., S]` from `evict_at`.
        teacher: likewise.
        queries: `[N]` positions at which to compare.
        geometry: sinks and the window do not count, they are always equal.

    Returns:
        `[..., N]` between 0 and 1; 1 where no entry has left the window yet.
    """
    shares = []
    for query in queries.tolist():
        left = slice(geometry.sinks, max(geometry.sinks, query - geometry.window + 1))
        wanted = teacher[..., left] > query
        held = wanted & (student[..., left] > query)
        total = wanted.sum(-1)
        shares.append(torch.where(total > 0, held.sum(-1) / total.clamp(min=1), 1.0))
    if not shares:
        return student.new_zeros((*student.shape[:-1], 0), dtype=torch.float32)
    return torch.stack(shares, dim=-1)


@dataclass(frozen=True, eq=False)
class Boundary:
    """What the ranking decides at sampled queries; every tensor is `[..., N]`.

    Attributes:
        newest: t_new = q - w, the entry that has just left the window, `[N]`.
        kept: whether it stays.
        rival: the entry that it is compared with: the last one that stays, t_bnd. Where that is the newest itself, the
            pair would be empty, and the rival is the entry that it displaced, the best of those that leave.
        own: where that was so.
    """

    newest: Tensor
    kept: Tensor
    rival: Tensor
    own: Tensor


def boundary(priorities: Tensor, queries: Tensor, geometry: Geometry) -> Boundary:
    """The newest entry and its rival at each sampled query.

    Args:
        priorities: `[..., T]` static priorities of the positions from 0.
        queries: `[N]` positions q, `s + w + k <= q < T + w`.
        geometry: sinks, window, slots.

    Raises:
        LearnError: a query at which nothing has to leave, or whose newest entry has no priority.
    """
    count = priorities.shape[-1]
    first, last = geometry.held, count - 1 + geometry.window
    if queries.numel() and not first <= int(queries.min()) <= int(queries.max()) <= last:
        raise LearnError(
            expected=f"queries from {first}, the first at which an entry must leave, to {last}",
            received=f"queries from {int(queries.min())} to {int(queries.max())}",
            remedy="sample them with sample_queries, from texts that are longer than the budget",
        )
    order = torch.sort(priorities, dim=-1, descending=True, stable=True).indices  # the older first where equal
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(count, device=order.device).expand_as(order))
    newest = queries - geometry.window
    last_kept, displaced = [], []
    for end in (newest + 1).tolist():
        eligible = rank[..., geometry.sinks : end]
        last_kept.append(eligible.kthvalue(geometry.slots, dim=-1).values)
        displaced.append(eligible.kthvalue(geometry.slots + 1, dim=-1).values)
    if not last_kept:
        empty = order[..., :0]
        return Boundary(newest, empty.bool(), empty, empty.bool())
    cutoff = torch.stack(last_kept, dim=-1)
    ours = rank.index_select(-1, newest)
    own = ours == cutoff
    rival = order.gather(-1, torch.where(own, torch.stack(displaced, dim=-1), cutoff))
    return Boundary(newest, ours <= cutoff, rival, own)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
