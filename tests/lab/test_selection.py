from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.lab.enumeration import least_error, subsets
from kvkeep.lab.instance import Instance, InstanceError, dropped_mass, forced_error
from kvkeep.lab.penalty import free_weights
from kvkeep.lab.selection import (
    auc,
    balance,
    best_set,
    candidates,
    closable_share,
    extra_keys,
    group_vote,
    imbalance,
    is_flat,
    kappa,
    least_dropped_mass,
    rank_correlation,
    top_mass,
)

from .instances import brute_force, instances, random_instance

THREE = Instance(np.array([0.45, 0.45, 0.10]), np.array([[-1.0], [1.0], [5.0]]))
FOUR = Instance(np.full(4, 0.25), np.array([[0.0], [1.0], [2.0], [3.0]]))


def test_the_papers_three_keys():
    top, best = top_mass(THREE, 2), best_set(THREE, 2)
    assert top.tolist() == [0, 1]
    assert forced_error(THREE, top) == pytest.approx(1 / 2, abs=1e-15)
    assert best.kept.tolist() == [0, 2]
    assert best.error == pytest.approx(9 / 22, abs=1e-15)
    assert kappa(forced_error(THREE, top), best.error) == pytest.approx(11 / 9, abs=1e-14)
    assert closable_share(forced_error(THREE, top), best.error) == pytest.approx(2 / 11, abs=1e-14)
    assert free_weights(THREE, [0, 1]).error == pytest.approx(0, abs=1e-15)
    assert free_weights(THREE, [0, 1]).weights == pytest.approx([0.25, 0.75])
    assert balance(THREE, 2).kept.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("kept", "before", "after"), [([2], 1 / 2, 1 / 2), ([1, 2], 0, 1 / 2), ([1], 1 / 2, 1), ([1, 3], 1 / 2, 1 / 6)]
)
def test_the_papers_four_keys_show_that_the_error_is_neither_sub_nor_supermodular(kept, before, after):
    assert forced_error(FOUR, kept) == pytest.approx(before, abs=1e-15)
    assert forced_error(FOUR, [0, *kept]) == pytest.approx(after, abs=1e-15)


@given(instances(), st.data())
def test_the_error_has_three_forms_and_its_bounds(instance, data):
    entries = data.draw(st.integers(1, instance.size - 1))
    kept = data.draw(st.lists(st.integers(0, instance.size - 1), min_size=entries, max_size=entries, unique=True))
    rest = [j for j in range(instance.size) if j not in kept]
    p, v = instance.probabilities, instance.values

    def mean(keys):
        return p[keys] @ v[keys] / p[keys].sum()

    error = forced_error(instance, kept)
    close = {"rel": 1e-9, "abs": 1e-12}
    assert error == pytest.approx(np.linalg.norm(p @ v - mean(kept)), **close)
    assert error == pytest.approx(p[rest].sum() * np.linalg.norm(mean(rest) - mean(kept)), **close)
    assert dropped_mass(instance, kept) == pytest.approx(1 - p[kept].sum(), abs=1e-15)
    assert np.abs(instance.weighted.sum(axis=0)).max() < 1e-14
    assert error >= free_weights(instance, kept).error - 1e-6 * instance.radius
    top = forced_error(instance, top_mass(instance, entries))
    assert top <= 2 * instance.radius * least_dropped_mass(instance, entries) + 1e-12
    assert imbalance(instance, entries) == pytest.approx(top * p[top_mass(instance, entries)].sum(), **close)


@given(instances(most_keys=7), st.data())
def test_free_weights_on_the_best_set_stay_below_the_spread(instance, data):
    entries = data.draw(st.integers(1, instance.size - 1))
    best = min(free_weights(instance, kept).error for kept in itertools.combinations(range(instance.size), entries))
    assert best <= instance.spread / math.sqrt(entries) + 1e-6 * instance.radius
    assert instance.spread <= instance.radius + 1e-12


@given(instances(most_keys=9), st.data())
def test_enumeration_over_all_keys_is_brute_force(instance, data):
    entries = data.draw(st.integers(1, instance.size - 1))
    found = best_set(instance, entries, np.arange(instance.size))
    assert found.steps == math.comb(instance.size, entries)
    assert found.error == pytest.approx(brute_force(instance, entries), rel=1e-9, abs=1e-12 + 1e-8 * instance.radius)


