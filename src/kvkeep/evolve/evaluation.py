"""What becomes of a candidate, and what its points mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvkeep.budget import Budget
from kvkeep.errors import ResultsError
from kvkeep.evolve.traits import Traits

Status = Literal["evaluated", "duplicate", "refused", "gated", "flagged"]
Measure = Literal["logprob", "task"]

GATE = 0.5


@dataclass(frozen=True)
class Score:
    """What a candidate reached in a stage, in points: 100 is the full cache, 0 is knowing nothing.

    Attributes:
        mean: over tasks, of means over samples.
        low: end of its interval; None where there is none.
        high: the other end.
        n: samples.
        note: why there is no interval, or what to mind about it.
        values: of each sample, in the order of the stage's samples.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    note: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """What became of a candidate.

    Attributes:
        digest: of the program.
        status: evaluated to the end; a duplicate of what another keeps; refused by a guard; below the gate; or flagged
            as too good to be true, for a person to look at.
        stage: the last stage that it came to.
        reason: why it did not go on, a short word; empty if it did.
        detail: the same in words.
        behaviour: hash of what it keeps on the probe; empty if it never ran to the end there.
        traits: what it does there.
        twin: digest of the earlier program that keeps the same entries.
        reconstruction: error of the optional stage.
        stage1: score of that stage.
        stage2: score of that stage.
        fitness: `0.25 S1 + 0.75 S2`; None unless it was evaluated to the end.
        guard_seconds: spent in the sandbox for it, its share of what its batch took.
        model_seconds: spent on caches and forwards for it, likewise.
    """

    digest: str
    status: Status
    stage: str
    reason: str = ""
    detail: str = ""
    behaviour: str = ""
    traits: Traits | None = None
    twin: str = ""
    reconstruction: float | None = None
    stage1: Score | None = None
    stage2: Score | None = None
    fitness: float | None = None
    guard_seconds: float = 0.0
    model_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Evaluation:
        """What `to_dict` gave, read back from JSON."""
        values = dict(record)
        if values.get("traits") is not None:
            values["traits"] = Traits(**values["traits"])
        for name in ("stage1", "stage2"):
            if values.get(name) is not None:
                values[name] = Score(**values[name] | {"values": tuple(values[name]["values"])})
        return cls(**values)


@dataclass(frozen=True)
class CascadeSettings:
    """How candidates are judged.

    Attributes:
        budget: a ratio or entries.
        measure: what a score is made of: the log-probability of the reference answer, or the task's score of a
            generated one.
        gate: stage 1 asks for this share of the full cache's score, or of the seed's where that has less.
        reconstruction: whether the optional stage is there; it refuses what rebuilds attention worse than entries that
            are drawn at random.
    """

    budget: Budget
    measure: Measure = "logprob"
    gate: float = GATE
    reconstruction: bool = False

    def __post_init__(self) -> None:
        if self.budget.bytes is not None or not 0 <= self.gate < 1:
            raise ResultsError(
                expected="a budget as a ratio or in entries, and a gate with 0 <= gate < 1",
                received=f"{self.budget}, gate {self.gate}",
                remedy="for example Budget(compression_ratio=0.83) and gate 0.5",
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {"budget": self.budget.describe()}


@dataclass(frozen=True)
class Yardstick:
    """What 0 and 100 points are, measured on the samples of both stages before any candidate.

    Attributes:
        zero: mean of entries drawn at random, two draws a sample; 0 for task scores.
        hundred: mean of the full cache; 1 for task scores.
        full: the full cache's score in points, with its interval, by stage.
        gate: points that stage 1 asks for.
    """

    zero: float
    hundred: float
    full: Mapping[str, Score]
    gate: float

    def points(self, value: float) -> float:
        """A log-probability or a task score in points."""
        return 100 * (value - self.zero) / (self.hundred - self.zero)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Yardstick:
        """What `to_dict` gave, read back from JSON."""
        full = {stage: Score(**score | {"values": tuple(score["values"])}) for stage, score in record["full"].items()}
        return cls(record["zero"], record["hundred"], full, record["gate"])
