"""The solver's best set is that of enumeration; where it is not installed, the error says how to get it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.lab import certify as certifying
from kvkeep.lab.certify import certify, is_available
from kvkeep.lab.instance import Instance, InstanceError, forced_error
from kvkeep.lab.selection import balance, best_set, candidates

from .instances import brute_force, instances, random_instance

solver = pytest.mark.skipif(not is_available(), reason='the solver SCIP is not installed: pip install "kvkeep[scip]"')


@solver
def test_the_papers_three_keys():
    three = Instance(np.array([0.45, 0.45, 0.10]), np.array([[-1.0], [1.0], [5.0]]))
    found = certify(three, 2, np.arange(3))
    assert (found.kept.tolist(), found.proven) == ([0, 2], True)
    assert found.error == found.bound == pytest.approx(9 / 22, abs=1e-12)


@solver
@settings(max_examples=10)
@given(instances(most_keys=7), st.data())
def test_all_subsets(instance, data):
    entries = data.draw(st.integers(1, instance.size - 1))
    found = certify(instance, entries, np.arange(instance.size))
    assert found.proven
    assert found.error == forced_error(instance, found.kept)
    assert len(found.kept) == entries
    assert found.error == pytest.approx(brute_force(instance, entries), rel=1e-4, abs=1e-5 * instance.radius + 1e-12)


@solver
@pytest.mark.parametrize(("entries", "size"), [(4, 3), (4, 16), (6, 5)])
def test_the_papers_candidates(entries, size):
    instance = random_instance(60, size, seed=entries + size)
    pool = candidates(instance, entries, extra=6)
    found, enumerated = certify(instance, entries, pool), best_set(instance, entries, pool)
    assert found.proven
    assert set(found.kept.tolist()) <= set(pool.tolist())
    assert found.error == pytest.approx(enumerated.error, rel=1e-5)
    assert found.error <= balance(instance, entries, pool).error
    assert 1 <= found.programmes <= 8


@solver
def test_what_the_time_does_not_suffice_for_is_said(monkeypatch):
    instance = random_instance(60, 4, seed=1)
    pool = candidates(instance, 4, extra=4)
    least = best_set(instance, 4, pool).error
    none = certify(instance, 4, pool, seconds=0)
    assert (none.proven, none.bound, none.programmes) == (False, 0, 0)
    assert none.error == balance(instance, 4, pool).error
    solve = certifying._solve

    def unfinished(*arguments):
        chosen, least, _ = solve(*arguments)
        return chosen, least - 0.01, False

    monkeypatch.setattr(certifying, "_solve", unfinished)
    some = certify(instance, 4, pool)
    assert not some.proven
    assert some.bound < least <= some.error + 1e-12


@solver
def test_a_pool_need_not_hold_the_largest_masses():
    instance = random_instance(20, 4, seed=2)
    pool = np.sort(instance.order[5:15])
    found = certify(instance, 3, pool)
    assert found.proven
    assert found.error == pytest.approx(best_set(instance, 3, pool).error, rel=1e-5)


def test_what_cannot_be_is_refused(monkeypatch):
    instance = random_instance(9, 2, seed=0)
    for entries in (0, 9):
        with pytest.raises(InstanceError, match="a budget from 1 to 8 keys"):
            certify(instance, entries)
    with pytest.raises(InstanceError, match="at least 3 candidates; received 2"):
        certify(instance, 3, np.array([1, 4]))
    monkeypatch.setattr(certifying, "is_available", lambda: False)
    with pytest.raises(InstanceError, match=r'received no package pyscipopt; pip install "kvkeep\[scip\]"'):
        certify(instance, 3)
