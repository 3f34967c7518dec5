from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.learn.scorers import recurrence

from .naive import memory_readings

CELLS = (2, 3)
FEATURES, WIDTH = 6, 4
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def tokens(count: int, seed: int, *, dtype=torch.float64, gates: float = 2.0, cells=CELLS):
    """q, k, v, gate, log_forget; gates up to `gates` in either direction."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*cells, *shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(count, FEATURES).softmax(-1), normal(count, FEATURES).softmax(-1), normal(count, WIDTH)
    gate, forget = (gates * normal(count).clamp(-1, 1) for _ in range(2))
    return [t.to(dtype) for t in (q, k, v, gate, torch.nn.functional.logsigmoid(forget))]


def start(dtype=torch.float64):
    return recurrence.start(CELLS, FEATURES, WIDTH, dtype)


def by_steps(parts, state):
    found = []
    for t in range(parts[0].shape[-2]):
        h, state = recurrence.step(*(x[..., t, :] for x in parts[:3]), *(x[..., t] for x in parts[3:]), state)
        found.append(h)
    return torch.stack(found, -2), state


def test_the_parallel_form_is_the_recurrence_written_down():
    q, k, v, gate, log_forget = tokens(17, seed=0, cells=(1, 1))
    expected = torch.stack(memory_readings(q[0, 0], k[0, 0], v[0, 0], gate[0, 0], log_forget[0, 0], delay=0))
    torch.testing.assert_close(recurrence.parallel(q, k, v, gate, log_forget)[0, 0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("gates", [2.0, 30.0])
@pytest.mark.parametrize("chunk", [1, 7, 64, 130])
def test_three_forms_agree(dtype, gates, chunk):
    parts = tokens(130, seed=chunk, dtype=dtype, gates=gates)
    exact = recurrence.parallel(*(x.double() for x in parts))
    allowed = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "check_dtype": False}
    torch.testing.assert_close(recurrence.parallel(*parts), exact, **allowed)
    chunked, behind = recurrence.chunkwise(*parts, start(dtype), chunk)
    torch.testing.assert_close(chunked, exact, **allowed)
    stepped, last = by_steps(parts, start(dtype))
    torch.testing.assert_close(stepped, exact, **allowed)
    for ours, theirs in zip(behind, last, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3 if dtype == torch.float32 else 1e-9, atol=1e-6)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8), st.integers(0, 2**31))
def test_a_state_passes_any_cut(pieces, chunk, seed):
    parts = tokens(sum(pieces), seed, gates=5.0)
    expected, _ = by_steps(parts, start())
    state, found, first = start(), [], 0
    for size in pieces:
        span = slice(first, first + size)
        piece = [x[..., span, :] for x in parts[:3]] + [x[..., span] for x in parts[3:]]
        before = [t.clone() for t in state]
        h, after = recurrence.chunkwise(*piece, state, chunk)
        assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))  # nothing is written to
        state, first = after, first + size
        found.append(h)
    torch.testing.assert_close(torch.cat(found, -2), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "step"])
def test_gradients_are_those_of_the_function(form):
    """The exponent that is taken out is treated as a constant, since the ratio does not depend on it."""

    def run(*parts):
        if form == "parallel":
            return recurrence.parallel(*parts)
        state = recurrence.start((1, 1), FEATURES, WIDTH, torch.float64)
        return recurrence.chunkwise(*parts, state, 2)[0] if form == "chunkwise" else by_steps(parts, state)[0]

    parts = [x.requires_grad_() for x in tokens(5, seed=3, cells=(1, 1))]
    assert torch.autograd.gradcheck(run, parts)


@settings(max_examples=30)
@given(st.integers(0, 6), st.integers(1, 9), st.sampled_from([1, 3, 16]), st.integers(0, 2**31))
def test_padding_before_a_text_changes_nothing(padding, count, chunk, seed):
    """A token with an input gate of zero and a forget gate of one was never there, even as the first."""
    parts = tokens(padding + count, seed)
    expected = recurrence.parallel(*(x[..., padding:, :] for x in parts[:3]), *(x[..., padding:] for x in parts[3:]))
    parts[3][..., :padding], parts[4][..., :padding] = -torch.inf, 0.0
    for found in (
        recurrence.parallel(*parts),
        recurrence.chunkwise(*parts, start(), chunk)[0],
        by_steps(parts, start())[0],
    ):
        torch.testing.assert_close(found[..., padding:, :], expected, rtol=1e-10, atol=1e-10)
        assert (found[..., :padding, :] == 0).all()


def test_gradients_stay_finite_behind_padding():
    parts = [x.requires_grad_() for x in tokens(6, seed=1)]
    valid = torch.arange(6) >= 3
    gate, forget = torch.where(valid, parts[3], -torch.inf), torch.where(valid, parts[4], 0.0)
    recurrence.chunkwise(*parts[:3], gate, forget, start(), 2)[0].sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in parts)


def test_a_query_that_is_like_nothing_gets_zero():
    q, k, v, gate, log_forget = tokens(3, seed=0)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 1] = 1.0, 1.0
    assert (recurrence.parallel(q, k, v, gate, log_forget) == 0).all()
