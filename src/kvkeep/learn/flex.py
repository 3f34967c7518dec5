"""The transposed log-sum-exp by torch's FlexAttention, for CUDA devices. It was not run on a GPU yet.

Keys take the place of queries and queries that of keys; a bias takes each new key's LSE off; the output is not used.
FlexAttention compiles this into one kernel, which skips the blocks that the mask leaves empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvkeep.learn.config import LearnError

Attend = Callable[..., tuple[Tensor, Any]]


def transposed_lse(
    queries: Tensor,
    keys: Tensor,
    lse: Tensor,
    *,
    scaling: float,
    look_ahead: int | None,
    attend: Attend | None = None,
) -> Tensor:
    """Log-sum-exp of `l(d, t) - LSE_d` over `t <= d <= t + L`.

    Args:
        queries: `[B, H, T, D]`.
        keys: `[B, H_kv, T, D]`.
        lse: `[B, H, T]`.
        scaling: factor on the products.
        look_ahead: L; None is all later queries.
        attend: what to call in the place of the compiled `flex_attention`.

    Returns:
        `[B, H, T]` float32.

    Raises:
        LearnError: no CUDA device, or a torch without it.
    """
    if attend is None:
        if queries.device.type != "cuda":
            raise LearnError(
                expected="tensors on a CUDA device for the back end 'flex'",
                received=f"tensors on {queries.device}",
                remedy="use the back end 'blocks', which works everywhere",
            )
        attend = _compiled()
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    batch, heads, count, _ = queries.shape
    group = heads // keys.shape[1]
    bias = lse.float()

    def less_lse(score: Tensor, b: Tensor, h: Tensor, key: Tensor, query: Tensor) -> Tensor:
        return score - bias[b, h, query]

    def sees(b: Tensor, h: Tensor, key: Tensor, query: Tensor) -> Tensor:
        later = query >= key
        return later if look_ahead is None else later & (query <= key + look_ahead)

    mask = create_block_mask(sees, None, None, count, count, device=queries.device)
    _, aux = attend(
        keys.repeat_interleave(group, dim=1),
        queries,
        queries,
        score_mod=less_lse,
        block_mask=mask,
        scale=scaling,
        return_aux=AuxRequest(lse=True),
    )
    found: Tensor = aux.lse
    return found.reshape(batch, heads, count)


@cache
def _compiled() -> Attend:
    try:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention  # noqa: F401
    except ImportError as error:
        raise LearnError(
            expected="a torch whose FlexAttention returns the log-sum-exp (2.10 does)",
            received=f"torch {torch.__version__}: {error}",
            remedy="use the back end 'blocks'",
        ) from None
    compiled: Attend = torch.compile(flex_attention)
    return compiled
