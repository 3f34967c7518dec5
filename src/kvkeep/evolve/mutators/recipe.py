"""A recipe: what the grammar can say about a program, as data. Terms, how they are joined, what is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvkeep.evolve.context import FEATURES
from kvkeep.evolve.mutators.protocol import MutatorError

# How a feature is scaled, so that weights of different features can be compared.
NORMALISATIONS = ("none", "max_abs", "max_abs_without_sinks", "min_max", "mean", "rank", "z_score")
# What is done to a feature before it is smoothed and scaled.
CURVES = ("none", "root", "logarithm", "square")
# How terms become one score.
COMBINATIONS = ("sum", "largest", "product")
# What a cut keeps: the best tokens, the best chunks, or the best chunks and then the best tokens, K in all.
KINDS = ("top_k", "chunks", "chunks_filled")

# Features from 0 to 1, of which the rest to 1 says something too; a factor may be `1 - feature` of these.
SHARES = (
    *("head_concentration", "chunk_rank", "relative_position", "recency"),
    *("sink_mask", "recent_mask", "question_mask"),
)
COMPLEMENT = "1 - "
FACTORS = (*FEATURES, *(COMPLEMENT + name for name in SHARES))

MAX_TERMS = 6
MAX_WEIGHT = 2.0
MAX_SMOOTHING = 65
MAX_CHUNK = 64
MAX_SINKS = 16
MAX_RECENT = 128


@dataclass(frozen=True)
class Term:
    """One summand of the score: `weight * gate * normalise(smooth(curve(feature * times)))`.

    Attributes:
        feature: one of `FEATURES`.
        weight: from -2 to 2.
        normalisation: one of `NORMALISATIONS`.
        smoothing: width of the centred mean over neighbours, odd, edges padded with zeros; 1 for none.
        curve: one of `CURVES`.
        times: what the feature is multiplied by, one of `FACTORS`; empty for nothing.
        gate: what the scaled feature is multiplied by, one of `FACTORS`; empty for nothing.

    Raises:
        MutatorError: a value that is not one of these.
    """

    feature: str
    weight: float
    normalisation: str = "max_abs"
    smoothing: int = 1
    curve: str = "none"
    times: str = ""
    gate: str = ""

    def __post_init__(self) -> None:
        _one_of(self.feature, FEATURES, "feature")
        _one_of(self.times, ("", *FACTORS), "factor")
        _one_of(self.gate, ("", *FACTORS), "factor")
        _one_of(self.normalisation, NORMALISATIONS, "normalisation")
        _one_of(self.curve, CURVES, "curve")
        _within(self.weight, -MAX_WEIGHT, MAX_WEIGHT, "weight")
        _within(self.smoothing, 1, MAX_SMOOTHING, "smoothing")
        if self.smoothing % 2 == 0:
            raise _wrong("an odd smoothing, which has a centre", str(self.smoothing))


@dataclass(frozen=True)
class Selection:
    """What is kept, given the scores.

    Attributes:
        kind: one of `KINDS`; `chunks` keeps at most K tokens and more than K - chunk, the others exactly K.
        chunk: positions per chunk, where there are chunks.
        sinks: first positions that stay whatever their score, within half of K.
        recent: last positions that stay whatever their score, within what the sinks leave of half of K. Where `chunks`
            are kept, these are the chunks that hold such positions.

    Raises:
        MutatorError: a value that is not one of these.
    """

    kind: str = "top_k"
    chunk: int = 20
    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        _one_of(self.kind, KINDS, "kind of selection")
        _within(self.chunk, 2, MAX_CHUNK, "chunk")
        _within(self.sinks, 0, MAX_SINKS, "number of sinks")
        _within(self.recent, 0, MAX_RECENT, "number of recent positions")


@dataclass(frozen=True)
class Recipe:
    """A whole program.

    Attributes:
        terms: one to six.
        selection: what is kept.
        combination: one of `COMBINATIONS`: the weighted sum, the largest weighted term, or the weighted product
            (as a sum of logarithms, in which zero and less count as nearly zero).

    Raises:
        MutatorError: no term, too many, or an unknown combination.
    """

    terms: tuple[Term, ...]
    selection: Selection = field(default_factory=Selection)
    combination: str = "sum"

    def __post_init__(self) -> None:
        _within(len(self.terms), 1, MAX_TERMS, "number of terms")
        _one_of(self.combination, COMBINATIONS, "combination")


def _one_of(value: str, known: Sequence[str], what: str) -> None:
    if value not in known:
        raise _wrong(f"a {what} out of {', '.join(repr(name) for name in known)}", repr(value))


def _within(value: float, lowest: float, highest: float, what: str) -> None:
    if not (math.isfinite(value) and lowest <= value <= highest):
        raise _wrong(f"a {what} from {lowest:g} to {highest:g}", f"{value}")


def _wrong(expected: str, received: str) -> MutatorError:
    return MutatorError(expected=expected, received=received, remedy="change the recipe")
