"""What it costs that a cache keeps the softmax's own weights: forced weights against free ones.

Source: ContourKV (arXiv 2608.25230): the penalty `pi(s) = E_S(s) / E_F(s)`, estimated as `E_S^pool / E_F^FW`, with
Frank-Wolfe for the denominator. Both are upper bounds of what they stand for, so the bias of pi has no sign.

Free weights for a given set are the point of the convex hull of its values that is nearest to mu. We find it by
Frank-Wolfe in the fully corrective form with away steps (Wolfe 1976, "Finding the nearest point in a polytope"): each
step adds the key that Frank-Wolfe would move towards and then solves for the best weights of the keys in use; where a
weight would fall below zero it goes away from that key as far as it can and drops it. It ends by the same gap as
Frank-Wolfe, after about as many steps as there are keys in use, each a small linear system.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.lab.instance import Floats, Indexes, Instance, Kept, check_budget, kept_indexes

GAP = 1e-13  # of the squared distance, relative to the squared radius of the set: 3e-7 of the radius at worst


@dataclass(frozen=True, eq=False)
class Free:
    """Free weights of a set.

    Attributes:
        kept: `[s]`, ascending.
        weights: `[s]`, not negative, summing to 1.
        error: distance of their mean to mu.
    """

    kept: Indexes
    weights: Floats
    error: float


def free_weights(instance: Instance, kept: Kept) -> Free:
    """The best weights of a set: `e_f(A) = dist(mu, conv{v_j: j in A})`.

    Args:
        instance: the row.
        kept: `[s]` keys.

    Raises:
        InstanceError: a set that is none.
    """
    indexes = kept_indexes(instance, kept)
    points = instance.centred[indexes]
    scale = float(np.abs(points).max()) or 1.0
    scaled = points / scale
    corral = _nearest(scaled, most=len(indexes))
    weights = np.zeros(len(indexes))
    weights[corral.points] = corral.weights
    return Free(indexes, weights, scale * float(np.linalg.norm(weights @ scaled)))


def grown_set(instance: Instance, entries: int) -> Indexes:
    """The keys that Frank-Wolfe over all keys uses when it may use `entries` of them, ascending.

    Where fewer are enough, the keys of largest probability fill it up.

    Raises:
        InstanceError: a budget that leaves nothing to choose.
    """
    return grown_sets(instance, [entries])[entries]


def grown_sets(instance: Instance, budgets: Sequence[int]) -> dict[int, Indexes]:
    """`grown_set` of several budgets: the search for the largest passes by the others.

    Raises:
        InstanceError: a budget that leaves nothing to choose.
    """
    for entries in budgets:
        check_budget(instance, entries)
    scale = float(np.abs(instance.centred).max()) or 1.0
    used: dict[int, Indexes] = {}
    for corral in _corrals(instance.centred / scale, most=max(budgets, default=1)):
        used |= {entries: corral.points for entries in budgets if len(used.get(entries, ())) < entries}
    return {entries: _filled(instance, points, entries) for entries, points in used.items()}


def _filled(instance: Instance, used: Indexes, entries: int) -> Indexes:
    others = instance.order[~np.isin(instance.order, used)]
    return np.sort(np.concatenate([used, others[: entries - len(used)]]).astype(np.intp))


def free_error(instance: Instance, entries: int, sets: Iterable[Kept] = (), grown: Indexes | None = None) -> Free:
    """`E_F^FW(s)`: the least free error over a pool of sets, an upper bound of `E_F(s)`.

    The pool is the set that Frank-Wolfe grows, and whatever is passed (top-mass, the best forced set, the balanced
    one). The paper's summary does not say which sets its pool has. With the best forced set in it pi is at least 1.

    Args:
        instance: the row.
        entries: s.
        sets: others to look at.
        grown: the set of `grown_set`, if it is there already.

    Raises:
        InstanceError: a budget that leaves nothing to choose, or a set that is none.
    """
    grown = grown_set(instance, entries) if grown is None else grown
    found = [free_weights(instance, kept) for kept in (grown, *sets)]
    return min(found, key=lambda free: free.error)


def penalty(forced: float, free: float) -> float:
    """`pi = E_S / E_F`; infinite where only the free error is 0, and 1 where both are."""
    if free == 0:
        return 1.0 if forced == 0 else math.inf
    return max(1.0, forced / free)  # below 1 by rounding only, if the free one was minimised over the forced set too


@dataclass(frozen=True, eq=False)
class _Corral:
    """Points in use and their weights."""

    points: Indexes
    weights: Floats


def _nearest(points: Floats, most: int) -> _Corral:
    """The point of least norm in the convex hull of `points [n, d]`, with at most `most` of them in use."""
    *_, last = _corrals(points, most)
    return last


def _corrals(points: Floats, most: int) -> Iterator[_Corral]:
    """The points in use after each step towards the nearest one; one more at most with each step.

    Args:
        points: scaled to about 1.
        most: points in use; the search ends where one more would be needed.
    """
    squares = (points**2).sum(axis=1)
    allowed = GAP * float(squares.max())
    used = np.array([int(squares.argmin())], dtype=np.intp)
    weights = np.ones(1)
    nearest = math.inf
    while True:
        yield _Corral(used, weights)
        x = weights @ points[used]
        distance = float(x @ x)
        products = points @ x
        entering = int(products.argmin())
        gap = distance - float(products[entering])
        if gap <= allowed or len(used) >= most or entering in used or not distance < nearest:
            return
        nearest = distance
        used, weights = _correct(points, np.append(used, entering), np.append(weights, 0.0))


def _correct(points: Floats, used: Indexes, weights: Floats) -> tuple[Indexes, Floats]:
    """Best weights of the points in use, which may become fewer."""
    while True:
        wanted = _affine(points[used])
        if (wanted > 0).all():
            return used, wanted
        negative = np.flatnonzero(wanted <= 0)
        away = weights[negative] - wanted[negative]
        shares = np.divide(weights[negative], away, out=np.zeros(len(away)), where=away > 0)
        at = int(shares.argmin())
        weights = weights + float(shares[at]) * (wanted - weights)
        staying = weights > 0
        staying[negative[at]] = False  # exactly zero, whatever rounding says
        used, weights = used[staying], weights[staying] / weights[staying].sum()
        if len(used) == 1:
            return used, np.ones(1)


def _affine(points: Floats) -> Floats:
    """Weights `[n]` that sum to 1, of any sign, of the point of least norm in the affine hull of `points [n, d]`."""
    gram = points @ points.T
    system = gram + float(np.trace(gram) / len(gram) or 1.0)  # adds a constant to the form, so the least stays there
    try:
        solved = np.linalg.solve(system, np.ones(len(gram)))
    except np.linalg.LinAlgError:  # points that depend on each other: any of the solutions serves
        solved = np.linalg.lstsq(system, np.ones(len(gram)), rcond=None)[0]
    weights: Floats = solved / solved.sum()
    return weights
