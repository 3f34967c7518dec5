"""LagKV against its definition, entry by entry in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvkeep.policies import LagKV, parse_policy
from kvkeep.testing import random_observation

TEXTS = {
    "prompt": {"length": 43},
    "whole-partitions": {"length": 40},
    "ragged": {"length": 90, "ragged": True},
    "batch": {"length": 80, "ragged": True, "batch": 2, "heads": 6, "kv_heads": 3},
    "one-entry": {"length": 1, "budget": 1},
    "no-partition-before-the-tail": {"length": 15},
    "bfloat16": {"length": 43, "dtype": torch.bfloat16},
    "float16": {"length": 60, "ragged": True, "dtype": torch.float16},
}


def spread(x, reference):
    """Standard deviation of one entry's channels, each in the range that it has in the reference."""
    scaled = []
    for channel in range(len(x)):
        low, high = min(float(r[channel]) for r in reference), max(float(r[channel]) for r in reference)
        scaled.append(0.0 if low == high else (float(x[channel]) - low) / (high - low))
    mean = sum(scaled) / len(scaled)
    return math.sqrt(sum((s - mean) ** 2 for s in scaled) / (len(scaled) - 1))


def softmax(values):
    weights = [math.exp(v - max(values)) for v in values]
    return [w / sum(weights) for w in weights]


def naive_lagkv(keys, values, positions, scorer):
    """The scores of one cell, in the order in which it holds its entries."""
    body = [i for i, p in enumerate(positions) if p >= scorer.sinks]
    parts = [body[i : i + scorer.lag] for i in range(0, len(body), scorer.lag)]
    whole = [part for part in parts if len(part) == scorer.lag]
    scores = {i: 1.0 for i, p in enumerate(positions) if p < scorer.sinks}
    early = whole[:-1]
    for part, following in zip(early, whole[1:], strict=True):
        soft = [softmax([spread(x[i], [x[j] for j in following]) for i in part]) for x in (keys, values)]
        mean = [(k + v) / 2 for k, v in zip(*soft, strict=True)]
        order = sorted(range(len(part)), key=lambda n: (-mean[n], n))
        for place, n in enumerate(order):
            scores[part[n]] = mean[n] if scorer.across else (scorer.lag - 1 - place) / scorer.lag
    tail = body[len(early) * scorer.lag :]
    for n, i in enumerate(tail):
        scores[i] = n / len(tail) * (2 / scorer.lag if scorer.across else 1)
    return [scores[i] for i in range(len(positions))]


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_lagkv(text, across):
    o = random_observation(**{"budget": 16, **TEXTS[text]}, seed=2)
    scorer = LagKV(sinks=3, lag=8, across=across)
    scores = scorer.score(o)
    assert scores.dtype == torch.float32
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            held = o.valid[row, head]
            keys, values = o.keys[row, head][held].double(), o.values[row, head][held].double()
            expected = naive_lagkv(keys, values, o.positions[row, head][held].tolist(), scorer)
            found = scores[row, head][held].double()
            torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=2e-5, atol=1e-7)


def test_every_partition_keeps_the_same_share():
    policy = parse_policy("lagkv[sinks=2,lag=10]")
    o = random_observation(length=2 + 6 * 10 + 3, budget=2 + 13 + 5 * 4)
    judgement = policy.judge(o)
    assert judgement.protected[0, 0].nonzero()[:, 0].tolist() == [0, 1, *range(52, 65)]
    (mask,) = policy.choose([judgement])
    assert mask[0, :, 2:52].unflatten(-1, (5, 10)).sum(-1).unique().tolist() == [4]


def test_a_small_budget_is_kept_and_not_spent_on_the_tail_alone():
    policy = parse_policy("lagkv")  # the tail of 496 tokens is 236 long
    (mask,) = policy.choose([policy.judge(random_observation(length=496, budget=60))])
    assert mask.sum(-1).tolist() == [[60, 60]]
    assert mask[0, :, :4].all()
    assert mask[0, :, -26:].all()
    assert (mask[0, :, 4:260].sum(-1) > 5).all()


def test_a_short_text_keeps_its_end():
    policy = parse_policy("lagkv")
    (mask,) = policy.choose([policy.judge(random_observation(length=200, budget=40))])
    assert mask[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, *range(164, 200)]


def test_constant_channels_and_tiny_ranges_are_no_trouble():
    o = random_observation(length=60, budget=16)
    keys, values = o.keys.clone(), o.values.clone()
    keys[..., 0] = 3.0
    values[..., 1] = 0.0
    values[:, :, 30:, 2] = torch.linspace(0, 1e-38, 30)
    values[:, :, :30, 2] = 6e4
    scores = LagKV(lag=8, across=True).score(replace(o, keys=keys, values=values))
    assert torch.isfinite(scores).all()
    expected = naive_lagkv(keys[0, 0].double(), o.values[0, 0].double(), list(range(60)), LagKV(lag=8, across=True))
    found = LagKV(lag=8, across=True).score(replace(o, keys=keys))[0, 0].double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=2e-5, atol=1e-7)
