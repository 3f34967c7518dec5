from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.lab.instance import Instance, InstanceError, forced_error
from kvkeep.lab.measuring import measure
from kvkeep.lab.penalty import free_error, free_weights, grown_set, grown_sets, penalty
from kvkeep.lab.selection import best_set, top_mass

from .instances import instances, random_instance


def quadratic_programme(instance: Instance, kept) -> float:
    """The nearest point of the hull by scipy: with weights that sum to t the residual is t times the distance, so
    the best weights of `min ||[U; 1] x - [0; 1]||`, x >= 0, are those of the hull, up to their sum."""
    points = instance.centred[list(kept)]
    scale = float(np.abs(points).max()) or 1.0
    system = np.vstack([points.T / scale, np.ones(len(points))])
    x, _ = scipy.optimize.nnls(system, np.array([*np.zeros(points.shape[1]), 1.0]))
    return float(np.linalg.norm((x / x.sum()) @ points))


@pytest.mark.parametrize("size", [1, 3, 16, 64])
@pytest.mark.parametrize("entries", [1, 4, 8, 32])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_free_weights_are_those_of_a_quadratic_programme(size, entries, seed):
    instance = random_instance(200, size, seed)
    free = free_weights(instance, top_mass(instance, entries))
    assert free.error == pytest.approx(quadratic_programme(instance, free.kept), abs=1e-6 * instance.radius)
    assert free.weights.sum() == pytest.approx(1)
    assert (free.weights >= 0).all()
    mean = free.weights @ instance.values[free.kept]
    assert free.error == pytest.approx(np.linalg.norm(mean - instance.mean), abs=1e-12)


def test_another_solver_agrees():
    """SLSQP states the programme as it is written, without the trick of the other test."""
    instance = random_instance(50, 6, seed=7)
    kept = top_mass(instance, 8)
    points = instance.centred[kept]
    result = scipy.optimize.minimize(
        lambda a: float(((a @ points) ** 2).sum()),
        np.full(8, 1 / 8),
        jac=lambda a: 2 * points @ (a @ points),
        bounds=[(0, 1)] * 8,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(8)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert free_weights(instance, kept).error == pytest.approx(math.sqrt(result.fun), abs=1e-6)


@given(instances(), st.data())
def test_free_weights_of_awkward_sets(instance, data):
    """Points that coincide, lie on a line, or surround the mean."""
    entries = data.draw(st.integers(1, instance.size - 1))
    kept = data.draw(st.lists(st.integers(0, instance.size - 1), min_size=entries, max_size=entries, unique=True))
    free = free_weights(instance, kept)
    assert free.error <= forced_error(instance, kept) + 1e-6 * instance.radius
    assert free.error == pytest.approx(quadratic_programme(instance, kept), abs=1e-6 * instance.radius)


@given(instances(), st.data())
def test_a_grown_set_has_its_size(instance, data):
    entries = data.draw(st.integers(1, instance.size - 1))
    kept = grown_set(instance, entries)
    assert len(set(kept.tolist())) == entries


@given(instances() | st.integers(0, 50).map(lambda seed: random_instance(60, 5, seed)), st.data())
def test_one_search_grows_the_sets_of_all_budgets(instance, data):
    budgets = data.draw(st.lists(st.integers(1, instance.size - 1), max_size=4))
    found = grown_sets(instance, budgets)
    assert set(found) == set(budgets)
    for entries, kept in found.items():
        assert kept.tolist() == grown_set(instance, entries).tolist()


def test_growing_beats_top_mass_on_most_rows():
    rows = [random_instance(300, 16, seed, peak=1.0) for seed in range(20)]
    better = sum(free_weights(row, grown_set(row, 8)).error < free_weights(row, top_mass(row, 8)).error for row in rows)
    assert better > 15


def test_the_pool_takes_the_best_of_its_sets():
    instance = random_instance(100, 8, seed=4)
    best, top = best_set(instance, 8).kept, top_mass(instance, 8)
    found = free_error(instance, 8, (top, best)).error
    assert found == min(free_weights(instance, kept).error for kept in (grown_set(instance, 8), top, best))


def test_penalty():
    assert penalty(2, 1) == 2
    assert penalty(0, 0) == 1
    assert penalty(1, 0) == math.inf
    assert penalty(1, 1 + 1e-12) == 1


def test_measuring_a_row_gives_all_of_it():
    instance = random_instance(120, 8, seed=9)
    for row in measure(instance, (4, 8), instance.probabilities):
        assert row.best_error <= row.balanced_error <= row.top_error
        assert row.free_error <= row.best_error
        assert row.vote_error == row.top_error  # a group of one votes for its own
        assert 0 <= row.closable_share < 1
        assert row.kappa == pytest.approx(1 / (1 - row.closable_share))
        assert row.penalty == pytest.approx(row.best_error / row.free_error)
    with pytest.raises(InstanceError, match="from 1 to 119 keys"):
        measure(instance, (120,))
