"""One row of attention as a problem of choice: which keys to keep so that the output changes least.

Source: ContourKV (arXiv 2608.25230), its section on instances. A row attends to N keys with probabilities `p` and reads
their values `v`; its dense output is `mu = sum_j p_j v_j`. A kept set A gives the mean of its values under p, weighted
anew; the distance to mu is the *forced error* `e_s(A)`. With free weights it is the distance of mu to the convex hull.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvkeep.errors import KvkeepError

Floats: TypeAlias = npt.NDArray[np.float64]
Indexes: TypeAlias = npt.NDArray[np.intp]
Kept: TypeAlias = Indexes | Sequence[int]

SUM_TOLERANCE = 1e-6  # a softmax in float32 misses 1 by less; what is within is normalised in float64


class InstanceError(KvkeepError):
    """Probabilities and values that are no row of attention, or a set that cannot be chosen from one."""


@dataclass(frozen=True, eq=False)
class Instance:
    """Probabilities and values of one row, in float64.

    Args:
        probabilities: `[N]`, positive, summing to 1 within 1e-6; normalised to 1.
        values: `[N, d]`.

    Raises:
        InstanceError: other shapes, fewer than two keys, numbers that are not finite, probabilities that are not
            positive or do not sum to 1.
    """

    probabilities: Floats
    values: Floats

    def __post_init__(self) -> None:
        p = np.asarray(self.probabilities, dtype=np.float64)
        v = np.asarray(self.values, dtype=np.float64)
        if p.ndim != 1 or v.ndim != 2 or len(p) != len(v) or len(p) < 2:
            raise InstanceError(
                expected="probabilities [N] and values [N, d] of at least two keys",
                received=f"shapes {p.shape} and {v.shape}",
                remedy="pass one row of attention at a time",
            )
        if not (np.isfinite(p).all() and np.isfinite(v).all()):
            raise InstanceError(
                expected="finite numbers",
                received="NaN or infinity in the probabilities or the values",
                remedy="find out where they come from; no set can be judged by them",
            )
        if (least := float(p.min())) <= 0:
            raise InstanceError(
                expected="probabilities above 0",
                received=f"{least:g} at key {int(p.argmin())}",
                remedy="leave out keys that the row does not attend to",
            )
        total = float(p.sum())
        if abs(total - 1) > SUM_TOLERANCE:
            raise InstanceError(
                expected="probabilities that sum to 1", received=f"a sum of {total:.9g}", remedy="pass a whole row"
            )
        object.__setattr__(self, "probabilities", p / total)
        object.__setattr__(self, "values", v)

    @property
    def size(self) -> int:
        """N, the number of keys."""
        return len(self.probabilities)

    @cached_property
    def mean(self) -> Floats:
        """`mu [d]`, the row's dense output."""
        return self.probabilities @ self.values

    @cached_property
    def centred(self) -> Floats:
        """`v - mu`, `[N, d]`."""
        return self.values - self.mean

    @cached_property
    def weighted(self) -> Floats:
        """`w = p (v - mu)`, `[N, d]`; all of them sum to zero, up to rounding."""
        return self.probabilities[:, None] * self.centred

    @cached_property
    def single_errors(self) -> Floats:
        """`p_j ||v_j - mu||`, `[N]`: what the key alone moves."""
        norms: Floats = np.linalg.norm(self.weighted, axis=1)
        return norms

    @cached_property
    def order(self) -> Indexes:
        """Keys by probability, the largest first; of equal ones the lower index first."""
        return np.argsort(-self.probabilities, kind="stable")

    @cached_property
    def radius(self) -> float:
        """`D = max_j ||v_j - mu||`."""
        return float(np.linalg.norm(self.centred, axis=1).max())

    @cached_property
    def spread(self) -> float:
        """`sigma`, where `sigma^2 = sum_j p_j ||v_j - mu||^2`."""
        return float(np.sqrt(self.probabilities @ (self.centred**2).sum(axis=1)))


def check_budget(instance: Instance, entries: int) -> None:
    """Refuse a number of keys that leaves nothing to choose.

    Raises:
        InstanceError: less than one, or not less than N.
    """
    if not 1 <= entries < instance.size:
        raise InstanceError(
            expected=f"a budget from 1 to {instance.size - 1} keys, fewer than the row has",
            received=f"{entries}",
            remedy="choose a smaller budget, or a later row",
        )


def kept_indexes(instance: Instance, kept: Kept) -> Indexes:
    """A set in ascending order.

    Raises:
        InstanceError: no key, a key that comes twice, or one that is not there.
    """
    given = np.asarray(kept)
    indexes = np.sort(given.astype(np.intp)) if given.ndim == 1 and np.issubdtype(given.dtype, np.integer) else None
    if (
        indexes is None
        or not len(indexes)
        or indexes[0] < 0
        or indexes[-1] >= instance.size
        or (np.diff(indexes) == 0).any()
    ):
        raise InstanceError(
            expected=f"different keys from 0 to {instance.size - 1}, at least one",
            received=f"{given.tolist()}",
            remedy="name the keys that stay",
        )
    return indexes


def dropped_mass(instance: Instance, kept: Kept) -> float:
    """`1 - p(A)`, summed over what is dropped, so that it is exact where it is small."""
    dropped = np.ones(instance.size, dtype=bool)
    dropped[kept_indexes(instance, kept)] = False
    return float(instance.probabilities[dropped].sum())


def forced_error(instance: Instance, kept: Kept) -> float:
    """`e_s(A) = ||g_A|| / p(A)` with `g_A = sum_A p_j (v_j - mu)`.

    The same as `||mu - m_A||` and as `(1 - p(A)) ||m_rest - m_A||`, where `m` is the mean of a set's values under p.

    Raises:
        InstanceError: a set that is none.
    """
    indexes = kept_indexes(instance, kept)
    return float(np.linalg.norm(instance.weighted[indexes].sum(axis=0)) / instance.probabilities[indexes].sum())
