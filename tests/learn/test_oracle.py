"""The future as a policy, and how far a model strays under a cap."""

from __future__ import annotations

import pytest
import torch
from hf.online_reference import Rule, online_reference, read, text
from hf.tiny import tiny_model

from kvkeep import KeepCache
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.learn import KVpopConfig, LearnError, evict_at, future_log_mass
from kvkeep.learn.fidelity import stray
from kvkeep.learn.measures import Choice, kept_mass
from kvkeep.learn.oracle import oracle_of
from kvkeep.learn.traces import trace
from kvkeep.policies import policy_string
from kvkeep.policies.online import Geometry

CONFIG = KVpopConfig(12, window=3, scorer="zero")


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_it_holds_what_the_future_looks_at(architecture):
    """Against the definition: dense attention of the whole text, columns summed, the best kept."""
    model, ids = tiny_model(architecture), text()
    policy = oracle_of(model, ids, CONFIG)
    masses = {}

    def see(layer):
        group = layer.queries.shape[1] // layer.keys.shape[1]
        keys = layer.keys.repeat_interleave(group, 1)
        logits = (layer.queries @ keys.transpose(2, 3) * layer.scaling).masked_fill(
            torch.ones(37, 37).triu(1).bool(), -torch.inf
        )
        later = logits.softmax(-1).masked_fill(~torch.ones(37, 37).tril(-3).bool(), 0).sum(2)
        mean = later / (37 - 3 - torch.arange(37)).clamp(min=1)
        masses[layer.layer] = (mean.unflatten(1, (-1, group)).amax(2)[0, :, :-3] + CONFIG.eps).log()

    trace(model, ids, see)
    for layer, expected in masses.items():
        torch.testing.assert_close(policy.tables[layer][0].double(), expected, rtol=1e-4, atol=1e-4)
    rule = Rule(4, 3, 5, priority=lambda layer, head, t: float(policy.tables[layer][0, head, t]) if t < 34 else 0.0)
    cache = KeepCache(model, policy, entries=12)
    logits = read(model, cache, ids)
    expected, held = online_reference(model, ids, rule)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for layer in masses:
        for head in range(2):
            assert cache.kept_positions(layer, 0, head).tolist() == sorted(held[layer][-1][head])


def test_another_text_is_refused():
    model, ids = tiny_model("llama"), text()
    policy = oracle_of(model, ids, CONFIG)
    assert policy_string(policy).startswith("custom:")
    cache = KeepCache(model, policy, entries=12)
    read(model, cache, ids)
    with pytest.raises(LearnError, match="positions up to 33"), torch.no_grad():
        model(ids[:, :1], **{CACHE_ARGUMENT: cache})
    with pytest.raises(LearnError, match="more than 3 tokens"):
        oracle_of(model, ids[:, :3], CONFIG)


def test_it_strays_less_than_the_newest_entries():
    model, ids = tiny_model("llama"), text(length=300)
    config = KVpopConfig(40, window=8, scorer="zero")
    caches = {
        "oracle": KeepCache(model, oracle_of(model, ids, config), entries=40),
        "newest": KeepCache(model, "online-streaming-llm", entries=40),
        "all": KeepCache(model, "online-streaming-llm", entries=400),
    }
    found = stray(model, ids, caches, 40)
    assert found["all"].kl == pytest.approx(0, abs=1e-6)
    assert 0 < found["oracle"].kl < found["newest"].kl
    # Against both logits of the whole text at once.
    cache = KeepCache(model, "online-streaming-llm", entries=40)
    with torch.no_grad():
        dense = model(ids).logits[0, 40:-1].log_softmax(-1)
        ours = model(ids, **{CACHE_ARGUMENT: cache}).logits[0, 40:-1].log_softmax(-1)
    told = ids[0, 41:, None]
    expected = found["newest"]
    assert expected.tokens == 259
    assert expected.kl == pytest.approx((dense.exp() * (dense - ours)).sum(-1).mean().item(), rel=1e-4)
    assert expected.nll == pytest.approx(-ours.gather(1, told).mean().item(), rel=1e-5)
    assert expected.full_nll == pytest.approx(-dense.gather(1, told).mean().item(), rel=1e-5)
    assert expected.held_bytes == cache.ledger.held_bytes
    with pytest.raises(LearnError, match="at least 302 tokens"):
        stray(model, ids, {}, 300)


def test_the_oracles_choice_is_the_best_and_a_constant_is_the_newest():
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(1, heads, 90, 8, generator=generator) for heads in (4, 2))
    lse = (queries @ keys.repeat_interleave(2, 1).transpose(2, 3) * 8**-0.5).masked_fill(
        torch.ones(90, 90).triu(1).bool(), -torch.inf
    )
    target = future_log_mass(queries, keys, lse.logsumexp(-1), 6).unflatten(1, (2, 2)).amax(2)
    geometry, none = Geometry(2, 6, 10), torch.zeros(2)
    best = Choice.of(target, target, none, geometry, 90)
    assert best.recall == 1
    assert best.kept_mass == best.oracle_mass > best.recent_mass
    newest = Choice.of(torch.arange(84.0).expand_as(target), target, none, geometry, 90)
    assert newest.kept_mass == newest.recent_mass
    assert newest.recall < 1
    evicted = evict_at(target, geometry, 90)
    held = [t for t in range(2, 84) if evicted[0, 1, t] > 89]
    expected = target[0, 1, held].exp().sum() / target[0, 1, 2:84].exp().sum()
    assert kept_mass(evicted, target, torch.tensor([89]), geometry)[0, 1, 0].item() == pytest.approx(expected.item())
    assert Choice.mean([best, newest]).recall == pytest.approx((1 + newest.recall) / 2)
    with pytest.raises(LearnError, match="more than 18 tokens"):
        Choice.of(target[..., :3], target[..., :3], none, geometry, 9)
