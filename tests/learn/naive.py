"""The slow way, from the definitions: loops over tokens, full matrices, the paper's own data structures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.policies.online import Geometry


def attention(queries: Tensor, keys: Tensor, scaling: float | None = None, visible: Tensor | None = None) -> Tensor:
    """`[B, H, S, S]` logits of full attention, `-inf` where a query does not see a key.

    Args:
        visible: `[B, H_kv, S, S]`; None is all that came before.
    """
    group = queries.shape[1] // keys.shape[1]
    scaling = queries.shape[-1] ** -0.5 if scaling is None else scaling
    logits = queries @ keys.repeat_interleave(group, 1).transpose(-1, -2) * scaling
    length = queries.shape[2]
    seen = torch.ones(length, length).tril().bool() if visible is None else visible.repeat_interleave(group, 1)
    return logits.masked_fill(~seen, -math.inf)


def future_mass(probabilities: Tensor, window: int, look_ahead: int | None = None) -> Tensor:
    """`[B, H, S - w]`: the mean of the columns of `[B, H, S, S]` from `t + w` on, entry by entry."""
    length = probabilities.shape[-1]
    columns = []
    for t in range(length - window):
        end = length if look_ahead is None else min(length, t + window + look_ahead + 1)
        column = probabilities[..., t + window : end, t]
        columns.append(column.sum(-1) / max(1, column.shape[-1]))
    return torch.stack(columns, -1) if columns else probabilities[..., 0, :0]


def eligible(query: int, geometry: Geometry) -> range:
    """E(q)."""
    return range(geometry.sinks, query - geometry.window + 1)


def kept_of(priorities: Sequence[float], query: int, geometry: Geometry) -> list[int]:
    """The slots' entries at q, best first: by priority, the older where equal."""
    return sorted(eligible(query, geometry), key=lambda t: (-priorities[t], t))[: geometry.slots]


def seen_by(priorities: Sequence[float], query: int, geometry: Geometry) -> set[int]:
    """All that query q sees."""
    near = {t for t in range(query + 1) if t < geometry.sinks or query - t < geometry.window}
    return near | set(kept_of(priorities, query, geometry))


def fenwick_cutoffs(priorities: Sequence[float], geometry: Geometry) -> tuple[list[int], list[int]]:
    """The paper's running top-k: each entry's rank (0 is best), and each query's cutoff tau.

    A Fenwick tree counts ranks; one insertion a query, and the k-th smallest rank by binary lifting. Until k entries
    may leave the cutoff is S, not -1 as in the paper's algorithm, which would hide them all.
    """
    length = len(priorities)
    known = range(max(0, length - geometry.window))
    order = sorted(known, key=lambda t: (-priorities[t], t))
    rank = [length - 1] * length  # those that never leave the window
    for place, t in enumerate(order):
        rank[t] = place
    tree = [0] * (length + 1)
    highest = 1 << (length.bit_length() - 1)
    cutoffs = []
    for query in range(length):
        newest = query - geometry.window
        if newest >= geometry.sinks:
            index = rank[newest] + 1
            while index <= length:
                tree[index] += 1
                index += index & -index
        if len(eligible(query, geometry)) < geometry.slots:
            cutoffs.append(length)
            continue
        at, wanted, jump = 0, geometry.slots, highest
        while jump:
            if at + jump <= length and tree[at + jump] < wanted:
                at += jump
                wanted -= tree[at]
            jump >>= 1
        cutoffs.append(at)
    return rank, cutoffs


def memory_readings(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, log_forget: Tensor, delay: int) -> list[Tensor]:
    """The mLSTM without a stabiliser, all memories stored: entry u is read from the memory behind `u + delay`.

    Args:
        q: `[T, F]`, of one cell, as all that follows.
        k: `[T, F]`.
        v: `[T, P]`.
        gate: `[T]`.
        log_forget: `[T]`.
    """
    memory, norm = torch.zeros(q.shape[1], v.shape[1], dtype=q.dtype), torch.zeros(q.shape[1], dtype=q.dtype)
    memories = []
    for t in range(len(q)):
        memory = log_forget[t].exp() * memory + gate[t].exp() * torch.outer(k[t], v[t])
        norm = log_forget[t].exp() * norm + gate[t].exp() * k[t]
        memories.append((memory, norm))
    return [(q[u] @ memories[u + delay][0]) / (q[u] @ memories[u + delay][1]) for u in range(len(q) - delay)]
