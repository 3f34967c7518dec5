"""The weights that a search has to beat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.evolve.mutators.protocol import MutatorError
from kvkeep.evolve.mutators.reading import SEED_RECIPES
from kvkeep.evolve.mutators.recipe import Recipe, Term
from kvkeep.evolve.mutators.rendering import program_of
from kvkeep.evolve.mutators.weights import frc_weight_share, random_weights, weight_grid
from kvkeep.evolve.program import seed_program

FRC = SEED_RECIPES["frc"]


@pytest.mark.parametrize("points", [2, 3, 6, 11])
def test_a_grid_has_every_combination_once(points: int) -> None:
    grid = weight_grid(points)
    assert len({program_of(recipe).digest for recipe in grid}) == len(grid) == points * (points + 1) // 2
    for recipe in grid:
        assert sum(term.weight for term in recipe.terms) == pytest.approx(1, abs=2e-3)
        assert {term.feature for term in recipe.terms} <= {term.feature for term in FRC.terms}
        assert recipe.selection == FRC.selection


def test_a_fine_grid_holds_frc_itself() -> None:
    assert FRC in weight_grid(21)


@given(st.integers(0, 2**32), st.sampled_from(sorted(SEED_RECIPES)))
def test_random_weights_change_nothing_else(seed: int, name: str) -> None:
    recipe = SEED_RECIPES[name]
    drawn = random_weights(recipe, np.random.default_rng(seed))
    assert [term.feature for term in drawn.terms] == [term.feature for term in recipe.terms]
    assert drawn.selection == recipe.selection
    assert all(term.weight > 0 for term in drawn.terms)
    assert sum(term.weight for term in drawn.terms) == pytest.approx(1, abs=5e-3)
    assert drawn == random_weights(recipe, np.random.default_rng(seed))


def test_the_share_of_frc_s_features() -> None:
    assert frc_weight_share(seed_program("frc")) == pytest.approx(1)
    mixed = Recipe((Term("local_attention", 0.3), Term("key_norm", -0.6)))
    assert frc_weight_share(program_of(mixed)) == pytest.approx(1 / 3)
    assert frc_weight_share(seed_program("random")) is None


def test_one_point_is_no_grid() -> None:
    with pytest.raises(MutatorError, match="2 points"):
        weight_grid(1)
