"""The log of a search: one line a generation, so that a killed search goes on from the last whole one.

The first record is the yardstick, `generation/0` holds the seeds, and controls and promotion add records of their own.
Candidates that were judged together stand in one record: they are judged together again, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvkeep.evolve.evaluation import Evaluation, Yardstick
from kvkeep.results.appending import ROWS, AppendLog, damaged, read_run, whole_lines


@dataclass(frozen=True)
class Candidate:
    """A program that was proposed, and what became of it.

    Attributes:
        order: from 0 over the whole search, seeds first.
        generation: 0 for seeds.
        island: that it belongs to.
        source: of the program; empty if there was none.
        name: of the program.
        digest: of the program; empty if there was none.
        mutator: that proposed it; `seed` for seeds.
        parents: digests.
        note: what was changed, or why there is no program.
        tokens: that the proposal cost.
        rejection: why there is no program, in a word; empty if there is one.
        evaluation: None where there is no program.
    """

    order: int
    generation: int
    island: int
    source: str
    name: str
    digest: str
    mutator: str
    parents: tuple[str, ...] = ()
    note: str = ""
    tokens: int = 0
    rejection: str = ""
    evaluation: Evaluation | None = None

    @property
    def status(self) -> str:
        """Of the evaluation; `rejected` where there is no program."""
        return "rejected" if self.evaluation is None else self.evaluation.status

    @property
    def reason(self) -> str:
        """Why it was not evaluated to the end, in a word; empty if it was."""
        return self.rejection if self.evaluation is None else self.evaluation.reason

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Candidate:
        """What `to_dict` gave, read back from JSON."""
        values = dict(record) | {"parents": tuple(record["parents"])}
        if values.get("evaluation") is not None:
            values["evaluation"] = Evaluation.from_dict(values["evaluation"])
        return cls(**values)


@dataclass(frozen=True)
class Generation:
    """Candidates that were judged together.

    Attributes:
        number: 0 for the seeds.
        candidates: in order.
        mutator_state: what the mutator must remember after it.
        migrations: `(from, to, digest)` at its end.
        seconds: that it took.
        seed_again: what the seed came to when it was judged again after this generation; None where it was not.
    """

    number: int
    candidates: tuple[Candidate, ...]
    mutator_state: Mapping[str, Any] = field(default_factory=dict)
    migrations: tuple[tuple[int, int, str], ...] = ()
    seconds: float = 0.0
    seed_again: Evaluation | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "key": f"generation/{self.number}",
            "number": self.number,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "mutator_state": dict(self.mutator_state),
            "migrations": [list(move) for move in self.migrations],
            "seconds": self.seconds,
            "seed_again": None if self.seed_again is None else self.seed_again.to_dict(),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Generation:
        """What `to_dict` gave, read back from JSON."""
        return cls(
            number=record["number"],
            candidates=tuple(Candidate.from_dict(each) for each in record["candidates"]),
            mutator_state=record["mutator_state"],
            migrations=tuple((move[0], move[1], move[2]) for move in record["migrations"]),
            seconds=record["seconds"],
            seed_again=Evaluation.from_dict(again) if (again := record.get("seed_again")) is not None else None,
        )


@dataclass(frozen=True)
class History:
    """All that a search has found so far.

    Attributes:
        settings: of the run.
        yardstick: None before it was measured.
        generations: in order.
        others: records of controls and promotion, by key.
    """

    settings: Mapping[str, Any]
    yardstick: Yardstick | None
    generations: tuple[Generation, ...]
    others: Mapping[str, Mapping[str, Any]]

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates, in order."""
        return [candidate for generation in self.generations for candidate in generation.candidates]

    def counts(self) -> dict[str, int]:
        """Candidates by status."""
        found: dict[str, int] = {}
        for candidate in self.candidates:
            found[candidate.status] = found.get(candidate.status, 0) + 1
        return found

    def ascent(self) -> list[Candidate]:
        """The seed that came first, and every candidate that was better than all before it."""
        found: list[Candidate] = []
        most = float("-inf")
        for candidate in self.candidates:
            fitness = None if candidate.evaluation is None else candidate.evaluation.fitness
            if fitness is not None and fitness > most:
                most = fitness
                found.append(candidate)
        return found

    @property
    def best(self) -> Candidate | None:
        """The fittest candidate; of equals the first."""
        ascent = self.ascent()
        return ascent[-1] if ascent else None

    @property
    def reference(self) -> Candidate | None:
        """The first seed that was evaluated to the end: the one that is judged again."""
        seeds = self.generations[0].candidates if self.generations else ()
        return next((seed for seed in seeds if seed.evaluation and seed.evaluation.fitness is not None), None)

    def drift(self) -> list[tuple[int, float | None]]:
        """Each generation after which the seed was judged again, and its fitness then less that of the first time.

        None stands where it was not evaluated to the end any more.
        """
        seed = self.reference
        first = None if seed is None or seed.evaluation is None else seed.evaluation.fitness
        if first is None:
            return []
        return [
            (g.number, None if g.seed_again.fitness is None else g.seed_again.fitness - first)
            for g in self.generations
            if g.seed_again is not None
        ]

    def by_digest(self) -> dict[str, Candidate]:
        """The first candidate of each program."""
        found: dict[str, Candidate] = {}
        for candidate in self.candidates:
            if candidate.digest:
                found.setdefault(candidate.digest, candidate)
        return found


class SearchLog(AppendLog):
    """Appends what a search finds to a folder; made again with the same settings, it goes on.

    Arguments and errors are those of `AppendLog`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        self._settings = dict(settings)
        super().__init__(folder, settings, sync_rows=1)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, which has a text `key`; one whose key is there already is left out."""
        if self._append(record["key"], record):
            self._note("a new record", dict(record))

    @property
    def history(self) -> History:
        """What is there."""
        return _history(self._settings, self._records)

    def _note(self, where: str, record: Any) -> str:
        key = _key(where, record)
        self._records.setdefault(key, record)
        return key


def read_history(folder: Path) -> History:
    """What a search has found, while it runs too.

    Raises:
        ResultsError: no search in the folder, or a damaged line.
    """
    run = read_run(folder)
    records: dict[str, dict[str, Any]] = {}
    path = folder / ROWS
    for where, record in whole_lines(path) if path.exists() else ():
        records.setdefault(_key(where, record), record)
    return _history(run.settings, records)


def _key(where: str, record: Any) -> str:
    try:
        return str(record["key"])
    except (KeyError, TypeError) as error:
        raise damaged(where, repr(record)) from error


def _history(settings: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> History:
    generations, others, yardstick = [], {}, None
    try:
        for key, record in records.items():
            if key == "yardstick":
                yardstick = Yardstick.from_dict(record["yardstick"])
            elif key.startswith("generation/"):
                generations.append(Generation.from_dict(record))
            else:
                others[key] = record
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise damaged("the log of a search", f"{key}: {error}") from error
    generations.sort(key=lambda generation: generation.number)
    return History(settings, yardstick, tuple(generations), others)


def with_evaluation(candidate: Candidate, evaluation: Evaluation) -> Candidate:
    """The candidate with what became of it."""
    return replace(candidate, evaluation=evaluation)
