"""The laboratory's exhaustive search: one row at s = 8, and thousands of rows, against judging subsets one by one.

Rows are made, not captured: 4,096 keys with a softmax of normal scores and values of size 64. The time of a search
hangs on the number of candidates alone, plus one pass over the row.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

# Before numpy is imported: a claim about one core is measured on one.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy as np  # noqa: E402
from harness import Claim, alternate, arguments, median, report, require_parity, show  # noqa: E402

from kvkeep.lab.instance import Instance  # noqa: E402
from kvkeep.lab.selection import best_set, candidates  # noqa: E402

KEYS, SIZE = 4096, 64
SUBSETS_BY_HAND = 4_000  # the slow side judges so many, and its time is scaled up


def instance(seed: int) -> Instance:
    generator = np.random.default_rng(seed)
    scores = 2.5 * generator.normal(size=KEYS)
    p = np.exp(scores - scores.max())
    return Instance(p / p.sum(), generator.normal(size=(KEYS, SIZE)))


def one_by_one(row: Instance, pool: np.ndarray, most: int | None) -> float:
    """The least error over the first subsets of the pool, each from its vectors."""
    w, p = row.weighted[pool], row.probabilities[pool]
    subsets = itertools.islice(itertools.combinations(range(len(pool)), 8), most)
    return min(float(np.linalg.norm(w[list(kept)].sum(axis=0)) / p[list(kept)].sum()) for kept in subsets)


def search(seed: int) -> float:
    """Both budgets of one row, as the ceiling does it, from probabilities and values."""
    row = instance(seed)
    return best_set(row, 4).error + best_set(row, 8).error


def main() -> None:
    claim = Claim.read("lab_enumeration")
    options = arguments(claim, argparse.ArgumentParser(description=claim.cell), quick_runs=7)
    rows = [instance(seed) for seed in range(8)]
    pools = [candidates(row, 8) for row in rows]
    small = pools[0][:12]
    require_parity(
        "least error over 495 subsets", abs(best_set(rows[0], 8, small).error - one_by_one(rows[0], small, None)), 1e-12
    )
    # A fresh row each time, so that what an instance remembers is paid for as well.
    turn = itertools.count()

    def ours() -> object:
        fresh = Instance(rows[next(turn) % len(rows)].probabilities, rows[0].values)
        return best_set(fresh, 8)

    taken = alternate(
        {
            "kvkeep, 125970 subsets": ours,
            "one by one, 4000 subsets": lambda: one_by_one(rows[0], pools[0], SUBSETS_BY_HAND),
        },
        options.runs,
    )
    show("a row at s = 8", taken)
    milliseconds = median(taken["kvkeep, 125970 subsets"])
    by_hand = median(taken["one by one, 4000 subsets"]) * 125_970 / SUBSETS_BY_HAND
    count = 300 if options.quick else 3000
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(search, range(4)))  # processes that have begun
        started = time.perf_counter()
        errors = list(pool.map(search, range(count), chunksize=10))
        seconds = (time.perf_counter() - started) * 3000 / count
    if not all(error > 0 for error in errors):
        raise SystemExit("a search found no set; nothing is reported")
    print(f"\n{count} rows at s = 4 and 8 on two cores: {seconds:.1f} s for 3,000")
    report(
        claim,
        {
            "ms a row, s = 8, one core": milliseconds,
            "s for 3000 rows, s = 4 and 8, two cores": seconds,
            "one by one": by_hand / milliseconds,
        },
    )


if __name__ == "__main__":
    main()
