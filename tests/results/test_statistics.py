from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import ResultsError
from kvkeep.results.statistics import (
    Measurement,
    check_equal_bytes,
    holm,
    mean_interval,
    paired_difference,
    sign_flip_p,
    stratified_mean,
)


def measured(values: Sequence[float], stratum: str = "t", questions: int = 1) -> list[Measurement]:
    """One context for each `questions` values."""
    return [Measurement(stratum, i // questions, i, value) for i, value in enumerate(values)]


def test_a_mean_over_tasks_is_the_mean_of_their_means() -> None:
    many, few = measured([1.0] * 90 + [0.0] * 10, "many"), measured([0.0, 0.0, 0.5, 0.5], "few")
    estimate = mean_interval([*many, *few])
    assert estimate.mean == pytest.approx((0.9 + 0.25) / 2)
    assert stratified_mean([*many, *few]) == estimate.mean
    assert (estimate.clusters, estimate.rows, estimate.strata) == (104, 104, 2)


def test_within_a_task_it_is_the_mean_over_rows() -> None:
    uneven = [Measurement("t", "a", 0, 1.0), *(Measurement("t", "b", i, 0.0) for i in range(3))]
    estimate = mean_interval(uneven)
    assert (estimate.mean, estimate.clusters, estimate.rows) == (0.25, 2, 4)


def test_the_same_input_gives_the_same_interval_in_any_order() -> None:
    draw = random.Random(3)
    values = measured([draw.random() for _ in range(40)], questions=2)
    shuffled = random.Random(1).sample(values, len(values))
    assert mean_interval(values) == mean_interval(shuffled)
    assert mean_interval(values, seed=1).low != mean_interval(values, seed=2).low


def test_agrees_with_scipy_on_independent_rows() -> None:
    values = np.random.default_rng(5).exponential(1, 30)
    ours = mean_interval(measured(list(values)), resamples=20_000)
    theirs = scipy.stats.bootstrap((values,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(0))
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.02)


def test_rows_of_one_context_are_not_independent() -> None:
    once = [float(i % 3 == 0) for i in range(24)]
    repeated = [value for value in once for _ in range(10)]
    one, ten = mean_interval(measured(once)), mean_interval(measured(repeated, questions=10))
    assert (ten.low, ten.high) == pytest.approx((one.low, one.high))
    assert (ten.clusters, ten.rows) == (24, 240)


def test_the_interval_covers_what_it_should() -> None:
    """Nominal 95 %; 300 tries of 20 contexts with four correlated answers each. Below 88 %: odds under one in 10^5."""
    draw = np.random.default_rng(11)
    hits = 0
    for _ in range(300):
        right = draw.beta(1.2, 0.8, 20)
        estimate = mean_interval(
            measured(list((draw.random((20, 4)) < right[:, None]).ravel() * 1.0), questions=4), resamples=500
        )
        hits += estimate.low is not None and estimate.high is not None and estimate.low <= 0.6 <= estimate.high
    assert 0.88 <= hits / 300 <= 0.99


def test_one_context_has_no_interval() -> None:
    estimate = mean_interval(measured([0.0, 1.0, 1.0], questions=3))
    assert (estimate.low, estimate.high, estimate.clusters, estimate.rows) == (None, None, 1, 3)
    assert estimate.note == "no interval: one context"
    two_tasks = mean_interval([*measured([0.0, 1.0], "a"), *measured([1.0], "b")])
    assert two_tasks.low is None
    assert two_tasks.note == "no interval: 1 tasks have one context"


def test_equal_numbers_have_no_interval() -> None:
    estimate = mean_interval(measured([0.1] * 20))
    assert (estimate.low, estimate.note) == (None, "no interval: all equal")
    assert estimate.mean == pytest.approx(0.1)


def test_few_contexts_are_marked() -> None:
    assert "fewer than 10" in mean_interval(measured([0.0, 1.0, 1.0])).note
    assert mean_interval(measured([0.0, 1.0] * 10)).note == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ResultsError, match="finite"):
        mean_interval(measured([1.0, value]))
    with pytest.raises(ResultsError, match="finite"):
        paired_difference(measured([1.0, value]), measured([1.0, 2.0]))
    with pytest.raises(ResultsError, match="finite"):
        sign_flip_p([1.0, value])


def test_nothing_is_refused() -> None:
    with pytest.raises(ResultsError, match="none"):
        mean_interval([])


def test_a_difference_is_paired() -> None:
    """Contexts differ far more than policies do: only pairs show it."""
    draw = np.random.default_rng(0)
    hard = draw.normal(0, 10, 30)
    first, second = measured(list(hard + 0.5)), measured(list(hard + draw.normal(0, 0.3, 30)))
    paired = paired_difference(first, second)
    assert paired.excludes_zero
    assert paired.difference.mean == pytest.approx(0.5, abs=0.2)
    assert paired.p_value < 0.01
    assert (paired.dropped_clusters, paired.dropped_rows) == (0, 0)
    swapped = paired_difference(second, first)
    assert swapped.difference.mean == pytest.approx(-paired.difference.mean)


def test_what_only_one_has_is_dropped_and_counted() -> None:
    first, second = measured([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], questions=2), measured([0.0, 0.0, 1.0], questions=2)
    paired = paired_difference(first, second)
    assert paired.difference.rows == 3
    assert paired.difference.clusters == 2
    assert (paired.dropped_clusters, paired.dropped_rows) == (1, 3)
    with pytest.raises(ResultsError, match="none of which"):
        paired_difference(measured([1.0], "a"), measured([1.0], "b"))
    with pytest.raises(ResultsError, match="two for"):
        paired_difference([*measured([1.0]), *measured([1.0])], measured([1.0]))


def test_a_constant_difference_excludes_zero_unless_it_is_zero() -> None:
    ones, zeros = measured([1.0] * 12), measured([0.0] * 12)
    always = paired_difference(ones, zeros)
    assert always.constant
    assert always.excludes_zero
    assert always.p_value == pytest.approx(2 / 2**12)
    never = paired_difference(zeros, zeros)
    assert not never.excludes_zero
    assert never.p_value == 1
    assert not paired_difference(ones[:1], zeros[:1]).excludes_zero


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0, 0.3]), min_size=1, max_size=9))
def test_sign_flips_are_enumerated(parts: list[float]) -> None:
    p, exact = sign_flip_p(parts)
    sums = [sum(s * x for s, x in zip(signs, parts, strict=True)) for signs in product([1, -1], repeat=len(parts))]
    higher = sum(value >= sum(parts) - 1e-12 for value in sums) / len(sums)
    lower = sum(value <= sum(parts) + 1e-12 for value in sums) / len(sums)
    assert exact
    assert p == pytest.approx(min(1.0, 2 * min(higher, lower)))
    assert p > 0


