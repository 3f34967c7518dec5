"""Policies that judge by a calibration, against their formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvkeep.errors import PolicyError
from kvkeep.observation import Needs
from kvkeep.policies import ExpectedAttention, QFilter, parse_policy
from kvkeep.testing import check_policy, gathered, random_observation

TEXTS = {
    "prompt": {"length": 43},
    "ragged": {"length": 60, "ragged": True},
    "batch": {"length": 48, "ragged": True, "batch": 2, "heads": 6, "kv_heads": 3},
}


@pytest.fixture(params=TEXTS, name="seen")
def _seen(request):
    return random_observation(**TEXTS[request.param], seed=5, budget=16)


def shown(scorer, seen):
    """What an adapter would show it: no query of the text."""
    few = gathered(seen, scorer.needs())
    assert few.queries.shape[2] == 0
    return few


def test_qfilter_projects_keys(seen):
    scorer = QFilter()
    scores = scorer.score(shown(scorer, seen))
    known = seen.statistics["model"]
    for row in range(seen.keys.shape[0]):
        for head in range(seen.keys.shape[1]):
            held = seen.valid[row, head]
            naive = (seen.keys[row, head][held].double() * known.filters[head].double()).sum(-1)
            torch.testing.assert_close(scores[row, head][held].double(), naive, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("covariance", [True, False])
def test_expected_attention_takes_the_models_queries(seen, covariance):
    scorer = ExpectedAttention(future=7, sinks=2, statistics="model", covariance=covariance)
    scores = scorer.score(shown(scorer, seen))
    known, size = seen.statistics["model"], seen.keys.shape[-1]
    rotations = []
    for position in range(seen.length, seen.length + 7):
        columns = seen.rotary.rotate(torch.eye(size)[None, None], torch.full((1, size), position))[0, 0].T
        rotations.append(columns.double())
    rotation = sum(rotations) / 7
    for row in range(seen.keys.shape[0]):
        for head in range(seen.keys.shape[1]):
            held = seen.valid[row, head] & (seen.positions[row, head] >= 2)
            keys, values = seen.keys[row, head][held].double(), seen.values[row, head][held].double()
            heads = []
            for member in range(head * seen.group, (head + 1) * seen.group):
                mean = rotation @ known.query_mean[member].double()
                spread = rotation @ known.query_covariance[member].double() @ rotation.T
                logits = keys @ mean * seen.scaling
                if covariance:
                    logits = logits + torch.einsum("ni,ij,nj->n", keys, spread, keys) * seen.scaling**2 / 2
                heads.append(logits.softmax(-1))
            naive = torch.stack(heads).mean(0) * values.norm(dim=-1)
            torch.testing.assert_close(scores[row, head][held].double(), naive, rtol=1e-4, atol=1e-7)


def test_statistics_of_the_text_are_the_default():
    assert ExpectedAttention().needs() == Needs(queries=None, rotary=True)
    assert parse_policy("expected-attention[statistics=model]").needs() == Needs(
        rotary=True, statistics=frozenset({"model"})
    )
    assert not parse_policy("expected-attention[statistics=model]").needs().whole_text


@pytest.mark.parametrize(
    "name",
    [
        "qfilter",
        "qfilter+ada",
        "qfilter[statistics=some/file.safetensors]+chunks[length=7]",
        "duo[sinks=1,recent=3]",
        "expected-attention[statistics=model]",
        "expected-attention[statistics=model,epsilon=0.01]+ada",
    ],
)
def test_they_keep_the_contract(name):
    assert check_policy(name) == []


def test_a_place_that_was_not_declared_is_refused():
    seen = random_observation(length=20)
    with pytest.raises(PolicyError, match="a use of 'model' in layer 0, where 0 others are"):
        QFilter().score(replace(seen, statistics={}))
    for kind in (QFilter, ExpectedAttention):
        with pytest.raises(PolicyError, match="a place for statistics; received none"):
            kind(statistics="")
