"""Which s keys of a row to keep: by mass, by exhaustive search over candidates, by swaps; and what is lost.

Source: ContourKV (arXiv 2608.25230), sections on the candidate set, the balancing selector, the closable share and
shared sets. Finding the best set is NP-hard (even whether its error is zero, for d = 1 and equal masses), so the best
set *of the candidates* is an upper bound on the best error, and the closable share a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.lab.enumeration import least_error
from kvkeep.lab.instance import Floats, Indexes, Instance, InstanceError, check_budget, dropped_mass, forced_error

BUDGETS = (4, 8, 16, 32)  # the paper's
MOST_SUBSETS = 200_000  # the paper's cap on an enumeration
MOST_EXTRA = 24
BEYOND = 1.11  # kappa above it: the best error is at most 0.9 of top-mass's
FLAT_BUDGET = 8
FLAT_MASS = 0.25  # a cell whose rows drop more than this at FLAT_BUDGET, in the median, is flat


@dataclass(frozen=True, eq=False)
class Chosen:
    """A set and what it loses.

    Attributes:
        kept: `[s]`, ascending.
        error: forced error.
        steps: subsets looked at, or swaps made.
    """

    kept: Indexes
    error: float
    steps: int = 0


def top_mass(instance: Instance, entries: int) -> Indexes:
    """The `entries` keys of largest probability, ascending; of equal ones those of lower index.

    Raises:
        InstanceError: a budget that leaves nothing to choose.
    """
    check_budget(instance, entries)
    return np.sort(instance.order[:entries])


def extra_keys(entries: int) -> int:
    """How many candidates the paper adds to the top-mass set: 24, 12, 6, 4 for 4, 8, 16, 32.

    These are the largest numbers up to 24 for which no more than 200,000 subsets result, which serves other budgets.
    """
    return max(n for n in range(MOST_EXTRA + 1) if math.comb(entries + n, entries) <= MOST_SUBSETS)


def candidates(instance: Instance, entries: int, extra: int | None = None) -> Indexes:
    """The keys that a search looks at, ascending.

    Args:
        instance: the row.
        entries: s.
        extra: keys outside the top-mass set, those of largest `p_j ||v_j - mu||`; None: the paper's number.

    Returns:
        `[s + extra]`, or all keys where there are fewer.

    Raises:
        InstanceError: a budget that leaves nothing to choose, or no extra key.
    """
    kept = top_mass(instance, entries)
    count = max(1, extra_keys(entries)) if extra is None else extra
    if count < 1:
        raise InstanceError(
            expected="at least one key beside the top-mass set", received=f"{count}", remedy="pass extra=None"
        )
    outside = np.delete(np.arange(instance.size), kept)
    by_error = outside[np.argsort(-instance.single_errors[outside], kind="stable")]
    return np.sort(np.concatenate([kept, by_error[:count]]))


def best_set(instance: Instance, entries: int, pool: Indexes | None = None) -> Chosen:
    """The set of least forced error among all subsets of the candidates: `E_S^pool`.

    Args:
        instance: the row.
        entries: s.
        pool: candidates, ascending; None: the paper's.

    Raises:
        InstanceError: a budget that leaves nothing to choose, or a pool smaller than it.
    """
    check_budget(instance, entries)
    if pool is None:
        pool = candidates(instance, entries)
    kept, looked_at = least_error(instance, entries, pool)
    return Chosen(kept, forced_error(instance, kept), looked_at)


def balance(instance: Instance, entries: int, pool: Indexes | None = None) -> Chosen:
    """The paper's balancing selector: from the top-mass set, the swap that lowers the error most, until none does.

    Each swap costs O(s n_x) with the Gram matrix of the candidates. It is never worse than the top-mass set.

    Args:
        instance: the row.
        entries: s.
        pool: candidates; None: the paper's. The paper names 192 pairs a round, which would be 24 keys outside the set
            at s = 8, and says elsewhere that these come from the same candidates, which are 12: we take the latter.

    Raises:
        InstanceError: a budget that leaves nothing to choose.
    """
    kept = top_mass(instance, entries)
    pool = np.union1d(kept, candidates(instance, entries) if pool is None else pool).astype(np.intp)
    vectors, mass = instance.weighted[pool], instance.probabilities[pool]
    gram = vectors @ vectors.T
    inside = np.isin(pool, kept)
    error, swaps = forced_error(instance, kept), 0
    while True:
        ins, outs = np.flatnonzero(inside), np.flatnonzero(~inside)
        if not len(outs):
            break
        along = gram[:, ins].sum(axis=1)  # <w_j, G>
        # ||G - w_a + w_b||^2, opened up; rows are a, columns are b.
        squares = (
            along[ins].sum()
            + (gram[ins, ins] - 2 * along[ins])[:, None]
            + (gram[outs, outs] + 2 * along[outs])[None]
            - 2 * gram[np.ix_(ins, outs)]
        )
        masses = mass[ins].sum() - mass[ins][:, None] + mass[outs][None]
        a, b = np.divmod(int(np.argmin(squares / masses**2)), len(outs))
        trial = inside.copy()
        trial[ins[a]], trial[outs[b]] = False, True
        after = forced_error(instance, pool[trial])
        if not after < error:
            break
        inside, error, swaps = trial, after, swaps + 1
    return Chosen(pool[inside], error, swaps)


def imbalance(instance: Instance, entries: int) -> float:
    """`Phi = ||g||` of the top-mass set: one pass over the row, and close to the best error in rank.

    Raises:
        InstanceError: a budget that leaves nothing to choose.
    """
    return float(np.linalg.norm(instance.weighted[top_mass(instance, entries)].sum(axis=0)))


def least_dropped_mass(instance: Instance, entries: int) -> float:
    """What the top-mass set drops: no set of this size drops less.

    Raises:
        InstanceError: a budget that leaves nothing to choose.
    """
    return dropped_mass(instance, top_mass(instance, entries))


def kappa(top_error: float, best_error: float) -> float:
    """Top-mass's error over the best one, at least 1; infinite where only the best one is 0, and 1 where both are."""
    if best_error == 0:
        return 1.0 if top_error == 0 else math.inf
    return top_error / best_error


