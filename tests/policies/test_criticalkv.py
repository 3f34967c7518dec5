"""CriticalKV's two stages against a naive version, cell by cell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import PolicyError
from kvkeep.policies import Ada, Critical, KNorm, Policy, SnapKV, TopK, Uniform, parse_policy
from kvkeep.policies.criticalkv import projected_norms
from kvkeep.testing import gathered, random_observation

from .judgements import random_judgements
from .test_selectors import entries_of, kept_positions, naive_top

TEXTS = {
    "prompt": {"length": 43},
    "ragged": {"length": 60, "ragged": True},
    "batch": {"length": 48, "ragged": True, "batch": 2, "heads": 6, "kv_heads": 3},
    "one-kv-head": {"length": 21, "heads": 3, "kv_heads": 1},
    "one-entry": {"length": 1, "budget": 1},
    "bfloat16": {"length": 40, "dtype": torch.bfloat16},
    "float16": {"length": 40, "ragged": True, "dtype": torch.float16},
}


def naive_norms(o, row, head):
    """By held entry: the mean over the group's heads of the sum of |W_O v| over the hidden size."""
    found = []
    for value in o.values[row, head][o.valid[row, head]].double():
        heads = range(head * o.group, (head + 1) * o.group)
        sums = [sum(abs(float(w @ value)) for w in o.output_weight[h].double()) for h in heads]
        found.append(sum(sums) / len(sums))
    return torch.tensor(found).double()


@pytest.mark.parametrize("text", TEXTS)
def test_projected_norms(text):
    o = random_observation(**{"budget": 12, **TEXTS[text]}, seed=3)
    norms = projected_norms(o)
    assert norms.dtype == torch.float32
    for row in range(norms.shape[0]):
        for head in range(norms.shape[1]):
            held = o.valid[row, head]
            torch.testing.assert_close(norms[row, head][held].double(), naive_norms(o, row, head), rtol=2e-5, atol=1e-6)


def test_projected_norms_in_blocks(monkeypatch):
    o = random_observation(length=50, budget=12)
    whole = projected_norms(o)
    monkeypatch.setattr("kvkeep.policies.criticalkv._BLOCK", 7)
    torch.testing.assert_close(projected_norms(o), whole)


def naive_critical(j, weights, counts, first, epsilon):
    """As the docstring tells it, entry by entry."""
    cells, pinned = entries_of(j)
    kept = []
    for head, (cell, pins) in enumerate(zip(cells, pinned, strict=True)):
        count = int(counts[0, head])
        by_score = min(count, max(1, int(count * first + 1e-9))) if first else 0
        mine = pins | naive_top(set(cell) - pins, cell, by_score - len(pins) if by_score > len(pins) else 0)
        lowest = min([0.0, *(s for p, s in cell.items() if p not in pins)])
        weighted = {p: (cell[p] - lowest + epsilon) * weights[head][p] for p in set(cell) - mine}
        kept.append(sorted(mine | naive_top(set(weighted), weighted, count - len(mine))))
    return kept


@given(
    judgements=random_judgements(),
    allocator=st.sampled_from([Uniform(), Ada(0.0), Ada(0.3)]),
    first=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    epsilon=st.sampled_from([0.0, 2.0**-10]),
    shift=st.sampled_from([0.0, -3.0]),
    data=st.data(),
)
def test_two_stages(judgements, allocator, first, epsilon, shift, data):
    (j,) = judgements
    j = replace(j, scores=torch.where(j.valid, j.scores + shift, torch.nan))
    weights, table = [], torch.full_like(j.scores, torch.nan)
    for head in range(j.valid.shape[1]):
        places = j.positions[0, head][j.valid[0, head]].tolist()
        numbers = data.draw(st.lists(st.integers(0, 4), min_size=len(places), max_size=len(places)))
        weights.append(dict(zip(places, map(float, numbers), strict=True)))
        table[0, head][j.valid[0, head]] = torch.tensor(numbers).float()
    (counts,) = allocator.allocate([j])
    mask = Critical(first, epsilon).select(replace(j, weights=table), counts)
    assert kept_positions(j, mask) == naive_critical(j, weights, counts, first, epsilon)
    assert torch.equal(mask.sum(-1), counts)
    assert (mask | ~j.protected).all()
    if first == 1:
        assert torch.equal(mask, TopK().select(j, counts))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["criticalkv[window=4]", "adacriticalkv[window=4]"])
