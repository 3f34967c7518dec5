from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.learn import (
    LearnError,
    boundary,
    effective_score,
    evict_at,
    kept_after,
    log_gamma,
    recall,
    static_priority,
    visible_mask,
)
from kvkeep.policies.online import Geometry

from .naive import eligible, fenwick_cutoffs, kept_of, seen_by

geometries = st.builds(Geometry, sinks=st.integers(0, 3), window=st.integers(1, 5), slots=st.integers(1, 6))
# Few distinct numbers, so that many are equal.
rows = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30)


@given(geometries, rows)
def test_an_interval_a_cutoff_and_a_sorted_list_say_the_same(geometry, priorities):
    length = len(priorities)
    mask = visible_mask(evict_at(torch.tensor([priorities]), geometry, len(priorities)))[0]
    rank, cutoffs = fenwick_cutoffs(priorities, geometry)
    for query in range(length):
        expected = seen_by(priorities, query, geometry)
        assert set(mask[query].nonzero()[:, 0].tolist()) == expected
        by_cutoff = {
            t
            for t in range(query + 1)
            if t < geometry.sinks
            or query - t < geometry.window
            or (t in eligible(query, geometry) and rank[t] <= cutoffs[query])
        }
        assert by_cutoff == expected
        assert len(expected) == min(query + 1, geometry.held)


@given(geometries, rows)
def test_cutoffs_only_tighten_and_nothing_comes_back(geometry, priorities):
    _, cutoffs = fenwick_cutoffs(priorities, geometry)
    assert cutoffs == sorted(cutoffs, reverse=True)
    mask = visible_mask(evict_at(torch.tensor([priorities]), geometry, len(priorities)))[0]
    for t in range(len(priorities)):
        seen = mask[:, t].nonzero()[:, 0].tolist()
        assert seen == list(range(t, t + len(seen)))


@given(geometries, rows, st.data())
def test_what_a_prefill_keeps_is_what_its_last_query_sees(geometry, priorities, data):
    tokens = data.draw(st.integers(1, len(priorities)))
    evicted = evict_at(torch.tensor([priorities]), geometry, len(priorities))
    expected = seen_by(priorities[:tokens], tokens - 1, geometry)
    assert set(kept_after(evicted, tokens)[0].nonzero()[:, 0].tolist()) == expected
    assert torch.equal(kept_after(evicted), visible_mask(evicted)[:, -1])
    assert torch.equal(visible_mask(evicted, 1, tokens), visible_mask(evicted)[:, 1:tokens])


@given(geometries, st.integers(1, 40), st.floats(0.9, 0.999999))
def test_zero_scores_are_streaming_llm(geometry, length, gamma):
    priorities = static_priority(torch.zeros(1, length), torch.tensor([math.log(gamma)]))
    mask = visible_mask(evict_at(priorities, geometry, length))[0]
    for query in range(length):
        last = set(range(max(0, query + 1 - geometry.window - geometry.slots), query + 1))
        assert set(mask[query].nonzero()[:, 0].tolist()) == last | set(range(min(geometry.sinks, query + 1)))


@given(geometries, rows)
def test_enough_slots_are_dense_attention(geometry, priorities):
    wide = Geometry(geometry.sinks, geometry.window, len(priorities))
    mask = visible_mask(evict_at(torch.tensor([priorities]), wide, len(priorities)))[0]
    assert torch.equal(mask, torch.ones_like(mask).tril())


