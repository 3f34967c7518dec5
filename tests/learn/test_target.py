from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.learn import LearnError, aggregate, causal_lse, evict_at, flex, fused, future_log_mass, visible_mask
from kvkeep.policies.online import Geometry

from .naive import attention, future_mass


def tensors(length, seed=0, *, batch=2, heads=4, kv_heads=2, size=5, scale=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (
        scale * torch.randn(batch, h, length, size, generator=generator, dtype=torch.float64) for h in (heads, kv_heads)
    )
    return queries.to(dtype), keys.to(dtype)


shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "size": st.integers(1, 6),
    }
)


def drawn(shape, length, seed):
    heads = shape["kv_heads"] * shape["group"]
    return tensors(length, seed, batch=shape["batch"], heads=heads, kv_heads=shape["kv_heads"], size=shape["size"])


@settings(max_examples=60)
@given(shapes, st.integers(1, 24), st.integers(0, 26), st.integers(1, 9), st.none() | st.integers(0, 12), st.data())
def test_every_back_end_gives_the_column_means_of_a_softmax(shape, length, window, block, look_ahead, data):
    queries, keys = drawn(shape, length, data.draw(st.integers(0, 2**31)))
    logits = attention(queries, keys)
    lse = causal_lse(queries, keys, block=block, backend="blocks")
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(causal_lse(queries, keys), lse, rtol=1e-10, atol=1e-10)
    expected = future_mass(logits.softmax(-1), window, look_ahead)
    for backend in ("blocks", "auto"):
        found = future_log_mass(queries, keys, lse, window, block=block, look_ahead=look_ahead, backend=backend)
        assert found.shape == (*queries.shape[:2], max(0, length - window))
        torch.testing.assert_close(found.exp(), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found, expected.log(), rtol=1e-9, atol=1e-9)


def test_without_a_window_every_query_hands_out_one():
    queries, keys = tensors(33)
    mass = future_log_mass(queries, keys, causal_lse(queries, keys), 0, block=8).exp()
    given_out = (mass * torch.arange(33, 0, -1)).sum(-1)
    torch.testing.assert_close(given_out, torch.full((2, 4), 33.0, dtype=torch.float64), rtol=1e-10, atol=0)


@given(
    shapes, st.integers(1, 24), st.integers(0, 3), st.integers(1, 5), st.integers(1, 8), st.integers(1, 9), st.data()
)
def test_the_sparse_lse_is_that_of_the_mask(shape, length, sinks, window, slots, block, data):
    queries, keys = drawn(shape, length, data.draw(st.integers(0, 2**31)))
    generator = torch.Generator().manual_seed(length)
    priorities = torch.randn(*keys.shape[:3], generator=generator)
    evicted = evict_at(priorities, Geometry(sinks, window, slots), length)
    found = causal_lse(queries, keys, evicted=evicted, block=block)
    expected = attention(queries, keys, visible=visible_mask(evicted)).logsumexp(-1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    if sinks + window + slots >= length:
        torch.testing.assert_close(found, causal_lse(queries, keys), rtol=1e-10, atol=1e-10)


def test_early_evicted_blocks_are_skipped_and_nothing_else(monkeypatch):
    """Streaming: a query sees the sink and what is near, so most blocks are not multiplied at all."""
    queries, keys = tensors(64)
    evicted = evict_at(torch.arange(64.0).expand(2, 2, 64), Geometry(1, 4, 4), 64)
    looked_at = []
    multiply = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda *a, **k: looked_at.append(1) or multiply(*a, **k))
    found = causal_lse(queries, keys, evicted=evicted, block=8)
    assert len(looked_at) == 8 + 7 + 6  # own block, the one before, and the sink's where it is neither
    expected = attention(queries, keys, visible=visible_mask(evicted)).logsumexp(-1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shift", [-2000.0, -300.0, 300.0, 2000.0])
def test_what_leaves_the_range_of_the_type_is_computed_again(shift):
    """Keys of which exponentials would be zero or infinite: an LSE that is not of these keys, as a sparse one."""
    queries, keys = (t.float() for t in tensors(40, batch=1))
    lse = causal_lse(queries, keys)
    exact = future_log_mass(queries.double(), keys.double(), lse.double(), 3)
    for backend in ("blocks", "fused"):
        found = future_log_mass(queries, keys, lse - shift, 3, block=16, backend=backend)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact + shift, rtol=1e-5, atol=1e-3)