def test_many_sign_flips_are_sampled_and_never_give_zero() -> None:
    p, exact = sign_flip_p([1.0] * 60, resamples=999)
    assert not exact
    assert p == pytest.approx(2 / 1000)
    parts = list(np.random.default_rng(3).normal(0.3, 1, 16))
    exact_p, _ = sign_flip_p(parts)
    sampled_p, _ = sign_flip_p([*parts, 1e-9], resamples=20_000)
    assert sampled_p == pytest.approx(exact_p, abs=0.01)


def test_p_values_are_uniform_where_there_is_nothing() -> None:
    """400 tries of 8 contexts: the share below .05 is .05 within four standard errors, and the rest is uniform."""
    draw = np.random.default_rng(2)
    values = np.array([sign_flip_p(list(draw.normal(0, 1, 8)))[0] for _ in range(400)])
    assert (values < 0.05).mean() < 0.05 + 4 * np.sqrt(0.05 * 0.95 / 400)
    assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []
    with pytest.raises(ResultsError, match=r"1\.5"):
        holm([0.5, 1.5])


def test_equal_bytes() -> None:
    check_equal_bytes(1000, 1010)
    with pytest.raises(ResultsError, match=r"1,000 bytes of snapkv and 1,011 bytes of knorm"):
        check_equal_bytes(1000, 1011, names=("snapkv", "knorm"))
    with pytest.raises(ResultsError):
        check_equal_bytes(0, 1)
