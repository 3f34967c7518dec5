"""Whole texts under a cap, and the distance to a teacher, against the definitions."""

from __future__ import annotations

import copy

import pytest
import torch
from hf.online_reference import text
from hf.tiny import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import KeepCache
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.learn import LearnError, evict_at, visible_mask
from kvkeep.learn.distill import distance, likeliest
from kvkeep.learn.evicting import attend_evicted, evicting
from kvkeep.learn.policy import KVpop
from kvkeep.policies.online import Geometry

from .naive import attention
from .test_policy import TINY, scorer


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 25), st.integers(0, 99)
)
def test_attention_and_its_gradients_are_those_of_the_mask(batch, kv_heads, group, length, block, seed):
    query = drawn(batch, kv_heads * group, length, 4, seed=seed).requires_grad_()
    key, value = (drawn(batch, kv_heads, length, 4, seed=seed + n).requires_grad_() for n in (1, 2))
    evicted = evict_at(drawn(batch, kv_heads, length, seed=seed + 3), Geometry(1, 2, 2), length)
    weights = attention(query, key, 0.3, visible_mask(evicted)).softmax(-1)
    expected = weights @ value.repeat_interleave(group, 1)
    found = attend_evicted(query, key, value, evicted, 0.3, block=block)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    toward = drawn(*expected.shape, seed=seed + 4)
    for ours, theirs in zip(
        *(torch.autograd.grad(each, (query, key, value), toward) for each in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_masked_forward_is_what_a_cache_gives(architecture):
    """Also with a layer that is computed again for its gradient, which then asks nobody a second time."""
    model, ids = tiny_model(architecture), text()
    shape = TINY if architecture != "gemma3" else type(TINY)(1, 2, 16)
    made = scorer("mlstm", shape, budget=12).double()
    geometry = made.config.geometry(16, 8)
    asked = []

    def decide(layer):
        asked.append(layer.ordinal)
        priorities = made.priorities(layer.inputs("cached").double(), shape.cells_of(layer.ordinal))
        return evict_at(priorities, geometry, ids.shape[1])

    cache = KeepCache(model, KVpop(made), entries=12)
    with torch.no_grad():
        expected = model(ids, **{CACHE_ARGUMENT: cache}).logits
    with torch.no_grad():
        dense = model(ids).logits
    assert (dense - expected).abs().max() > 1e-4
    gradients = []
    for again in (False, True):
        student = copy.deepcopy(model).requires_grad_(True)
        if again:
            enable = getattr(student, "activation_checkpointing_enable", None) or student.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        student.train(again)
        asked.clear()
        with evicting(student, decide):
            found = student(ids, use_cache=False).logits
            found.logsumexp(-1).mean().backward()
        assert asked == list(range(shape.layers))
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        gradients.append(torch.cat([p.grad.flatten() for p in student.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dense, rtol=0, atol=0)


def test_decisions_are_not_made_in_half_precision():
    model, seen = tiny_model("llama", torch.float32), []

    def decide(layer):
        seen.append((torch.is_autocast_enabled("cpu"), layer.values.dtype))
        return torch.full((1, 2, 37), 37)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), evicting(model, decide):
        model(text(), use_cache=False)
    assert [on for on, _ in seen] == [False] * 3
    assert torch.bfloat16 in {dtype for _, dtype in seen}


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(2, 12), st.integers(0, 99), st.floats(0.1, 8))
def test_the_distance_is_the_kl_of_a_coarser_view(length, vocabulary, seed, sharpness):
    teacher, student = (drawn(length, vocabulary, seed=seed + n) * sharpness for n in (0, 1))
    ids = torch.arange(length) % vocabulary
    full, other = (logits.float().log_softmax(-1) for logits in (teacher, student))
    whole = (full.exp() * (full - other)).sum(-1)
    former = torch.zeros(length)
    for count in range(1, vocabulary + 2):
        found = distance(likeliest(teacher, count), student, ids)
        order = torch.sort(full, dim=-1, descending=True, stable=True).indices
        p, q = (told.exp().gather(-1, order) for told in (full, other))
        p, q = (torch.cat([x[:, :count], x[:, count:].sum(-1, keepdim=True)], -1).double() for x in (p, q))
        expected = (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1).float()
        torch.testing.assert_close(found.kl, expected, rtol=1e-3, atol=1e-5)
        assert (found.kl >= former - 1e-5).all()  # the finer, the further
        former = found.kl.detach()
    torch.testing.assert_close(former, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.nll, -other[:-1].gather(1, ids[1:, None])[:, 0])
    with pytest.raises(LearnError, match="at least one logit"):
        likeliest(teacher, 0)


@pytest.mark.parametrize("count", [1, 5, 30])
def test_the_gradient_of_the_distance(count, monkeypatch):
    """In pieces and computed again, against all at once; zero where both agree."""
    monkeypatch.setattr("kvkeep.learn.distill._ROWS", 3)
    teacher, student = drawn(8, 30) * 3, (drawn(8, 30, seed=1) * 3).requires_grad_()
    ids, of = torch.arange(8), likeliest(teacher, count)
    [found] = torch.autograd.grad(distance(of, student, ids).kl.sum(), student)
    p, q = teacher.softmax(-1), student.softmax(-1)
    most = teacher.topk(count, -1).indices
    told = [x.gather(-1, most) for x in (p, q)]
    if count < 30:  # the rest of the vocabulary is one event
        told = [torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in told]
    [expected] = torch.autograd.grad((told[0] * (told[0] / told[1]).log()).sum(), student)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    same = teacher.clone().requires_grad_()
    [none] = torch.autograd.grad(distance(of, same, ids).kl.sum(), same)
    assert none.abs().max() < 1e-5