def test_half_by_attention_half_by_what_the_values_do(text, name):
    o = random_observation(**{"budget": 12, **TEXTS[text]}, seed=5)
    policy = parse_policy(name)
    judgement = policy.judge(gathered(o, policy.needs()))
    plain = Policy(policy.scorer, policy.allocator, TopK())
    counts = plain.allocator.allocate([judgement])[0]
    (mask,) = policy.choose([judgement])
    assert torch.equal(mask.sum(-1), counts)
    heads = o.valid.shape[1]
    assert mask.sum((1, 2)).tolist() == [min(heads * o.budget, int(held)) for held in o.held.sum(1)]
    for row in range(mask.shape[0]):
        for head in range(heads):
            held = o.valid[row, head]
            scores = judgement.scores[row, head][held].double()
            pinned = judgement.protected[row, head][held]
            norms = naive_norms(o, row, head)
            by_score = max(1, int(counts[row, head]) // 2, int(pinned.sum())) if counts[row, head] else 0
            taken = set(scores.masked_fill(pinned, torch.inf).argsort(descending=True, stable=True)[:by_score].tolist())
            rest = ((scores + 1e-4) * norms).masked_fill(
                torch.tensor([i in taken for i in range(len(norms))]), torch.inf
            )
            expected = rest.argsort(descending=True, stable=True)[: int(counts[row, head])]
            assert mask[row, head][held].nonzero()[:, 0].tolist() == sorted(expected.tolist())


def test_the_values_decide_the_second_stage():
    o = random_observation(length=40, budget=10)
    o = replace(o, keys=o.keys.clone(), values=o.values.clone())
    o.keys[:, :, 7] *= 100  # the worst score of all, for small norms are good
    policy = Policy(KNorm(), Uniform(), Critical())
    assert not policy.choose([policy.judge(o)])[0][:, :, 7].any()
    moved = o.values.clone()
    moved[:, :, 7] *= 1e9
    o = replace(o, values=moved)
    assert policy.choose([policy.judge(o)])[0][:, :, 7].all()
    assert not TopK().select(policy.judge(o), torch.tensor([[10, 10]]))[:, :, 7].any()
    epsilon_is_nil = Policy(KNorm(), Uniform(), Critical(epsilon=0.0))
    assert not epsilon_is_nil.choose([policy.judge(o)])[0][:, :, 7].any()


def test_it_needs_the_output_projection():
    assert parse_policy("criticalkv").needs() == Policy(SnapKV(), Uniform(), TopK()).needs() | Critical().needs()
    assert parse_policy("criticalkv").needs().output_weight
    assert not parse_policy("snapkv").needs().output_weight
    with pytest.raises(PolicyError, match="the output projection of the layer; received none in layer 0"):
        parse_policy("criticalkv").judge(replace(random_observation(), output_weight=None))
    judgement = parse_policy("snapkv").judge(random_observation())
    with pytest.raises(PolicyError, match="norms of the projected values"):
        Critical().select(judgement, torch.tensor([[5, 5]]))


def test_it_goes_with_every_scorer():
    assert parse_policy("criticalkv") == parse_policy("snapkv+critical")
    assert parse_policy("adacriticalkv") == parse_policy("snapkv+ada+critical")
    policy = parse_policy("expected-attention[value_norm=false]+ada+critical[first=0.25]")
    assert policy.selector == Critical(first=0.25)
