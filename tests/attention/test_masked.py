"""Attention over entries that come and go, and attention that is watched, against loops over queries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import joint
from kvkeep.attention.masked import Interval, attend_intervals, attend_watched

ROWS, KV_HEADS, GROUP, KEY, VALUE = 2, 2, 3, 4, 5


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Output `[B, H, q, D]` and weights `[B, H, q, N]`, from what each query sees, `[B, H_kv, q, N]`."""
    output = torch.zeros(*query.shape[:3], values.shape[3], dtype=query.dtype)
    weights = torch.zeros(*query.shape[:3], keys.shape[2], dtype=query.dtype)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            for at in range(query.shape[2]):
                seen = visible[row, head // GROUP, at].nonzero()[:, 0]
                scores = keys[row, head // GROUP, seen] @ query[row, head, at] * scaling
                weights[row, head, at, seen] = scores.softmax(0)
                output[row, head, at] = scores.softmax(0) @ values[row, head // GROUP, seen]
    return output, weights


@given(held=st.integers(1, 6), count=st.integers(1, 7), seed=st.integers(0, 99))
def test_intervals_are_what_each_query_sees(held: int, count: int, seed: int) -> None:
    """Held entries go at some step; the chunk's come at their own, and go later."""
    generator = torch.Generator().manual_seed(seed)
    query = drawn(ROWS, KV_HEADS * GROUP, count, KEY, seed=seed)
    keys, values = (drawn(ROWS, KV_HEADS, held + count, size, seed=seed + 1) for size in (KEY, VALUE))
    gone = torch.randint(0, count + 1, (ROWS, KV_HEADS, held + count), generator=generator)
    own = torch.arange(count)
    gone[..., held:] = torch.maximum(gone[..., held:], own + 1)  # each query sees itself
    steps = own[:, None]
    start = torch.cat([torch.full((held,), -1), own])
    visible = (start <= steps) & (steps < gone[:, :, None])
    for hidden in (~visible).all(2).nonzero().tolist():
        keys[tuple(hidden)] = torch.nan  # what nobody sees may be anything
    expected, _ = naive(query, keys, values, visible, 0.7)
    pieces = [
        Interval(keys[:, :, :held], values[:, :, :held], None, gone[..., :held]),
        Interval(keys[:, :, held:], values[:, :, held:], own, gone[..., held:]),
    ]
    torch.testing.assert_close(attend_intervals(query, pieces, 0.7), expected, rtol=0, atol=1e-12)


def test_many_queries_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = (drawn(ROWS, KV_HEADS, 9, size, seed=3) for size in (KEY, VALUE))
    query, own = drawn(ROWS, KV_HEADS * GROUP, 9, KEY, seed=4), torch.arange(9)
    pieces = [Interval(keys, values, own, (own + 3).expand(ROWS, KV_HEADS, 9))]
    whole = attend_intervals(query, pieces, 0.7)
    monkeypatch.setattr(joint, "_BLOCK_ELEMENTS", 1)
    torch.testing.assert_close(attend_intervals(query, pieces, 0.7), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("some", [False, True])
def test_watched_attention_tells_its_weights(some: bool) -> None:
    query = drawn(ROWS, KV_HEADS * GROUP, 3, KEY, seed=5)
    keys, values = (drawn(ROWS, KV_HEADS, 8, size, seed=6) for size in (KEY, VALUE))
    visible = torch.ones(ROWS, KV_HEADS, 3, 8, dtype=torch.bool)
    if some:
        visible = torch.rand(visible.shape, generator=torch.Generator().manual_seed(7)) < 0.6
        visible[..., 0] = True
        visible[..., 5] = False
        keys[:, :, 5] = torch.nan
    expected, weights = naive(query, keys, values, visible, 0.7)
    output, watched = attend_watched(query, keys, values, ~visible if some else None, 0.7)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert watched.dtype == torch.float32
    mean = weights.view(ROWS, KV_HEADS, GROUP, 3, 8).mean(2).float()
    torch.testing.assert_close(watched, mean, rtol=0, atol=1e-6)
    assert watched.sum(-1).allclose(torch.ones(ROWS, KV_HEADS, 3))


def test_half_precision_is_computed_in_single() -> None:
    query, keys, values = (
        drawn(1, heads, 4, KEY, seed=8).bfloat16() for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    )
    output, watched = attend_watched(query, keys, values, None, 0.7)
    exact, weights = naive(
        query.double(), keys.double(), values.double(), torch.ones(1, KV_HEADS, 4, 4, dtype=torch.bool), 0.7
    )
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, exact.bfloat16())
    torch.testing.assert_close(watched, weights.view(1, KV_HEADS, GROUP, 4, 4).mean(2).float(), rtol=0, atol=1e-6)
