"""Recipes that a search has to beat: weights at random, and a grid over the three of FRC."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvkeep.evolve.mutators.edits import DECIMALS
from kvkeep.evolve.mutators.protocol import MutatorError
from kvkeep.evolve.mutators.reading import SEED_RECIPES, read
from kvkeep.evolve.mutators.recipe import Recipe
from kvkeep.evolve.program import Program


def random_weights(recipe: Recipe, random: np.random.Generator) -> Recipe:
    """The recipe with other weights: positive, their sum 1, all such weights equally likely (flat Dirichlet)."""
    weights = np.maximum(random.dirichlet(np.ones(len(recipe.terms))), 10.0**-DECIMALS)
    return _weighted(recipe, weights)


def weight_grid(points: int) -> tuple[Recipe, ...]:
    """FRC with every combination of three weights from an even grid that sum to 1.

    CacheCraft 2026 (arXiv 2608.14555) has weights 0.55, 0.30 and 0.15; a grid over them is the plain search that an
    evolved program has to beat. A term whose weight is 0 is left out.

    Args:
        points: values of one weight, from 0 to 1: `points (points + 1) / 2` recipes.

    Raises:
        MutatorError: fewer than two points.
    """
    if points < 2:
        raise MutatorError(expected="at least 2 points of a weight", received=f"{points}", remedy="0 and 1 are two")
    frc, steps = SEED_RECIPES["frc"], points - 1
    return tuple(
        _weighted(frc, np.array([i, j, steps - i - j]) / steps) for i in range(points) for j in range(points - i)
    )


def frc_weight_share(program: Program) -> float | None:
    """The share of FRC's three features in the sum of the magnitudes of all weights, 0 to 1.

    Returns:
        None for a program that the grammar cannot read.
    """
    recipe = read(program)
    if recipe is None:
        return None
    features = {term.feature for term in SEED_RECIPES["frc"].terms}
    weights = {True: 0.0, False: 0.0}
    for term in recipe.terms:
        weights[term.feature in features] += abs(term.weight)
    return weights[True] / (weights[True] + weights[False]) if any(weights.values()) else 0.0


def _weighted(recipe: Recipe, weights: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Recipe:
    terms = tuple(
        replace(term, weight=round(float(weight), DECIMALS))
        for term, weight in zip(recipe.terms, weights, strict=True)
        if round(float(weight), DECIMALS)
    )
    return replace(recipe, terms=terms)