@pytest.mark.parametrize("entries", [1, 4, 7, 13])
def test_enumeration_over_14_keys_is_brute_force(entries):
    instance = random_instance(14, 5, seed=entries)
    found = best_set(instance, entries, np.arange(14))
    assert found.error == pytest.approx(brute_force(instance, entries), rel=1e-12)
    assert found.error == forced_error(instance, found.kept)
    assert len(found.kept) == entries


def test_blocks_do_not_change_what_is_found(monkeypatch):
    instance = random_instance(40, 8, seed=3)
    whole = best_set(instance, 8)
    monkeypatch.setattr("kvkeep.lab.enumeration.BLOCK", 7)
    assert best_set(instance, 8).kept.tolist() == whole.kept.tolist()


def test_large_vectors_that_cancel_do_not_hide_the_best_set():
    """Two keys of half the mass each, on opposite sides: squares of the small ones are below the rounding of theirs."""
    generator = np.random.default_rng(1)
    p = np.array([0.5 - 4e-9, 0.5 - 4e-9, *np.full(8, 1e-9)])
    values = generator.normal(size=(10, 3))
    values[1] = -values[0]
    instance = Instance(p, values)
    assert best_set(instance, 5, np.arange(10)).error == pytest.approx(brute_force(instance, 5), rel=1e-4)


def test_subsets_are_all_of_them():
    for count in range(1, 7):
        for size in range(count + 1):
            rows = subsets(count, size)
            assert rows.shape == (math.comb(count, size), count)
            assert (rows.sum(axis=1) == size).all()
            assert len({tuple(row) for row in rows.tolist()}) == len(rows)


def test_candidates_are_top_mass_and_the_largest_single_errors():
    instance = random_instance(100, 4, seed=5)
    for entries, extra in ((4, 24), (8, 12), (16, 6), (32, 4)):  # the paper's
        assert extra_keys(entries) == extra
        pool, top = candidates(instance, entries), top_mass(instance, entries)
        added = sorted(set(pool.tolist()) - set(top.tolist()))
        assert len(added) == extra
        assert set(top.tolist()) <= set(pool.tolist())
        others = [j for j in range(100) if j not in pool]
        error = instance.probabilities * np.linalg.norm(instance.values - instance.mean, axis=1)
        assert error[added].min() >= error[others].max()
    assert len(candidates(instance, 8, extra=3)) == 11
    assert len(candidates(random_instance(10, 2, seed=0), 8)) == 10
    assert best_set(instance, 8).steps == 125_970


def test_ties_of_mass_go_to_the_lower_index():
    instance = Instance(np.array([0.2, 0.3, 0.2, 0.3]), np.eye(4))
    assert top_mass(instance, 1).tolist() == [1]
    assert top_mass(instance, 3).tolist() == [0, 1, 3]


@given(instances(), st.data())
def test_balancing_is_never_worse_than_top_mass_nor_better_than_the_best(instance, data):
    entries = data.draw(st.integers(1, instance.size - 1))
    top = forced_error(instance, top_mass(instance, entries))
    pool = candidates(instance, entries)
    balanced, best = balance(instance, entries, pool), best_set(instance, entries, pool)
    assert len(balanced.kept) == entries
    assert balanced.error == forced_error(instance, balanced.kept)
    assert best.error - 1e-8 * instance.radius <= balanced.error <= top
    assert (balanced.error < top) == (balanced.steps > 0)


@pytest.mark.parametrize("seed", range(6))
def test_balancing_stops_where_no_swap_helps(seed):
    instance = random_instance(60, 6, seed=seed)
    pool, balanced = candidates(instance, 8), balance(instance, 8)
    for a, b in itertools.product(balanced.kept, set(pool.tolist()) - set(balanced.kept.tolist())):
        swapped = [b if j == a else j for j in balanced.kept.tolist()]
        assert forced_error(instance, swapped) >= balanced.error * (1 - 1e-12)