def test_a_key_that_nobody_looks_at_does_not_spoil_its_block():
    queries, keys = (t.float() for t in tensors(24, batch=1, heads=2, kv_heads=1, size=4))
    queries[..., 0], keys[..., 0] = 20.0, 20.0
    keys[:, :, 7, 0] = -20.0  # a probability of e^-400
    exact = future_log_mass(queries.double(), keys.double(), causal_lse(queries.double(), keys.double()), 2)
    assert (exact[..., 7] < -390).all()
    for backend in ("blocks", "fused"):
        lse = causal_lse(queries, keys, backend=backend)
        found = future_log_mass(queries, keys, lse, 2, block=8, backend=backend)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("backend", ["blocks", "fused"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_computed_in_float32(dtype, backend):
    queries, keys = tensors(20, dtype=dtype)
    wide = queries.float(), keys.float()
    lse = causal_lse(queries, keys, backend=backend)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, causal_lse(*wide, backend=backend))
    found = future_log_mass(queries, keys, lse, 3, backend=backend)
    torch.testing.assert_close(found, future_log_mass(*wide, lse, 3, backend=backend))


@pytest.mark.parametrize("broken", ["missing", "raising", "another result"])
def test_a_torch_without_the_fused_operator_takes_blocks(broken, monkeypatch):
    """It is not public: another torch may not have it, may want other arguments, or return another thing."""

    def raising(*args, **kwargs):
        raise TypeError("unexpected argument")

    def another(q, k, v, *args, **kwargs):
        return q, torch.zeros(q.shape[:3])

    if broken == "missing":
        monkeypatch.setattr(fused, "_OPERATOR", "no_such_operator")
    else:
        monkeypatch.setattr(torch.ops.aten, fused._OPERATOR, raising if broken == "raising" else another)
    fused._works.cache_clear()
    try:
        queries, keys = tensors(20)
        expected = attention(queries, keys)
        lse = causal_lse(queries, keys)
        torch.testing.assert_close(lse, expected.logsumexp(-1), rtol=1e-10, atol=1e-10)
        found = future_log_mass(queries, keys, lse, 3)
        torch.testing.assert_close(found.exp(), future_mass(expected.softmax(-1), 3), rtol=1e-10, atol=1e-10)
        with pytest.raises(LearnError, match="'fused'"):
            future_log_mass(queries, keys, lse, 3, backend="fused")
    finally:
        fused._works.cache_clear()


def test_this_torch_has_the_fused_operator():
    assert fused.can_run(tensors(3)[0])


def test_nothing_keeps_a_graph():
    queries, keys = (t.requires_grad_() for t in tensors(9))
    lse = causal_lse(queries, keys)
    assert not lse.requires_grad
    assert not future_log_mass(queries, keys, lse, 2).requires_grad


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1e-8, 1e-3]), st.integers(0, 2**31))
def test_a_group_counts_by_its_largest_or_by_its_mean(kv_heads, group, eps, seed):
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(2, kv_heads * group, 6, generator=generator, dtype=torch.float64) ** 20
    mass[0, 0, 0] = 0.0
    grouped = mass.reshape(2, kv_heads, group, 6)
    found = aggregate(mass.log(), kv_heads, "max", eps)
    torch.testing.assert_close(found, (eps + grouped.amax(2)).log(), rtol=1e-10, atol=1e-10)
    found = aggregate(mass.log(), kv_heads, "mean", eps)
    torch.testing.assert_close(found, (eps + grouped.mean(2)).log(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("look_ahead", [None, 0, 5])
def test_flex_attention_is_told_the_same_sum(look_ahead):
    """The bias and the mask that it gets, evaluated on the whole grid. Its kernel is torch's own."""

    def dense(query, key, value, *, score_mod, block_mask, scale, return_aux):
        assert return_aux.lse
        assert query.shape == key.shape == value.shape
        batch, heads, count, _ = query.shape
        grid = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, count, count)), indexing="ij")
        scores = score_mod(query @ key.transpose(-1, -2) * scale, *grid)
        scores = scores.masked_fill(~block_mask.mask_mod(*grid), -math.inf)
        return value, type("Aux", (), {"lse": scores.logsumexp(-1)})

    queries, keys = (t.float() for t in tensors(21))
    lse = causal_lse(queries, keys)
    window, seen = 4, torch.arange(17, 0, -1).clamp(max=17 if look_ahead is None else look_ahead + 1)
    total = flex.transposed_lse(
        queries[:, :, window:],
        keys[:, :, :-window],
        lse[:, :, window:],
        scaling=5**-0.5,
        look_ahead=look_ahead,
        attend=dense,
    )
    expected = future_log_mass(queries, keys, lse, window, look_ahead=look_ahead)
    torch.testing.assert_close(total - seen.log(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_both_back_ends_agree_on_a_gpu():
    queries, keys = (t.float().cuda() for t in tensors(300, size=16))
    lse = causal_lse(queries, keys)
    torch.testing.assert_close(
        future_log_mass(queries, keys, lse, 20, backend="flex"),
        future_log_mass(queries, keys, lse, 20),
        rtol=1e-3,
        atol=1e-3,
    )


def test_errors_say_what_was_wrong():
    queries, keys = tensors(8)
    lse = causal_lse(queries, keys)
    with pytest.raises(LearnError, match=r"lse \(2, 4, 7\)"):
        future_log_mass(queries, keys, lse[..., :7], 2)
    with pytest.raises(LearnError, match="divisor of H"):
        causal_lse(queries, keys.repeat(1, 2, 1, 1)[:, :3])
    with pytest.raises(LearnError, match=r"evicted \(2, 2, 9\)"):
        causal_lse(queries, keys, evicted=torch.zeros(2, 2, 9))
    with pytest.raises(LearnError, match=r"queries \(4, 8, 5\)"):
        causal_lse(queries[0], keys)
    with pytest.raises(LearnError, match="look-ahead of -1"):
        future_log_mass(queries, keys, lse, 2, look_ahead=-1)
    with pytest.raises(LearnError, match="'flux'"):
        future_log_mass(queries, keys, lse, 2, backend="flux")
    with pytest.raises(LearnError, match="no look-ahead"):
        future_log_mass(queries, keys, lse, 2, look_ahead=3, backend="fused")
    with pytest.raises(LearnError, match="for the LSE"):
        causal_lse(queries, keys, backend="flex")
    with pytest.raises(LearnError, match="CUDA"):
        future_log_mass(queries, keys, lse, 2, backend="flex")
    with pytest.raises(LearnError, match="'median'"):
        aggregate(lse, 2, "median")
    with pytest.raises(LearnError, match="3 for 4"):
        aggregate(lse, 3)
