"""Contexts on which a program gives itself away, and results that are too good to be true.

A program is to choose by what the features say. One that knows by heart where the needle of a benchmark lies, or how
long its prompts are, scores well without that. Two changes of a recorded context bring it to light:

    shuffled   what the features say is dealt out to other positions, and with it goes every correlation with what the
               model looked at. A program that chooses the same positions as before did not look
    jittered   another length, another budget, another layer. A program must neither crash nor break a rule there

And two comparisons with the full cache: what is cut cannot be known better than what is whole, beyond its noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvkeep.evolve.context import CHUNK_LENGTH, FEATURES, SCALARS, SINKS, WINDOW, PrefillContext
from kvkeep.evolve.guard import PolicyRefused
from kvkeep.evolve.program import Indices, Program
from kvkeep.evolve.sandbox import Outcome, Sandbox

# What of a context tells where a position lies, and nothing of what stands there.
POSITIONAL = ("position", "relative_position", "recency", "sink_mask", "recent_mask", "question_mask")

# Agreement beyond chance (0: as two random choices, 1: the same choice) from which on a choice counts as unchanged.
_SAME = 0.9

_FEW_CHUNKS = 4  # with fewer, too much stays where it was

_LAYERS = 64  # a program may see so many layers elsewhere


@dataclass(frozen=True)
class Canaries:
    """Recorded contexts and their changed twins.

    Attributes:
        recorded: as they are.
        shuffled: the same, in the same order, with content dealt out anew.
        jittered: the same, in the same order, of another length, budget and layer.
    """

    recorded: tuple[PrefillContext, ...]
    shuffled: tuple[PrefillContext, ...]
    jittered: tuple[PrefillContext, ...]

    @classmethod
    def of(cls, contexts: Iterable[PrefillContext], seed: int = 0) -> Canaries:
        """Canaries of recorded contexts.

        Args:
            contexts: a few of them suffice.
            seed: the same one gives the same canaries.
        """
        recorded = tuple(contexts)
        random = np.random.default_rng(seed)
        return cls(
            recorded,
            tuple(shuffled(context, random) for context in recorded),
            tuple(jittered(context, random) for context in recorded),
        )

    @property
    def contexts(self) -> list[PrefillContext]:
        """All of them, in the order that `judge` expects selections in."""
        return [*self.recorded, *self.shuffled, *self.jittered]

    def judge(self, selections: Sequence[Indices]) -> PolicyRefused | None:
        """Whether a program that answered for all contexts by the rules chose by position alone.

        Args:
            selections: what it kept of each of `contexts`.
        """
        count = len(self.recorded)
        return flag_position_keyed(self.recorded, self.shuffled, selections[:count], selections[count : 2 * count])

    def run(self, sandbox: Sandbox, programs: Sequence[Program]) -> list[Outcome]:
        """Run programs on all of it.

        Returns:
            For each program an outcome with the selections of the recorded contexts, or with a refusal: of the sandbox
            or an invariant, if it crashes or breaks a rule on any context; else of the canaries.
        """
        count, judged = len(self.recorded), []
        for outcome in sandbox.run(programs, self.contexts):
            refusal, kept = outcome.refusal, outcome.selections
            if kept is not None:
                refusal, kept = self.judge(kept), kept[:count]
            judged.append(
                Outcome(
                    outcome.name,
                    None if refusal else kept,
                    refusal,
                    outcome.seconds,
                    outcome.printed,
                    outcome.isolation,
                )
            )
        return judged


def shuffled(context: PrefillContext, random: np.random.Generator) -> PrefillContext:
    """The context with its content at other positions: features that tell of what stands there move together.

    Chunks change places, whole: what the features of a position say still agrees with each other and with the chunk,
    so that a program cannot tell by a contradiction that it is being tried; only where it lies is not where the model
    looked. A text of a few chunks is dealt out position by position.

    Args:
        context: a recorded one.
        random: draws the order.
    """
    chunks = context.L // CHUNK_LENGTH
    order = np.arange(context.L)
    if chunks < _FEW_CHUNKS:
        random.shuffle(order)
    else:
        whole = order[: chunks * CHUNK_LENGTH].reshape(chunks, CHUNK_LENGTH)
        order[: whole.size] = whole[random.permutation(chunks)].ravel()
    arrays = context.to_arrays()
    moved = {name: arrays[name][order] for name in FEATURES if name not in POSITIONAL}
    return PrefillContext.from_arrays(arrays | moved)


def jittered(context: PrefillContext, random: np.random.Generator) -> PrefillContext:
    """A piece of the context, at least half of it, as if it were a whole text; with another budget and layer.

    Args:
        context: a recorded one.
        random: draws piece, budget and layer.
    """
    length = int(random.integers((context.L + 1) // 2, context.L + 1))
    start = int(random.integers(0, context.L - length + 1))
    kept = int(random.integers(max(1, length // 20), length + 1))
    arrays = context.to_arrays()
    piece: dict[str, NDArray[Any]] = {name: arrays[name][start : start + length] for name in FEATURES}
    position = piece["position"] - piece["position"][0]
    end = position[-1] + 1
    piece |= {
        "position": position,
        "relative_position": position / max(end - 1, 1),
        "recency": (end - 1 - position) / end,
        "sink_mask": position < SINKS,
        "recent_mask": position >= end - WINDOW,
    }
    scalars = {name: arrays[name] for name in SCALARS}
    scalars |= {"L": np.array(length), "K": np.array(kept), "layer": np.array(random.integers(0, _LAYERS))}
    return PrefillContext.from_arrays(piece | scalars)


def flag_position_keyed(
    recorded: Sequence[PrefillContext],
    moved: Sequence[PrefillContext],
    before: Sequence[Indices],
    after: Sequence[Indices],
) -> PolicyRefused | None:
    """Refuse a program that keeps the same positions wherever the content is.

    Sinks and a window of last positions are no offence: what counts is whether anything else changes. Contexts that
    keep everything, or whose content is the same everywhere, say nothing.

    Args:
        recorded: contexts as they are.
        moved: the same, shuffled.
        before: what the program kept of the recorded ones.
        after: what it kept of the shuffled ones.

    Returns:
        None where there is nothing to refuse.
    """
    common = by_chance = total = 0.0
    for here, there, kept, kept_there in zip(recorded, moved, before, after, strict=True):
        same = all(np.array_equal(getattr(here, n), getattr(there, n)) for n in FEATURES if n not in POSITIONAL)
        if not same and len(kept) < here.L:
            common += len(np.intersect1d(kept, kept_there))
            by_chance += len(kept) * len(kept_there) / here.L
            total += max(len(kept), len(kept_there))
    agreement = (common - by_chance) / (total - by_chance) if total > by_chance else 0.0
    if agreement < _SAME:
        return None
    return PolicyRefused(
        "position-keyed",
        "canary",
        expected="other positions where other positions hold the content",
        received=f"the same ones (agreement beyond chance {agreement:.2f})",
        remedy="choose by what the features of content say; positions alone may only protect the start and the end",
    )


def flag_ceiling(score: float, full_low: float, full_high: float) -> PolicyRefused | None:
    """Refuse a result above what the full cache's interval allows: the measurement is broken, not the cache better.

    Args:
        score: of the program, higher is better.
        full_low: lower end of the full cache's interval, in the same unit.
        full_high: its upper end.

    Returns:
        None where there is nothing to refuse.
    """
    if score <= full_high:
        return None
    return PolicyRefused(
        "above-full",
        "ceiling",
        expected=f"at most what the full cache reaches, {full_low:.4g} to {full_high:.4g}",
        received=f"{score:.4g}",
        remedy="look at what it kept: less of a cache does not know more",
    )


def flag_identical(outputs: Sequence[ArrayLike], full_outputs: Sequence[ArrayLike]) -> PolicyRefused | None:
    """Refuse results that all equal the full cache's: then nothing was evicted.

    Args:
        outputs: numbers that the model computed with the program's cache, such as log-probabilities, one array for
            each sample; compared to the last bit, so round them to what is reproduced. Not generated tokens: a good
            cache may well give the same answers.
        full_outputs: the same with the full cache.

    Returns:
        None where there is nothing to refuse.
    """
    pairs = list(zip(outputs, full_outputs, strict=True))
    if not pairs or not all(np.array_equal(np.asarray(ours), np.asarray(full)) for ours, full in pairs):
        return None
    return PolicyRefused(
        "identical-to-full",
        "ceiling",
        expected="numbers that differ from the full cache's",
        received=f"the same ones in all of {len(pairs)} samples",
        remedy="look at what was evicted: a cut cache computes other sums",
    )
