"""CurDKV's leverage shares against a naive version."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvkeep.policies import CUR, parse_policy
from kvkeep.testing import random_observation

TEXTS = {
    "prompt": {"length": 43},
    "ragged": {"length": 60, "ragged": True},
    "batch": {"length": 48, "ragged": True, "batch": 2, "heads": 6, "kv_heads": 3},
    "one-entry": {"length": 1, "budget": 1},
    "bfloat16": {"length": 43, "dtype": torch.bfloat16},
    "float16": {"length": 43, "ragged": True, "dtype": torch.float16},
}
SCORERS = [CUR(), CUR(window=0), CUR(window=5, combine="mean"), CUR(combine="key"), CUR(window=7, combine="value")]


def shares(x, window):
    """Of each entry's squared norm in the sum over its window."""
    squares = [sum(float(c) ** 2 for c in row) for row in x]
    window = window or len(squares)
    return [s / sum(squares[i // window * window :][:window]) for i, s in enumerate(squares)]


@pytest.mark.parametrize("scorer", SCORERS, ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_cur(text, scorer):
    o = random_observation(**{"budget": 16, **TEXTS[text]}, seed=4)
    scores = scorer.score(o)
    assert scores.dtype == torch.float32
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            held = o.valid[row, head]
            key = shares(o.keys[row, head][held].double(), scorer.window)
            value = shares(o.values[row, head][held].double(), scorer.window)
            pairs = list(zip(key, value, strict=True))
            combined = {
                "product": [k * v for k, v in pairs],
                "mean": [(k + v) / 2 for k, v in pairs],
                "key": key,
                "value": value,
            }[scorer.combine]
            expected = torch.tensor([c / sum(combined) for c in combined]).double()
            torch.testing.assert_close(scores[row, head][held].double(), expected, rtol=2e-5, atol=1e-9)
            assert not scores[row, head][~held].any()


def test_a_window_of_zeros_scores_zero():
    o = random_observation(length=40, budget=10)
    values = o.values.clone()
    values[:, :, 16:32] = 0
    scores = CUR().score(replace(o, values=values))
    assert torch.isfinite(scores).all()
    assert not scores[..., 16:32].any()
    assert (scores[..., :16] > 0).all()


def test_the_sinks_stay():
    policy = parse_policy("cur[sinks=2]")
    judgement = policy.judge(random_observation(length=40, budget=10))
    assert judgement.protected[0, 0].nonzero()[:, 0].tolist() == [0, 1]
