"""Every subset of the candidates, judged at once.

The squared norm of `g_A` is a quadratic form in the Gram matrix of the candidates. They are split into two halves: the
form of a subset is that of its left part, plus that of its right part, plus twice their product. So all subsets that
take k keys from the left are one matrix product of (left parts) x (right parts), and a subset costs a few operations
instead of a sum over its vectors. Parts of more than half of a half are made as complements of smaller ones.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np

from kvkeep.lab.instance import Floats, Indexes, Instance, InstanceError, forced_error

BLOCK = 1 << 18  # subsets judged together: 2 MB for each array
NEAR = 64  # near ties of a block that are computed anew, from the vectors


def least_error(instance: Instance, entries: int, pool: Indexes) -> tuple[Indexes, int]:
    """The subset of `pool` of least forced error.

    Squares lose half of the digits where vectors cancel, so what is within rounding of the least square is computed
    again from the vectors, and the least of these wins.

    Args:
        instance: the row.
        entries: s.
        pool: `[m]` keys, ascending; m at least s.

    Returns:
        `[s]` keys, ascending, and how many subsets there are.

    Raises:
        InstanceError: a pool smaller than s.
    """
    count = len(pool)
    if count < entries:
        raise InstanceError(
            expected=f"at least {entries} candidates", received=f"{count}", remedy="add keys, or keep fewer"
        )
    vectors, mass = instance.weighted[pool], instance.probabilities[pool]
    scale = float(np.abs(vectors).max()) or 1.0  # squares of tiny vectors would vanish
    gram = (vectors / scale) @ (vectors / scale).T
    half = count // 2
    rounding = 64 * np.finfo(np.float64).eps * float(np.trace(gram))  # of a square, before it is divided
    best = math.inf  # least square so far
    winner: Indexes = pool[:entries]
    least = math.inf  # its error, from the vectors
    for from_left in range(max(0, entries - (count - half)), min(half, entries) + 1):
        left, right = subsets(half, from_left), subsets(count - half, entries - from_left)
        left_squares, left_mass = _form(left, gram[:half, :half]), left @ mass[:half]
        right_squares, right_mass = _form(right, gram[half:, half:]), right @ mass[half:]
        across = 2 * left @ gram[:half, half:]
        step = max(1, BLOCK // len(right))
        for start in range(0, len(left), step):
            rows = slice(start, start + step)
            squares = across[rows] @ right.T
            squares += left_squares[rows, None]
            squares += right_squares
            squares /= (left_mass[rows, None] + right_mass) ** 2
            flat = squares.ravel()
            at = int(flat.argmin())
            best = min(best, float(flat[at]))
            a, b = divmod(at, len(right))
            for place in _smallest(flat, best + rounding / float(left_mass[start + a] + right_mass[b]) ** 2):
                a, b = divmod(int(place), len(right))
                kept = pool[np.concatenate([left[start + a], right[b]]) > 0]
                error = forced_error(instance, kept)
                if error < least:
                    winner, least = kept, error
    return winner, math.comb(count, entries)


@lru_cache(maxsize=256)
def subsets(count: int, size: int) -> Floats:
    """All subsets of `size` out of `count`, `[C(count, size), count]`, a row of ones and zeros each."""
    if size > count / 2:
        return 1 - subsets(count, count - size)
    rows = np.zeros((math.comb(count, size), count))
    chosen = np.array(list(itertools.combinations(range(count), size)), dtype=np.intp).reshape(len(rows), size)
    np.put_along_axis(rows, chosen, 1.0, axis=1)
    rows.flags.writeable = False  # shared by all callers
    return rows


def _form(rows: Floats, gram: Floats) -> Floats:
    """`x' gram x` of each row, `[C]`."""
    form: Floats = ((rows @ gram) * rows).sum(axis=1)
    return form


def _smallest(values: Floats, most: float) -> Indexes:
    """Places of up to NEAR values that are not above `most`, the smallest first."""
    places = np.flatnonzero(values <= most)
    return places[np.argsort(values[places], kind="stable")[:NEAR]]
