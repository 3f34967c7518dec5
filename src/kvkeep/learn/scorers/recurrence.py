"""The mLSTM's memory without output gate, in three forms that compute the same.

    C_t = f_t C_{t-1} + i_t k_t v_t^T,   z_t = f_t z_{t-1} + i_t k_t,   h_t = (q_t^T C_t) / (q_t^T z_t)

with `i_t = exp(input_t)` and `f_t = exp(log_forget_t)`. Source: Beck et al. 2024 (xLSTM, arXiv 2405.04517), and KVpop
(arXiv 2607.05061), equations 38 to 41.

C and z are kept divided by `e^m`, m the largest exponent that has come so far. The ratio does not depend on m, so no
gradient goes through it, and it starts at minus infinity: there is no floor under the denominator as in xLSTM, where m
would matter. Queries and keys must not be negative (they come from a softmax).

Shapes: `...` is `[B, C]`; T tokens; q and k `[..., T, F]`; v `[..., T, P]`; gates `[..., T]`; the state is C
`[..., F, P]`, z `[..., F]`, m `[...]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def start(
    leading: tuple[int, ...], features: int, width: int, dtype: torch.dtype, device: torch.device | None = None
) -> State:
    """The memory before the first token."""
    return (
        torch.zeros((*leading, features, width), dtype=dtype, device=device),
        torch.zeros((*leading, features), dtype=dtype, device=device),
        torch.full(leading, -math.inf, dtype=dtype, device=device),
    )


def parallel(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, log_forget: Tensor) -> Tensor:
    """All tokens at once from an empty memory, in `O(T^2)` memory: the reference.

    Returns:
        `[..., T, P]`.
    """
    weights = _weights(_decays(gate, log_forget))[0]
    attention = (q @ k.transpose(-1, -2)) * weights
    return _ratio(attention @ v, attention.sum(-1))


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, log_forget: Tensor, state: State, chunk: int = 64
) -> tuple[Tensor, State]:
    """Pieces of so many tokens, the parallel form within each and the memory between them: `O(T chunk)`.

    Returns:
        `[..., T, P]`, and the memory behind the last token.
    """
    found = []
    for first in range(0, q.shape[-2], chunk):
        span = slice(first, first + chunk)
        gates = gate[..., span], log_forget[..., span]
        h, state = _chunk(q[..., span, :], k[..., span, :], v[..., span, :], *gates, state)
        found.append(h)
    return torch.cat(found, dim=-2) if found else v, state


def step(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, log_forget: Tensor, state: State) -> tuple[Tensor, State]:
    """One token: q and k `[..., F]`, v `[..., P]`, gates `[...]`.

    Returns:
        `[..., P]`, and the memory behind the token.
    """
    memory, norm, m = state
    kept = log_forget + m
    m = torch.maximum(kept, gate).detach()
    safe = _finite(m)
    old, new = (kept - safe).exp(), (gate - safe).exp()
    memory = old[..., None, None] * memory + new[..., None, None] * (k[..., :, None] * v[..., None, :])
    norm = old[..., None] * norm + new[..., None] * k
    numerator = (q[..., None, :] @ memory).squeeze(-2)
    return _ratio(numerator, (q * norm).sum(-1)), (memory, norm, m)


def _chunk(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, log_forget: Tensor, state: State) -> tuple[Tensor, State]:
    memory, norm, m = state
    through = _wide(log_forget).cumsum(-1).to(gate.dtype)  # what is left of the former memory at each token
    earlier = through + m[..., None]
    decays = _decays(gate, log_forget)
    weights, safe = _weights(decays, earlier)
    attention = (q @ k.transpose(-1, -2)) * weights
    share = (earlier - safe).exp()
    numerator = attention @ v + share[..., None] * (q @ memory)
    denominator = attention.sum(-1) + share * (q @ norm[..., None]).squeeze(-1)
    # The memory behind the last token: its own row of decays.
    exponents, kept = decays[..., -1, :], earlier[..., -1]
    m = torch.maximum(kept, exponents.amax(-1)).detach()
    safe = _finite(m)
    old, new = (kept - safe).exp(), (exponents - safe[..., None]).exp()
    weighted = k * new[..., None]
    memory = old[..., None, None] * memory + weighted.transpose(-1, -2) @ v
    norm = old[..., None] * norm + weighted.sum(-2)
    return _ratio(numerator, denominator), (memory, norm, m)


def _decays(gate: Tensor, log_forget: Tensor) -> Tensor:
    """`[..., t, j]`: the exponent of token j's share at token t, `-inf` where j comes later."""
    # Differences of long sums: in float32 they would lose the digits that count.
    through = _wide(log_forget).cumsum(-1)
    exponents = (through[..., :, None] - through[..., None, :]).to(gate.dtype) + gate[..., None, :]
    later = torch.ones(exponents.shape[-2:], dtype=torch.bool, device=gate.device).triu(1)
    return exponents.masked_fill(later, -math.inf)


def _weights(decays: Tensor, earlier: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The decays' exponentials, each row over e to the largest of it, and that `[..., t]`."""
    m = decays.detach().amax(-1)
    if earlier is not None:
        m = torch.maximum(m, earlier.detach())
    safe = _finite(m)
    return (decays - safe[..., None]).exp(), safe


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where nothing has been taken in, or nothing that the query is like."""
    return numerator / torch.where(denominator > 0, denominator, 1.0)[..., None]


def _finite(m: Tensor) -> Tensor:
    """Something to subtract: minus infinity less minus infinity would be NaN."""
    return m.masked_fill(m == -math.inf, 0.0)


def _wide(x: Tensor) -> Tensor:
    return x if x.device.type == "mps" else x.double()  # which has no float64
