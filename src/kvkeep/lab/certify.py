"""The exact least error over a pool of keys, by a mixed-integer solver: what enumeration cannot reach for larger pools.

ContourKV (arXiv 2608.25230) certifies single rows with SCIP. So does this, and needs the extra `scip`.

`e(A) = ||g_A|| / p(A)` is a ratio. Dinkelbach's method (1967) minimises a ratio through differences: with `t` the error
of a known set, the least of `||g_A|| - t p(A)` is below zero exactly if a better set exists, and its minimiser is one.
Each of these is a mixed-integer programme with one second-order cone. After a few of them none is below zero.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkeep.lab.instance import Floats, Indexes, Instance, InstanceError, check_budget, forced_error
from kvkeep.lab.selection import balance, candidates

SECONDS = 120.0  # the paper's limit for an instance
# The solver's own tolerance is 1e-6 of numbers near one; what it cannot tell apart counts as equal.
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Certificate:
    """What a solver has found out about the least error of a budget.

    Attributes:
        kept: `[s]` the best set found, ascending.
        error: its forced error, computed from the vectors.
        bound: no set of the pool has an error below this, up to the solver's tolerance.
        proven: whether the set is a best one, up to the solver's tolerance.
        programmes: that were solved.
        seconds: that it took.
    """

    kept: Indexes
    error: float
    bound: float
    proven: bool
    programmes: int
    seconds: float


def is_available() -> bool:
    """Whether the solver is installed."""
    return importlib.util.find_spec("pyscipopt") is not None


def certify(instance: Instance, entries: int, pool: Indexes | None = None, *, seconds: float = SECONDS) -> Certificate:
    """The set of least forced error among all subsets of a pool, and whether that is proven.

    Args:
        instance: the row.
        entries: s.
        pool: candidates, ascending; None: the paper's.
        seconds: at most so long; then the best set so far, and what is known of the least error.

    Raises:
        InstanceError: a budget that leaves nothing to choose, a pool smaller than it, or no solver.
    """
    check_budget(instance, entries)
    pool = candidates(instance, entries) if pool is None else np.asarray(pool, dtype=np.intp)
    if len(pool) < entries:
        raise InstanceError(
            expected=f"at least {entries} candidates", received=f"{len(pool)}", remedy="add keys, or keep fewer"
        )
    if not is_available():
        raise InstanceError(
            expected="the solver SCIP", received="no package pyscipopt", remedy='pip install "kvkeep[scip]"'
        )
    started = time.perf_counter()
    mass = instance.probabilities[pool]
    vectors = _fewer_coordinates(instance.weighted[pool])
    scale = float(np.linalg.norm(vectors, axis=1).max()) or 1.0
    unit = float(mass.max())
    best = _start(instance, entries, pool)
    error, bound, proven, programmes = forced_error(instance, best), 0.0, False, 0
    least_mass = float(np.sort(mass)[:entries].sum())
    while error > 0 and not proven and (left := seconds - (time.perf_counter() - started)) > 0:
        # In units of `scale` for vectors and `unit` for masses, so that the numbers are near one.
        factor = error * unit / scale
        chosen, least, optimal = _solve(vectors / scale, mass / unit, entries, factor, left)
        programmes += 1
        # ||g|| - t p >= least for every set, so that its error is at least t + least / p.
        bound = max(bound, error + min(least, 0.0) * scale / least_mass)
        found = error if chosen is None else forced_error(instance, pool[chosen])
        if chosen is not None and found < error:
            best, improved = np.sort(pool[chosen]), error - found
            error = found
            proven = optimal and improved <= TOLERANCE * found
        else:
            proven = optimal
            if not optimal:
                break
    if error == 0 or proven:
        bound, proven = error, True
    return Certificate(best, error, min(bound, error), proven, programmes, time.perf_counter() - started)


def _start(instance: Instance, entries: int, pool: Indexes) -> Indexes:
    """A set of the pool to begin with: the balanced one, if it lies in it, or the pool's largest masses."""
    balanced = balance(instance, entries, pool).kept
    if np.isin(balanced, pool).all():
        return balanced
    return np.sort(pool[np.argsort(-instance.probabilities[pool], kind="stable")[:entries]])


def _fewer_coordinates(vectors: Floats) -> Floats:
    """The same vectors in an orthonormal basis of what they span: lengths of sums stay, coordinates become fewer."""
    if vectors.shape[1] <= vectors.shape[0]:
        return vectors
    return np.linalg.qr(vectors.T).R.T


def _solve(
    vectors: Floats, mass: Floats, entries: int, factor: float, seconds: float
) -> tuple[Indexes | None, float, bool]:
    """Minimise `||sum of the chosen vectors|| - factor * mass of the chosen` over sets of `entries`.

    Returns:
        Places of the chosen, None where none was found; a lower bound of the least value; whether that is exact.
    """
    scip = importlib.import_module("pyscipopt")
    model: Any = scip.Model()
    model.hideOutput()
    model.setParam("limits/time", seconds)
    model.setParam("limits/gap", 0.0)
    taken = [model.addVar(vtype="B") for _ in range(len(vectors))]
    model.addCons(scip.quicksum(taken) == entries)
    sums = []
    for column in vectors.T:
        total = model.addVar(lb=None)
        model.addCons(total == scip.quicksum(float(x) * t for x, t in zip(column, taken, strict=True)))
        sums.append(total)
    length = model.addVar(lb=0.0)
    model.addCons(scip.quicksum(total * total for total in sums) <= length * length)
    model.setObjective(length - factor * scip.quicksum(float(p) * t for p, t in zip(mass, taken, strict=True)))
    model.optimize()
    exact = str(model.getStatus()) in ("optimal", "gaplimit")
    if not model.getNSols():
        return None, float(model.getDualbound()), exact
    solution = model.getBestSol()
    chosen = np.flatnonzero([model.getSolVal(solution, t) > 0.5 for t in taken])
    return chosen, float(model.getDualbound()), exact
