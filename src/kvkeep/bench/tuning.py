"""Which policy keeps least, and still says what the full cache would have said of one's own text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvkeep.errors import ResultsError
from kvkeep.results import FULL, Row

# Below this, an interval over texts says little; see `kvkeep.results.statistics.FEW`.
LEAST_TEXTS = 10
RATIOS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class Choice:
    """One policy at one budget.

    Attributes:
        policy: as on the command line.
        compression_ratio: fraction of entries that is removed.
        held_bytes: mean over the texts, measured.
        fraction: of the full cache.
        kl: mean divergence from the full cache, nats a token.
        low: end of its interval.
        high: the other end.
        texts: that it was measured on.
    """

    policy: str
    compression_ratio: float
    held_bytes: float
    fraction: float
    kl: float
    low: float
    high: float
    texts: int

    def to_dict(self) -> dict[str, Any]:
        """All of it, as it goes into results."""
        return asdict(self)


def choices(rows: Iterable[Row], *, level: float = 0.95) -> list[Choice]:
    """Mean divergence and bytes of each policy and ratio, by bytes.

    Args:
        rows: of the task `continuation`.
        level: of the intervals.
    """
    from kvkeep.results.statistics import Measurement, mean_interval

    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row.policy != FULL and row.fidelity.kl is not None:
            groups.setdefault((row.policy, float(row.budget["compression_ratio"])), []).append(row)
    found = []
    for (policy, ratio), group in groups.items():
        kl = [Measurement(row.length, row.cluster, (row.sample, row.turn), row.fidelity.kl or 0.0) for row in group]
        estimate = mean_interval(kl, level=level)
        found.append(
            Choice(
                policy=policy,
                compression_ratio=ratio,
                held_bytes=sum(row.memory.held_bytes for row in group) / len(group),
                fraction=sum(row.memory.fraction for row in group) / len(group),
                kl=estimate.mean,
                low=estimate.mean if estimate.low is None else estimate.low,
                high=estimate.mean if estimate.high is None else estimate.high,
                texts=estimate.clusters,
            )
        )
    return sorted(found, key=lambda choice: (choice.held_bytes, choice.kl))


def smallest(found: Sequence[Choice], max_kl: float) -> Choice | None:
    """The choice of fewest bytes whose whole interval stays below a bound; None if there is none.

    Raises:
        ResultsError: too few texts to tell.
    """
    texts = min((choice.texts for choice in found), default=0)
    if texts < LEAST_TEXTS:
        raise ResultsError(
            expected=f"at least {LEAST_TEXTS} texts to tell one policy from another",
            received=f"{texts}",
            remedy="give more text, or a shorter --length, which cuts it into more pieces",
        )
    return next((choice for choice in found if choice.high <= max_kl), None)