@settings(max_examples=40)
@given(geometries, rows, st.floats(0.5, 0.99))
def test_a_static_priority_ranks_as_effective_scores_do(geometry, scores, gamma):
    """Whatever the query, faded scores stand in the order of the static priorities."""
    scores = torch.tensor(scores, dtype=torch.float64) + torch.linspace(0, 1e-3, len(scores), dtype=torch.float64)
    decay = torch.tensor(math.log(gamma), dtype=torch.float64)
    static = static_priority(scores, decay)
    positions = torch.arange(len(scores))
    for query in (len(scores), len(scores) + 100):
        faded = effective_score(scores, positions, torch.tensor(query), decay)
        assert torch.equal(faded.argsort(), static.argsort())
        torch.testing.assert_close(static + query * decay, faded, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(static_priority(scores[2:], decay, start=2), static[2:])


def test_a_decay_stays_between_its_bounds_and_learns():
    alpha = torch.tensor([-50.0, 0.0, 50.0], requires_grad=True)
    found = log_gamma(alpha, (0.999, 0.999999))
    torch.testing.assert_close(found[0].item(), math.log(0.999))
    torch.testing.assert_close(found[2].item(), math.log(0.999999))
    torch.testing.assert_close(found[1].item(), (math.log(0.999) + math.log(0.999999)) / 2)
    found.sum().backward()
    assert alpha.grad[1] > 0


def test_priorities_are_float32_whatever_the_scores():
    assert static_priority(torch.zeros(4, dtype=torch.bfloat16), torch.tensor(-1e-3)).dtype == torch.float32


@given(geometries, rows, st.integers(1, 12))
def test_the_boundary_is_the_last_entry_that_stays(geometry, priorities, more):
    priorities = (priorities + [0.0, 1.0, -1.0] * 20)[: geometry.sinks + geometry.slots + more]  # of T positions
    length = len(priorities) + geometry.window
    queries = torch.arange(geometry.held, length)
    found = boundary(torch.tensor([priorities]), queries, geometry)
    full = priorities + [0.0] * geometry.window
    for index, query in enumerate(queries.tolist()):
        newest = query - geometry.window
        kept = kept_of(full, query, geometry)
        assert found.newest[index] == newest
        assert found.kept[0, index] == (newest in kept)
        assert found.own[0, index] == (kept[-1] == newest)
        if found.own[0, index]:
            [displaced] = set(kept_of(full, query - 1, geometry)) - set(kept)
            assert found.rival[0, index] == displaced
        else:
            assert found.rival[0, index] == kept[-1]


def test_no_boundary_before_an_entry_must_leave():
    priorities = torch.zeros(1, 20)
    geometry = Geometry(2, 3, 4)
    with pytest.raises(LearnError, match=r"from 9, the first .* to 22; received queries from 8"):
        boundary(priorities, torch.tensor([8, 12]), geometry)
    with pytest.raises(LearnError, match="to 23"):
        boundary(priorities, torch.tensor([12, 23]), geometry)
    assert boundary(priorities, torch.zeros(0, dtype=torch.long), geometry).kept.shape == (1, 0)


@given(geometries, rows, st.integers(0, 2**31))
def test_recall_counts_the_teachers_slots(geometry, priorities, seed):
    generator = torch.Generator().manual_seed(seed)
    others = torch.randn(len(priorities), generator=generator).tolist()
    teacher, student = (evict_at(torch.tensor([row]), geometry, len(row)) for row in (priorities, others))
    queries = torch.arange(len(priorities))
    assert (recall(teacher, teacher, queries, geometry) == 1).all()  # an oracle
    found = recall(student, teacher, queries, geometry)[0]
    for query in range(len(priorities)):
        wanted = set(kept_of(priorities, query, geometry))
        held = set(kept_of(others, query, geometry))
        assert found[query] == pytest.approx(len(wanted & held) / len(wanted) if wanted else 1)


def test_leading_dimensions_are_rows():
    priorities = torch.randn(2, 3, 15, generator=torch.Generator().manual_seed(0))
    geometry = Geometry(1, 2, 3)
    together = evict_at(priorities, geometry, 15)
    for b in range(2):
        for c in range(3):
            assert torch.equal(together[b, c], evict_at(priorities[b, c][None], geometry, 15)[0])


@given(geometries, rows)
def test_the_window_needs_no_priorities(geometry, priorities):
    rows, length = torch.tensor([priorities]), len(priorities)
    known = rows[:, : max(0, length - geometry.window)]
    assert torch.equal(evict_at(known, geometry, length), evict_at(rows, geometry, length))
    if known.shape[1]:
        with pytest.raises(LearnError, match="all but the window"):
            evict_at(known[:, :-1], geometry, length)
    with pytest.raises(LearnError, match=f"to {length} positions"):
        evict_at(torch.zeros(1, length + 1), geometry, length)
