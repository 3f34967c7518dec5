"""Log-sum-exp of whole attentions by torch's fused attention on CPUs, in one pass and without a matrix.

`torch.nn.functional.scaled_dot_product_attention` does not return the log-sum-exp, the operator behind it does. It is
not part of torch's public interface, so it is tried on a small case before it is used; blocks are the fallback.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"


def can_run(queries: Tensor) -> bool:
    """Whether tensors like these can be served, by this torch."""
    return queries.device.type == "cpu" and _works()


def causal_lse(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Log-sum-exp of `l(d, t)` over `t <= d`.

    Args:
        queries: `[B, H, S, D]`.
        keys: `[B, H_kv, S, D]`.
        scaling: factor on the products.

    Returns:
        `[B, H, S]` float32, or float64 where that was given.
    """
    cells, group, length, size = _by_cell(queries, keys)
    asking = _wide(queries).reshape(cells, group, length, size)
    asked = _wide(keys).reshape(cells, 1, length, size).expand(-1, group, -1, -1)
    return _attend(asking, asked, scaling).reshape(queries.shape[:3])


def transposed_lse(queries: Tensor, keys: Tensor, lse: Tensor, scaling: float) -> Tensor:
    """Log-sum-exp of `l(d, t) - LSE_d` over `d >= t`.

    Keys ask and queries are asked. Read backwards, "not before" is the causal mask; and an additional number in each
    vector, 1 in a key and `-LSE_d` in a query, takes the LSE off in the product itself.

    Args:
        queries: `[B, H, T, D]`.
        keys: `[B, H_kv, T, D]`.
        lse: `[B, H, T]`.
        scaling: factor on the products.

    Returns:
        `[B, H, T]` float32, or float64 where that was given.
    """
    cells, group, count, size = _by_cell(queries, keys)
    queries, keys = _wide(queries), _wide(keys)
    backwards = torch.arange(count - 1, -1, -1)
    asked = queries.new_empty(cells, group, count, size + 1)
    torch.index_select(queries.reshape(cells, group, count, size), 2, backwards, out=asked[..., :size])
    asked[..., size] = -lse.reshape(cells, group, count).to(asked.dtype).index_select(2, backwards)
    asking = keys.new_ones(cells, 1, count, size + 1)
    torch.mul(keys.reshape(cells, 1, count, size).index_select(2, backwards), scaling, out=asking[..., :size])
    found = _attend(asking.expand(-1, group, -1, -1), asked, 1.0)
    return found.index_select(2, backwards).reshape(queries.shape[:3])


def _by_cell(queries: Tensor, keys: Tensor) -> tuple[int, int, int, int]:
    """Rows and KV heads in one dimension, since keys that a group shares then need no copies."""
    batch, heads, length, size = queries.shape
    return batch * keys.shape[1], heads // keys.shape[1], length, size


def _attend(asking: Tensor, asked: Tensor, scaling: float) -> Tensor:
    """`[N, G, S]` of `[N, G, S, D]` each; there are no values, so what is asked stands for them."""
    operator = getattr(torch.ops.aten, _OPERATOR)
    found: Tensor = operator(asking, asked, asked, 0.0, True, scale=scaling)[1]
    return found


@cache
def _works() -> bool:
    """Whether the operator is there and returns what it returned when this was written."""
    generator = torch.Generator().manual_seed(0)
    asking, asked = (torch.randn(1, 2, 5, 3, generator=generator) for _ in range(2))
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = (asking @ asked.transpose(-1, -2) * 0.5).masked_fill(~seen, -math.inf).logsumexp(-1)
    try:
        found = _attend(asking, asked, 0.5)
    except Exception:  # whatever another torch makes of the call
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