@given(st.lists(st.integers(1, 12), min_size=4, max_size=8).filter(lambda x: len(x) % 2 == 0))
def test_a_zero_error_is_a_partition(numbers):
    """The paper's reduction: equal masses, s = N/2, d = 1. Choosing well is as hard as splitting numbers in halves."""
    half, total = len(numbers) // 2, sum(numbers)
    splits = any(2 * sum(part) == total for part in itertools.combinations(numbers, half))
    instance = Instance(np.full(len(numbers), 1 / len(numbers)), np.array(numbers, dtype=np.float64)[:, None])
    error = best_set(instance, half, np.arange(len(numbers))).error
    assert (error < 1e-12) == splits
    if not splits:
        assert error >= 1 / len(numbers) - 1e-12  # sums of integers miss the half of the total by at least a half


def test_kappa_and_share_where_errors_are_zero():
    assert (kappa(0, 0), closable_share(0, 0)) == (1, 0)
    assert (kappa(2, 0), closable_share(2, 0)) == (math.inf, 1)
    assert (kappa(2, 1), closable_share(2, 1)) == (2, 0.5)


def test_flat_cells():
    assert is_flat([0.2, 0.3, 0.3])
    assert not is_flat([0.25])
    assert not is_flat([0.9, 0.1, 0.1])
    with pytest.raises(InstanceError, match="received none"):
        is_flat([])


def test_ranks_correlate_whatever_the_numbers_are():
    ranks = np.array([3.0, 1.0, 2.0, 4.0, 4.0])
    assert rank_correlation(ranks, np.exp(ranks)) == pytest.approx(1)
    assert rank_correlation(ranks, -ranks) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(1 - 6 * 2 / (3 * 8))  # 1 - 6 sum d^2 / n(n^2 - 1)
    assert math.isnan(rank_correlation(ranks, np.ones(5)))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=20))
def test_auc_counts_pairs(pairs):
    high = [score for score, label in pairs if label]
    low = [score for score, label in pairs if not label]
    found = auc([score for score, _ in pairs], [label for _, label in pairs])
    if not high or not low:
        assert math.isnan(found)
        return
    wins = sum((a > b) + 0.5 * (a == b) for a in high for b in low)
    assert found == pytest.approx(wins / (len(high) * len(low)))


def test_a_group_votes_with_its_summed_mass():
    masses = np.array([[0.6, 0.3, 0.1, 0.0], [0.0, 0.3, 0.1, 0.6]])
    assert group_vote(masses, 2).tolist() == [0, 1]  # 0.6 each for 0, 1 and 3: lower indexes win
    assert group_vote(np.array([[0.1, 0.2, 0.7]]), 1).tolist() == [2]
    with pytest.raises(InstanceError, match=r"masses \[G, N\]"):
        group_vote(masses, 4)


@pytest.mark.parametrize(
    ("p", "v", "said"),
    [
        ([0.5, math.nan], [[0.0], [1.0]], "finite numbers"),
        ([0.5, 0.5], [[0.0], [math.inf]], "finite numbers"),
        ([1.0, 0.0], [[0.0], [1.0]], "probabilities above 0; received 0 at key 1"),
        ([0.5, 0.6], [[0.0], [1.0]], "a sum of 1.1"),
        ([1.0], [[0.0]], "at least two keys"),
        ([0.5, 0.5], [0.0, 1.0], "shapes"),
    ],
)
def test_what_is_no_row_is_refused(p, v, said):
    with pytest.raises(InstanceError, match=said):
        Instance(np.array(p), np.array(v))


@pytest.mark.parametrize("choose", [top_mass, candidates, best_set, balance, imbalance, least_dropped_mass])
@pytest.mark.parametrize("entries", [0, 3, 4])
def test_budgets_that_leave_no_choice_are_refused(choose, entries):
    with pytest.raises(InstanceError, match=f"from 1 to 2 keys.*received {entries}"):
        choose(THREE, entries)


@pytest.mark.parametrize("kept", [[], [0, 0], [-1], [3], [[0]], [0.5]])
def test_what_is_no_set_is_refused(kept):
    with pytest.raises(InstanceError, match="different keys from 0 to 2"):
        forced_error(THREE, kept)


def test_a_pool_that_is_too_small_is_refused():
    with pytest.raises(InstanceError, match="at least 2 candidates"):
        least_error(THREE, 2, np.array([1]))
    with pytest.raises(InstanceError, match="at least one key beside"):
        candidates(THREE, 2, extra=0)
