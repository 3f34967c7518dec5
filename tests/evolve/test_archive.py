"""Islands: fixed cells, the fittest stays, the best travel, and nothing half evaluated comes in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import ResultsError
from kvkeep.evolve.archive import BOUNDS, Archive, cell_of
from kvkeep.evolve.context import FEATURES, PrefillContext
from kvkeep.evolve.traits import Traits, behaviour_of, snapkv_sets, traits_of

LIMITS = {"overlap": 1.0, "run_length": 40.0, "recent": 1.0, "mass": 1.0}
traits = st.builds(Traits, *(st.floats(0, LIMITS[name]) for name in BOUNDS))
candidates = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 5), traits), max_size=30)


def context(length: int = 200, entries: int = 40, seed: int = 0) -> PrefillContext:
    random = np.random.default_rng(seed)
    arrays = {name: random.random(length).astype(np.float32) for name in FEATURES}
    arrays["position"] = np.arange(length, dtype=np.float32)
    arrays["recent_mask"] = (np.arange(length) >= length - 32).astype(np.float32)
    return PrefillContext(**arrays, L=length, K=entries, H=4, Q=64, layer=0)


@given(candidates)
def test_each_cell_holds_the_fittest_that_came(found: list[tuple[int, int, int, Traits]]) -> None:
    archive, model = Archive.of(3), {}
    for order, (island, name, fitness, what) in enumerate(found):
        archive.add(island, f"{name}", float(fitness), what, order)
        place = (island, cell_of(what))
        if place not in model or fitness > model[place][0]:  # of equals the first stays
            model[place] = (fitness, order, f"{name}")
    held = {
        (i, cell): (e.fitness, e.order, e.digest) for i, grid in enumerate(archive.islands) for cell, e in grid.items()
    }
    assert held == model
    assert archive.filled() == len({cell for _, cell in model})
    best = archive.best()
    assert (best is None) == (not found)
    if best is not None:
        assert (best.fitness, -best.order) == max((fitness, -order) for fitness, order, _ in model.values())


@given(candidates, st.integers(0, 2**32 - 1))
def test_parents_are_elites_of_their_island_each_once(found: list[tuple[int, int, int, Traits]], seed: int) -> None:
    archive = Archive.of(3)
    for order, (island, name, fitness, what) in enumerate(found):
        archive.add(island, f"{name}", float(fitness), what, order)
    for island in range(3):
        first = archive.parents(island, 3, np.random.default_rng(seed))
        again = archive.parents(island, 3, np.random.default_rng(seed))
        assert first == again
        digests = [elite.digest for elite in first]
        assert len(set(digests)) == len(digests)
        own = {elite.digest for elite in archive.islands[island].values()}
        everything = {elite.digest for grid in archive.islands for elite in grid.values()}
        assert set(digests) <= (own or everything)
        assert len(digests) == min(3, len(own or everything))


def test_better_ones_are_parents_more_often_but_none_never() -> None:
    archive = Archive.of(1)
    for order, overlap in enumerate((0.1, 0.3, 0.4, 0.6, 0.7, 0.9)):
        archive.add(0, f"{order}", float(order), Traits(overlap, 1.0, 0.0, 0.1), order)
    random = np.random.default_rng(0)
    drawn = [archive.parents(0, 1, random)[0].digest for _ in range(3000)]
    counts = [drawn.count(f"{order}") for order in range(6)]
    assert counts == sorted(counts)
    assert counts[0] > 100
    assert counts[5] > 2 * counts[0]


def test_the_best_of_each_island_comes_to_the_next_one() -> None:
    archive = Archive.of(3)
    archive.add(0, "a", 5.0, Traits(0.1, 1, 0, 0), 0)
    archive.add(0, "worse", 1.0, Traits(0.9, 1, 0, 0), 1)
    archive.add(1, "b", 9.0, Traits(0.1, 1, 0, 0), 2)
    assert archive.migrate() == [(1, 2, "b")]  # "a" finds its cell taken by a fitter one
    archive.add(2, "c", 11.0, Traits(0.5, 1, 0, 0), 3)
    assert archive.migrate() == [(2, 0, "c")]  # "b" is at home on island 2 already
    assert archive.migrate() == [(0, 1, "c")]
    assert archive.migrate() == []
    assert Archive.of(1).migrate() == []


@given(traits)
def test_cells_are_the_bins_of_the_bounds(what: Traits) -> None:
    for (name, bounds), index in zip(BOUNDS.items(), cell_of(what), strict=True):
        value = getattr(what, name)
        assert index == 0 or value >= bounds[index - 1]
        assert index == len(bounds) or value < bounds[index]


@pytest.mark.parametrize(
    ("fitness", "what"), [(None, Traits(0, 1, 0, 0)), (3.0, None), (float("nan"), Traits(0, 1, 0, 0))]
)
def test_nothing_half_evaluated_is_compared(fitness: float | None, what: Traits | None) -> None:
    with pytest.raises(ResultsError, match="to the end"):
        Archive.of(1).add(0, "a" * 64, fitness, what, 0)
    with pytest.raises(ResultsError, match="island"):
        Archive.of(0)


def test_traits_by_hand() -> None:
    made = context()
    kept = np.array([0, 1, 2, 10, 150, 151])
    other = np.array([2, 3, 10, 199])
    found = traits_of([made], [kept], [other])
    attention = made.global_attention.astype(np.float64)
    assert found.overlap == pytest.approx(2 / 8)
    assert found.run_length == pytest.approx(2.0)  # 0-2, 10, 150-151
    assert found.recent == pytest.approx(2 / 6)
    assert found.mass == pytest.approx(attention[kept].sum() / attention.sum())
    twice = traits_of([made, made], [kept, other], [other, other])
    assert twice.overlap == pytest.approx((2 / 8 + 1) / 2)


def test_behaviour_is_what_is_kept_whatever_its_order() -> None:
    one, other = np.array([1, 2, 3]), np.array([4, 5])
    assert behaviour_of([one, other]) == behaviour_of([one[::-1], other.astype(np.int32)])
    assert behaviour_of([one, other]) != behaviour_of([other, one])
    assert behaviour_of([one, other]) != behaviour_of([np.array([1, 2]), np.array([3, 4, 5])])


def test_the_yardstick_of_overlap_keeps_the_window() -> None:
    made = context()
    (kept,) = snapkv_sets([made])
    assert len(kept) == made.K
    assert traits_of([made], [kept], [kept]).overlap == 1
