"""Random rows of attention, and the slow way to judge them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from kvkeep.lab.instance import Instance


def random_instance(keys: int, size: int, seed: int, *, peak: float = 1.5) -> Instance:
    generator = np.random.default_rng(seed)
    scores = peak * generator.normal(size=keys)
    p = np.exp(scores - scores.max())
    return Instance(p / p.sum(), generator.normal(size=(keys, size)))


def brute_force(instance: Instance, entries: int) -> float:
    """The least forced error over all sets, from its definition."""
    mu = instance.probabilities @ instance.values
    errors = []
    for kept in itertools.combinations(range(instance.size), entries):
        p = instance.probabilities[list(kept)]
        errors.append(float(np.linalg.norm(mu - (p / p.sum()) @ instance.values[list(kept)])))
    return min(errors)


@st.composite
def instances(draw, most_keys: int = 10):
    """Rows of few keys, with equal masses, equal values and zero vectors among them."""
    keys, size = draw(st.integers(3, most_keys)), draw(st.integers(1, 4))
    masses = draw(st.lists(st.integers(1, 6), min_size=keys, max_size=keys))
    coordinate = st.integers(-4, 4) | st.floats(-3, 3, allow_nan=False, width=32)
    values = draw(st.lists(st.lists(coordinate, min_size=size, max_size=size), min_size=keys, max_size=keys))
    p = np.array(masses, dtype=np.float64)
    return Instance(p / p.sum(), np.array(values, dtype=np.float64))
