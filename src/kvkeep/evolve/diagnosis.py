"""What is to be known of a search beside its best: have scores stayed comparable, why does it not get better?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvkeep.evolve.archive import Archive
from kvkeep.evolve.history import History

DRIFT = 0.5  # points by which the seed's fitness may differ when it is judged again: sums are rounded otherwise


def diagnosis_of(history: History, archive: Archive) -> list[str]:
    """Why scores may not be comparable, and why a search may have stopped to get better; see `plateau`."""
    ascent = [
        (c.order, c.evaluation.fitness)
        for c in history.ascent()
        if c.evaluation is not None and c.evaluation.fitness is not None
    ]
    best = history.best
    score = None if best is None or best.evaluation is None else best.evaluation.stage2
    width = None if score is None or score.low is None or score.high is None else (score.high - score.low) / 2
    return [*drift_of(history), *plateau(ascent, history.counts(), width, archive.filled())]


def drift_of(history: History) -> list[str]:
    """That the seed has another score than at first, in words; nothing where it has the same."""
    moved = [(number, points) for number, points in history.drift() if points is None or abs(points) > DRIFT]
    if not moved:
        return []
    number, points = moved[0]
    what = "and not evaluated to the end any more" if points is None else f"{points:+.1f} points"
    return [
        f"The seed was judged again after generation {number}: {what}. The measurement has changed, and what was "
        "judged before cannot be compared with what came later: see whether model, samples or machine are the same."
    ]


def plateau(
    best: Sequence[tuple[int, float]], counts: Mapping[str, int], half_width: float | None, filled: int
) -> list[str]:
    """Why a search may have stopped to get better, in words; nothing where it has not.

    Args:
        best: number of the candidate and its fitness, each time a better one came, the seed first.
        counts: candidates by status: evaluated, duplicate, refused, gated, flagged, rejected.
        half_width: half of the width of the best one's interval; None where there is none.
        filled: cells of the archive.
    """
    total = sum(counts.values())
    if not best or total < 10:
        return []
    last = best[-1][0]
    since = total - 1 - last
    if since < max(10, total // 3):
        return []
    said = [f"No better program came in the last {since} of {total} candidates; the best is number {last}."]
    shares = {name: count / total for name, count in counts.items()}
    if shares.get("duplicate", 0) > 0.3:
        said.append(
            f"{shares['duplicate']:.0%} of the candidates keep the very entries of an earlier one: the mutator has "
            "run out of programs that differ, or its changes are too small to matter. Try another mutator or seed."
        )
    if shares.get("gated", 0) > 0.5:
        said.append(
            f"{shares['gated']:.0%} fall at the first stage: changes are too large, or the gate is too high for "
            "this budget."
        )
    if shares.get("refused", 0) + shares.get("rejected", 0) > 0.3:
        share = shares.get("refused", 0) + shares.get("rejected", 0)
        said.append(f"{share:.0%} are refused or no program at all: see the table of reasons.")
    gain = best[-1][1] - best[0][1]
    if half_width is not None and gain < half_width:
        said.append(
            f"The best is {gain:.2f} points above the seed, less than the {half_width:.2f} by which its own score is "
            "unsure: more samples in stage2 would tell differences that these cannot."
        )
    if filled <= 3:
        said.append(
            f"Only {filled} cells of the archive are filled: all programs do much the same. Begin from several seeds."
        )
    if len(said) == 1:
        said.append("Candidates differ and are evaluated; this family of programs may have no better member here.")
    return said
