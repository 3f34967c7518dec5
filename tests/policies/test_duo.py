"""DuoAttention: which heads stream, what these keep, and that the budget is spent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.policies import Duo, parse_policy
from kvkeep.testing import gathered, random_observation

from .judgements import judgement, random_judgements
from .test_selectors import entries_of, kept_positions


def layers(scores, *, budget, length, **options):
    """Layers of a first prompt whose heads have these retrieval scores."""
    return [
        judgement([[head] * length for head in heads], budget=budget, ordinal=i, layers=len(scores), **options)
        for i, heads in enumerate(scores)
    ]


def kept(policy, judgements):
    return [kept_positions(j, mask) for j, mask in zip(judgements, policy.choose(judgements), strict=True)]


def test_the_heads_that_copy_least_keep_the_ends():
    # 80 entries for a budget of 48: with two heads at 6 entries it would still be 52, so three stream, with 9 each.
    ours = kept(Duo(sinks=2, recent=4), layers([[0.9, 0.1], [0.2, 0.05]], budget=12, length=20))
    ends = [0, 1, *range(13, 20)]
    assert ours == [[list(range(20)), ends], [ends, ends]]


def test_what_retrieval_heads_leave_goes_to_the_recent_entries():
    ours = kept(Duo(sinks=2, recent=4), layers([[0.9, 0.1], [0.8, 0.7]], budget=18, length=20))
    assert ours == [[list(range(20)), [0, 1, *range(10, 20)]], [list(range(20))] * 2]


def test_equal_heads():
    ours = kept(Duo(sinks=1, recent=1), layers([[0.5, 0.5], [0.5, 0.5]], budget=8, length=10))
    assert [len(head) for layer in ours for head in layer] == [2, 10, 10, 10]  # the first one


def naive_duo(judgements, sinks, recent):
    """One row, entry by entry: let the worst head stream until the budget holds, then let the ends grow."""
    budget, length = judgements[0].budget, judgements[0].length
    cells = [cell for j in judgements for cell in zip(*entries_of(j), strict=True)]
    least = max(1, min(sinks + recent, budget // 2))

    def ends(cell, count):
        positions, pins = cell
        first = min(sinks, count // 2)
        order = sorted(positions, key=lambda p: (p not in pins, p >= first, p if p in pins or p < first else -p))
        return sorted(order[: max(count, len(pins))])

    worst = sorted(range(len(cells)), key=lambda i: (next(iter(cells[i][0].values())), i))
    for number in range(len(cells) + 1):
        best = None
        for count in range(least, length + 1):
            chosen = [ends(c, count) if i in worst[:number] else sorted(c[0]) for i, c in enumerate(cells)]
            if sum(map(len, chosen)) <= budget * len(cells):
                best = chosen
        if best:
            return best
    raise AssertionError("no share fits")


@settings(max_examples=60)
@given(random_judgements(layers=3, max_length=14), st.integers(0, 3), st.integers(1, 6), st.data())
def test_as_few_heads_stream_as_the_budget_demands(judgements, sinks, recent, data):
    heads = judgements[0].valid.shape[1]
    scores = data.draw(st.lists(st.integers(0, 3), min_size=3 * heads, max_size=3 * heads))
    table = torch.tensor(scores, dtype=torch.float32).view(3, heads)
    judgements = [
        replace(j, scores=torch.where(j.valid, table[i][None, :, None], 1e9)) for i, j in enumerate(judgements)
    ]
    ours = [head for layer in kept(Duo(sinks=sinks, recent=recent), judgements) for head in layer]
    assert ours == naive_duo(judgements, sinks, recent)
    assert sum(map(len, ours)) <= judgements[0].budget * 3 * heads


def test_a_head_has_the_score_of_its_best_query_head():
    seen = random_observation(length=12, heads=6, kv_heads=3, budget=6)
    policy = parse_policy("duo[sinks=1,recent=2,statistics=a.safetensors]")
    judged = policy.judge(gathered(seen, policy.needs()))
    copying = seen.statistics["any"].copying
    assert torch.equal(judged.scores[0, :, 0], copying.view(3, 2).amax(1))
    assert bool((judged.scores == judged.scores[:, :, :1]).all())
    assert judged.notes == ()
    tight = policy.judge(gathered(replace(seen, budget=4), policy.needs()))
    (note,) = tight.notes
    assert note.startswith("duo: 1 sinks and 2 recent entries shrank to 2 when streaming heads were counted")


def test_what_makes_no_sense_is_refused():
    seen = random_observation(length=20, budget=4, protect=[(0, 5)])
    with pytest.raises(BudgetError, match="5 protected entries"):
        Duo().judge(gathered(seen, Duo().needs()))
    for text, said in (
        ("duo[sinks=-1]", "sinks >= 0; received sinks=-1"),
        ("duo[recent=0]", "recent >= 1; received recent=0"),
        ("duo[streaming=2]", "an option of duo; received 'streaming'"),
    ):
        with pytest.raises(PolicyError, match=said):
            parse_policy(text)
    with pytest.raises(PolicyError, match="a place for statistics"):
        Duo(statistics=" ")
    with pytest.raises(PolicyError, match="a policy whose `needs` declares its statistics; received a use of 'model'"):
        Duo().judge(replace(seen, statistics={}, protected=None))
