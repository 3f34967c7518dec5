"""How much attention an entry will still get once it has left the window: what the scorers learn to foretell.

Source: KVpop (arXiv 2607.05061), equations 2, 3, 8 and 9.

    log m_t = logsumexp over d from t + w to S - 1 of (l(d, t) - LSE_d)  -  log N_t        (8)

with `l(d, t)` the scaled product of query d and key t, `LSE_d` the log of query d's softmax denominator, and N_t the
number of queries. With the roles of queries and keys exchanged this is the log-sum-exp of an attention with an additive
bias, which needs no values, no gradient and no `S x S` matrix. Three back ends compute it: `fused`, torch's attention
on CPUs; `flex`, its FlexAttention on CUDA devices; and `blocks`, which runs everywhere, knows a look-ahead and evicted
keys, and skips blocks that the mask leaves empty.

Shapes: `B` batch, `H` query heads, `H_kv` KV heads (a divisor of H), `S` positions, `D` head size, `T = S - w` the keys
that have a target. Half types are computed in float32; float64 stays.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvkeep.learn import flex, fused
from kvkeep.learn.blocks import Grouped, block_size, check_shapes
from kvkeep.learn.config import AGGREGATES, LearnError

BACKENDS = ("auto", "blocks", "fused", "flex")


@torch.no_grad()
def future_log_mass(
    queries: Tensor,
    keys: Tensor,
    lse: Tensor,
    window: int,
    *,
    scaling: float | None = None,
    look_ahead: int | None = None,
    block: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """The logarithm of the mean attention that each key gets from the queries w and more behind it (equation 8).

    Exact with the dense LSE. With the LSE of a cache that has evicted entries (equation 9) the "probabilities" of
    evicted keys may exceed 1, which changes no ranking for the worse but lets `log m` rise above 0.

    Args:
        queries: `[B, H, S, D]`, rotated.
        keys: `[B, H_kv, S, D]`, rotated.
        lse: `[B, H, S]`, from `causal_lse` or from an attention that returns it.
        window: w; with 0 a query counts for its own key.
        scaling: factor on the products; None is `1 / sqrt(D)`.
        look_ahead: L, of the queries `t + w` to `t + w + L` only (appendix B); None is all, as in the paper's text.
        block: positions that `blocks` computes at once; None suits the device.
        backend: `fused`, `blocks` or `flex`; `auto` is `fused` where it can run, else `blocks`. `flex` was not run on a
            GPU yet. Memory grows with S in all of them.

    Returns:
        `[B, H, S - w]` float32, or float64 where that was given; empty where the window covers all.

    Raises:
        LearnError: shapes that do not fit, or a back end that cannot be used.
    """
    check_shapes(queries, keys, lse)
    if window < 0 or (look_ahead is not None and look_ahead < 0):
        raise LearnError(
            expected="a window and a look-ahead of at least 0",
            received=f"a window of {window}, a look-ahead of {look_ahead}",
            remedy="a look-ahead of None is all later queries",
        )
    length = queries.shape[2]
    count = max(0, length - window)
    scaling = queries.shape[-1] ** -0.5 if scaling is None else scaling
    seen = torch.arange(count, 0, -1, device=queries.device)  # N_t = S - (t + w)
    if look_ahead is not None:
        seen = seen.clamp(max=look_ahead + 1)
    if not count:
        return lse.new_zeros((*lse.shape[:2], 0), dtype=Grouped.dtype_of(queries))
    later, later_lse, own = queries[:, :, window:], lse[:, :, window:], keys[:, :, :count]
    chosen = _backend(backend, queries, plain=look_ahead is None)
    if chosen == "fused":
        total = fused.transposed_lse(later, own, later_lse, scaling)
    elif chosen == "flex":
        total = flex.transposed_lse(later, own, later_lse, scaling=scaling, look_ahead=look_ahead)
    else:
        total = _transposed_lse(later, own, later_lse, scaling, look_ahead, block or block_size(queries.device))
    return total - seen.to(total.dtype).log()


def _backend(name: str, queries: Tensor, *, plain: bool) -> str:
    """The back end to use.

    Args:
        name: what was asked for.
        queries: tells the device.
        plain: whether the mask is the causal one and nothing else.

    Raises:
        LearnError: an unknown one, or one that cannot do it.
    """
    if name not in BACKENDS:
        raise LearnError(
            expected=f"one of {', '.join(BACKENDS)}", received=f"{name!r}", remedy="leave the back end out"
        )
    able = plain and fused.can_run(queries)
    if name == "auto":
        return "fused" if able else "blocks"
    if name == "fused" and not able:
        raise LearnError(
            expected="tensors on the CPU, no look-ahead and no evicted keys for the back end 'fused'",
            received=f"tensors on {queries.device}{'' if plain else ', and one of these'} (torch {torch.__version__})",
            remedy="use the back end 'blocks', which works everywhere",
        )
    return name


def _transposed_lse(
    queries: Tensor, keys: Tensor, lse: Tensor, scaling: float, look_ahead: int | None, block: int
) -> Tensor:
    """`[B, H, T]`: log-sum-exp of `l(d, t) - LSE_d` over `t <= d <= t + L`, all three of T positions."""
    grouped = Grouped(queries, keys, lse, scaling, block)
    # A probability is at most 1 and needs no maximum to be taken off before the exponential. What falls out of the
    # range of the type all the same (masses below e^-87, or an LSE that is not of these keys) is done again with it.
    mass = torch.zeros(grouped.shape, dtype=grouped.dtype, device=queries.device)  # [B H_kv, G, T]
    for part in range(grouped.blocks):
        for own in range(grouped.first_block(part, look_ahead), part + 1):
            logits = grouped.logits(part, own, look_ahead)  # [B H_kv, t, G, d]
            mass[..., grouped.span(own)] += logits.exp_().sum(-1).transpose(1, 2)
    total = mass.log_()
    tiny = math.log(torch.finfo(total.dtype).tiny)
    for own in range(grouped.blocks):
        rows = total[..., grouped.span(own)]
        if bool(((rows > tiny) & (rows < math.inf)).all()):
            continue
        rows.fill_(-math.inf)
        for part in range(own, grouped.last_block(own, look_ahead) + 1):
            found = grouped.logits(part, own, look_ahead).logsumexp(-1).transpose(1, 2)
            torch.logaddexp(rows, found, out=rows)
    return total.reshape(lse.shape)


@torch.no_grad()
def causal_lse(
    queries: Tensor,
    keys: Tensor,
    *,
    evicted: Tensor | None = None,
    scaling: float | None = None,
    block: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """The log of each query's softmax denominator, dense or over the keys that a cache still holds (equation 9).

    Args:
        queries: `[B, H, S, D]`.
        keys: `[B, H_kv, S, D]`.
        evicted: `[B, H_kv, S]` from `ranking.evict_at`: queries from there on do not see the key. None is dense.
        scaling: factor on the products; None is `1 / sqrt(D)`.
        block: positions that `blocks` computes at once; None suits the device.
        backend: `fused` or `blocks`; `auto` is `fused` where it can run.

    Returns:
        `[B, H, S]` float32, or float64 where that was given.

    Raises:
        LearnError: shapes that do not fit, or a back end that cannot be used.
    """
    check_shapes(queries, keys, evicted=evicted)
    scaling = queries.shape[-1] ** -0.5 if scaling is None else scaling
    chosen = _backend(backend, queries, plain=evicted is None)
    if chosen == "flex":
        raise LearnError(expected="'fused' or 'blocks' for the LSE", received="'flex'", remedy="leave the back end out")
    if chosen == "fused":
        return fused.causal_lse(queries, keys, scaling)
    grouped = Grouped(queries, keys, None, scaling, block or block_size(queries.device), evicted)
    total = torch.full(grouped.shape, -math.inf, dtype=grouped.dtype, device=queries.device)  # [B H_kv, G, S]
    for part in range(grouped.blocks):
        rows = total[..., grouped.span(part)]
        for own in range(part + 1):
            if own < part and grouped.is_unseen(own, part):
                continue
            logits = grouped.logits(part, own)  # [B H_kv, t, G, d]
            torch.logaddexp(rows, _logsumexp(logits), out=rows)
    return total.reshape(queries.shape[:3])


def _logsumexp(logits: Tensor) -> Tensor:
    """Over dimension 1, in place."""
    highest = logits.amax(1, keepdim=True)
    highest.masked_fill_(highest == -math.inf, 0)
    return logits.sub_(highest).exp_().sum(1).log_().add_(highest.squeeze(1))


def aggregate(log_mass: Tensor, kv_heads: int, how: str = "max", eps: float = 1e-8) -> Tensor:
    """One target for the query heads that share a key: `Agg_g log(eps + m_t)` (equation 3).

    Args:
        log_mass: `[B, H, T]` from `future_log_mass`.
        kv_heads: H_kv.
        how: `max`: an entry counts if any head of the group leans on it. `mean`: of the probabilities.
        eps: floor of the mean attention.

    Returns:
        `[B, H_kv, T]`.

    Raises:
        LearnError: heads that cannot be grouped, or another word.
    """
    if how not in AGGREGATES:
        raise LearnError(expected="max or mean", received=f"{how!r}", remedy="the paper's default is max")
    if kv_heads < 1 or log_mass.shape[1] % kv_heads:
        raise LearnError(
            expected="a number of KV heads that divides the query heads",
            received=f"{kv_heads} for {log_mass.shape[1]}",
            remedy="pass the model's number of KV heads",
        )
    group = log_mass.shape[1] // kv_heads
    groups = log_mass.reshape(len(log_mass), kv_heads, group, -1)  # [B, H_kv, G, T]
    joint = groups.amax(2) if how == "max" else groups.logsumexp(2) - math.log(group)
    return torch.logaddexp(joint, torch.full_like(joint, math.log(eps)))
