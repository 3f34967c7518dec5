"""SimLayerKV: which layers are lazy, what these keep, and that the budget is spent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.policies import SimLayer, parse_policy
from kvkeep.testing import gathered, random_observation

from .judgements import judgement, random_judgements
from .test_selectors import entries_of, kept_positions


def layers(masses, *, budget, length, heads=1, **options):
    """Layers of a first prompt whose last query gives `masses` (by layer) to entry 0, the rest evenly to the middle."""
    made = []
    for ordinal, mass in enumerate(masses):
        scores = [[mass] + [(1 - mass) / (length - 1)] * (length - 1)] * heads
        made.append(judgement(scores, budget=budget, ordinal=ordinal, layers=len(masses), **options))
    return made


def kept(policy, judgements):
    return [kept_positions(j, mask) for j, mask in zip(judgements, policy.choose(judgements), strict=True)]


def test_the_laziest_layers_keep_the_ends():
    # 80 entries for a budget of 48: with two layers at 6 entries it would still be 52, so three are lazy, with 9 each.
    ours = kept(SimLayer(sinks=2, recent=4), layers([0.2, 0.9, 0.1, 0.5], budget=12, length=20))
    ends = [[0, 1, *range(13, 20)]]
    assert ours == [ends, ends, [list(range(20))], ends]


def test_what_whole_layers_leave_goes_to_the_recent_entries():
    ours = kept(SimLayer(sinks=2, recent=4), layers([0.2, 0.9, 0.1], budget=16, length=20))
    assert ours == [[list(range(20))], [[0, 1, *range(14, 20)]], [list(range(20))]]
    ours = kept(SimLayer(sinks=2, recent=4), layers([0.2, 0.9], budget=18, length=20, heads=2))
    assert ours[1] == [[0, 1, *range(6, 20)]] * 2


def test_a_small_budget_does_not_make_all_layers_lazy():
    """4 + 1024 entries are more than the budget: half of it counts."""
    ours = kept(SimLayer(), layers([0.2, 0.9, 0.1, 0.5, 0.3, 0.4, 0.6, 0.7], budget=30, length=100))
    ends = [[*range(4), *range(84, 100)]]
    assert ours == [ends, ends, [list(range(100))], *[ends] * 5]


def test_equally_lazy_layers():
    ours = kept(SimLayer(sinks=1, recent=1), layers([0.5, 0.5, 0.5], budget=8, length=10))
    assert [len(layer[0]) for layer in ours] == [4, 10, 10]  # the first one


def naive_simlayer(judgements, sinks, recent):
    """One row, entry by entry: make the laziest layer lazy until the budget holds, then let the ends grow."""
    cells = [entries_of(j) for j in judgements]
    budget, length = judgements[0].budget, judgements[0].length
    total = budget * sum(len(scores) for scores, _ in cells)
    least = max(1, min(sinks + recent, budget // 2))

    def ends(layer, count):
        chosen = []
        for scores, pins in zip(*cells[layer], strict=True):
            first = min(sinks, count // 2)
            order = sorted(scores, key=lambda p: (p not in pins, p >= first, p if p in pins or p < first else -p))
            chosen.append(sorted(order[: max(count, len(pins))]))
        return chosen

    def size(chosen):
        return sum(map(len, chosen))

    everything = [[sorted(scores) for scores in layer] for layer, _ in cells]
    lazy = {
        i: sum(scores[p] for scores, at in zip(layer, ends(i, least), strict=True) for p in at) / len(layer)
        for i, (layer, _) in enumerate(cells)
    }
    order = sorted(lazy, key=lambda i: (-lazy[i], i))
    for number in range(len(order) + 1):
        best = None
        for count in range(least, length + 1):
            chosen = [ends(i, count) if i in order[:number] else everything[i] for i in range(len(order))]
            if sum(map(size, chosen)) <= total:
                best = chosen
        if best:
            return best
    raise AssertionError("no share fits")


@settings(max_examples=60)
@given(judgements=random_judgements(layers=3, max_length=14), sinks=st.integers(0, 3), recent=st.integers(1, 6))
def test_simlayer(judgements, sinks, recent):
    ours = kept(SimLayer(sinks=sinks, recent=recent), judgements)
    assert ours == naive_simlayer(judgements, sinks, recent)
    total = judgements[0].budget * sum(j.valid.shape[1] for j in judgements)
    assert sum(len(cell) for layer in ours for cell in layer) <= total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ragged", [False, True])
def test_rows_have_lazy_layers_of_their_own(dtype, ragged):
    policy = SimLayer(sinks=2, recent=5)
    seen = [
        random_observation(batch=2, length=50, budget=25, layer=i, layers=4, ragged=ragged, dtype=dtype, seed=8)
        for i in range(4)
    ]
    both = [policy.judge(gathered(o, policy.needs())) for o in seen]
    masks = policy.choose(both)
    for row in range(2):
        rows = slice(row, row + 1)
        alone = policy.choose(
            [
                replace(j, **{n: getattr(j, n)[rows] for n in ("scores", "positions", "valid", "protected")})
                for j in both
            ]
        )
        assert all(torch.equal(a, m[rows]) for a, m in zip(alone, masks, strict=True))
        spent = sum(int(m[row].sum()) for m in masks)
        held = sum(int(o.valid[row].sum()) for o in seen)
        assert min(held, 4 * 2 * 25) - 8 < spent <= 4 * 2 * 25


def test_it_tells_when_the_recent_entries_shrink():
    policy = parse_policy("simlayer[sinks=2,recent=30]")
    assert policy.judge(random_observation(length=80, budget=64)).notes == ()
    (note,) = policy.judge(random_observation(length=80, budget=40)).notes
    assert note.startswith("simlayer: 2 sinks and 30 recent entries shrank to 20")
    assert policy.judge(random_observation(length=40, budget=40)).notes == ()


def test_it_refuses_what_makes_no_sense():
    with pytest.raises(BudgetError):
        parse_policy("simlayer").judge(random_observation(budget=5, protect=[(3, 9)]))
    with pytest.raises(PolicyError, match="recent >= 1"):
        SimLayer(recent=0)
    with pytest.raises(PolicyError, match="queries >= 1"):
        SimLayer(queries=0)