def closable_share(top_error: float, best_error: float) -> float:
    """`c = 1 - E_S / e_s(top-mass)`: the share of top-mass's error that another set would save; 0 to 1."""
    return 0.0 if top_error == 0 else 1 - best_error / top_error


def is_flat(dropped: Sequence[float]) -> bool:
    """Whether a cell (layer and head) is flat: the median of its rows' dropped mass at s = 8 is above 0.25.

    Raises:
        InstanceError: no rows.
    """
    if not len(dropped):
        raise InstanceError(expected="rows of a cell", received="none", remedy="sample more rows")
    return float(np.median(dropped)) > FLAT_MASS


def auc(scores: Sequence[float] | Floats, labels: Sequence[bool] | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    """The chance that a score with a true label is above one with a false label, ties counted half.

    Returns:
        0 to 1; NaN where all labels are the same.
    """
    from scipy.stats import rankdata

    truth = np.asarray(labels, dtype=bool)
    positive, negative = int(truth.sum()), int((~truth).sum())
    if not positive or not negative:
        return math.nan
    ranks = rankdata(np.asarray(scores, dtype=np.float64))
    return float((ranks[truth].sum() - positive * (positive + 1) / 2) / (positive * negative))


def rank_correlation(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> float:
    """Spearman's correlation of two rankings, ties sharing their mean rank.

    Returns:
        -1 to 1; NaN where one side has only one value.
    """
    from scipy.stats import rankdata

    ranks = [rankdata(np.asarray(side, dtype=np.float64)) for side in (first, second)]
    if any(np.ptp(side) == 0 for side in ranks):
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])


def group_vote(masses: Floats, entries: int) -> Indexes:
    """The one set that query heads sharing a KV head keep: the top `entries` of their summed masses, ascending.

    Args:
        masses: `[G, N]`, rows of the heads of a group at one position.
        entries: s.

    Raises:
        InstanceError: another shape, or a budget that leaves nothing to choose.
    """
    rows = np.asarray(masses, dtype=np.float64)
    if rows.ndim != 2 or not 1 <= entries < rows.shape[1]:
        raise InstanceError(
            expected="masses [G, N] and a budget from 1 to N - 1",
            received=f"shape {rows.shape} and {entries}",
            remedy="stack the rows of the heads that share a KV head",
        )
    return np.sort(np.argsort(-rows.sum(axis=0), kind="stable")[:entries])
