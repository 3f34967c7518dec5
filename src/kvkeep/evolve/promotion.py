"""Whether what a search found holds elsewhere: other samples, seeds, lengths, ratios, tasks, another model.

A search's own score is the highest of many noisy ones, and so too high. Here the program and what it must beat are
measured side by side on samples that the search has never seen, and compared sample by sample. Texts whose question was
visible and texts whose question was hidden are never averaged together: they are two different jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvkeep.budget import Budget
from kvkeep.errors import ResultsError
from kvkeep.evolve.evaluating import (
    Evaluator,
    Job,
    Reading,
    full_job,
    job_of_policy,
    jobs_of,
    random_job,
    read_side_by_side,
)
from kvkeep.evolve.program import Program
from kvkeep.evolve.sample_store import SampleStore
from kvkeep.evolve.samples import Asked, Protocol, Recorded, SampleSettings, split_samples
from kvkeep.evolve.sandbox import Sandbox
from kvkeep.hf.prompting import Prompting
from kvkeep.policies import parse_prompt_policy
from kvkeep.results.statistics import Measurement, Paired, holm, paired_difference, stratified_mean
from kvkeep.tasks.protocols import Task

FULL, RANDOM = "full cache", "random entries"
OTHER = "candidate "  # begins the name of a program that is measured beside the best one, and is no rival of it


@dataclass(frozen=True)
class PromotionSettings:
    """What a program is tried on.

    Attributes:
        lengths: in tokens.
        ratios: fraction of the entries to remove.
        seeds: of the tasks' generators; those of the search's own seed are the held-out ones.
        protocols: was the question hidden or visible.
        samples: of each task, length and seed.
        search: which samples the search had, so that none of them is used.
    """

    lengths: tuple[int, ...]
    ratios: tuple[float, ...]
    seeds: tuple[int, ...]
    protocols: tuple[Protocol, ...]
    samples: int
    search: SampleSettings

    def __post_init__(self) -> None:
        if not (self.lengths and self.ratios and self.seeds and self.protocols) or self.samples < 2:
            raise ResultsError(
                expected="at least one length, ratio, seed and protocol, and two samples of each task",
                received=f"{self.lengths}, {self.ratios}, {self.seeds}, {self.protocols}, {self.samples} samples",
                remedy="for example lengths=(512, 1024), ratios=(0.75, 0.83)",
            )


@dataclass(frozen=True)
class Measured:
    """One contestant on one sample at one ratio.

    Attributes:
        contestant: its name.
        model: that was used.
        protocol: of the sample.
        task: of the sample.
        unseen: the search had no samples of this task.
        length: that was asked for.
        ratio: fraction removed.
        sample: its key.
        logprob: mean log-probability of the reference's tokens, nats.
    """

    contestant: str
    model: str
    protocol: str
    task: str
    unseen: bool
    length: int
    ratio: float
    sample: str
    logprob: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """A program against one other contestant, over all that both were measured on.

    Attributes:
        model: that was used.
        protocol: of the samples.
        part: `all`, `seen tasks`, `unseen tasks`.
        program: its name.
        against: the other's name.
        mean: of the program, nats.
        other_mean: of the other.
        difference: program minus other, nats a token.
        low: end of its interval; None where there is none.
        high: the other end.
        n: samples.
        p_value: two-sided, of the sign-flip test.
        p_holm: corrected for the number of others in the same part; None outside `all`.
        better: the interval and the corrected test both say so.
    """

    model: str
    protocol: str
    part: str
    program: str
    against: str
    mean: float
    other_mean: float
    difference: float
    low: float | None
    high: float | None
    n: int
    p_value: float
    p_holm: float | None
    better: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


@dataclass(frozen=True)
class Cell:
    """Samples that are measured together.

    Attributes:
        protocol: of the samples.
        length: in tokens.
        seed: of the tasks' generators.
    """

    protocol: Protocol
    length: int
    seed: int

    def __str__(self) -> str:
        return f"{self.protocol}, {self.length} tokens, seed {self.seed}"


def cells(settings: PromotionSettings) -> list[Cell]:
    """All cells of a promotion."""
    return [Cell(*each) for each in itertools.product(settings.protocols, settings.lengths, settings.seeds)]


def check_samples(settings: PromotionSettings, tokenizer: Any, tasks: Sequence[Task]) -> None:
    """Draw all samples of a promotion without a model, so that what cannot be had is known before a long search.

    Raises:
        TaskError: a length that is too small for a task, or a task that asks nothing under a protocol that wants it to.
    """
    prompting = Prompting(tokenizer, settings.search.template)
    for cell in cells(settings):
        drawn = split_samples(tasks, tokenizer, _wanted(settings, cell), ("heldout",))["heldout"]
        for sample in drawn:
            Asked.of(sample, prompting, cell.protocol)


def _wanted(settings: PromotionSettings, cell: Cell) -> SampleSettings:
    """Indices behind all that a search with these settings draws, whatever the seed."""
    return replace(
        settings.search, length=cell.length, seed=cell.seed, protocol=cell.protocol, heldout=settings.samples
    )


def measure_cell(
    cell: Cell,
    settings: PromotionSettings,
    contestants: Mapping[str, Program | str],
    evaluator: Evaluator,
    sandbox: Sandbox,
    store: SampleStore,
    tasks: Sequence[Task],
    unseen: Sequence[Task] = (),
    *,
    model_name: str = "",
) -> list[Measured]:
    """Measure contestants, the full cache and random entries on samples that a search has not seen.

    Args:
        cell: which samples.
        settings: how many, and at which ratios.
        contestants: programs, or texts of built-in policies, by name.
        evaluator: of the model.
        sandbox: an open one.
        store: of recorded samples.
        tasks: that the search had.
        unseen: tasks that it had not.
        model_name: for the results.

    Raises:
        PolicyRefused: a program that a guard refuses here.
    """
    new = {task.name for task in unseen}
    wanted = _wanted(settings, cell)
    samples = store.collect(evaluator.model, evaluator.tokenizer, [*tasks, *unseen], wanted, splits=("heldout",))[
        "heldout"
    ]
    found: list[Measured] = []
    for ratio in settings.ratios:
        readings = _readings(samples, contestants, Budget(compression_ratio=ratio), evaluator, sandbox)
        found += [
            Measured(
                contestant=name,
                model=model_name,
                protocol=cell.protocol,
                task=sample.facts.task,
                unseen=sample.facts.task in new,
                length=cell.length,
                ratio=ratio,
                sample=sample.facts.sample,
                logprob=reading.logprob,
            )
            for name, mine in readings.items()
            for sample, reading in zip(samples, mine, strict=True)
        ]
    for sample in samples:
        sample.close()
    return found


def verdicts(measured: Iterable[Measured], program: str) -> list[Verdict]:
    """A program against every other contestant, by model and protocol, over all and over seen and unseen tasks.

    Args:
        measured: of all contestants.
        program: the one that is to be promoted.
    """
    rows = list(measured)
    found: list[Verdict] = []
    for model, protocol in dict.fromkeys((row.model, row.protocol) for row in rows):
        mine = [row for row in rows if (row.model, row.protocol) == (model, protocol)]
        names = dict.fromkeys(row.contestant for row in mine)
        others = [name for name in names if name != program and not name.startswith(OTHER)]
        for part, kept in (
            ("all", mine),
            ("seen tasks", [row for row in mine if not row.unseen]),
            ("unseen tasks", [row for row in mine if row.unseen]),
        ):
            if not kept or (part != "all" and len(kept) == len(mine)):
                continue
            pairs = {other: _paired(kept, program, other) for other in others}
            # The full cache and random entries are bounds, not rivals.
            rivals = [other for other in others if other not in (FULL, RANDOM)]
            corrected = dict(zip(rivals, holm([pairs[other].p_value for other in rivals]), strict=True))
            for other in others:
                pair, p_holm = pairs[other], corrected.get(other) if part == "all" else None
                better = pair.excludes_zero and pair.difference.mean > 0
                found.append(
                    Verdict(
                        model=model,
                        protocol=protocol,
                        part=part,
                        program=program,
                        against=other,
                        mean=stratified_mean(_measurements(kept, program)),
                        other_mean=stratified_mean(_measurements(kept, other)),
                        difference=pair.difference.mean,
                        low=pair.difference.low,
                        high=pair.difference.high,
                        n=pair.difference.clusters,
                        p_value=pair.p_value,
                        p_holm=p_holm,
                        better=better and (p_holm is not None and p_holm < 0.05),
                    )
                )
    return found


def _readings(
    samples: Sequence[Recorded],
    contestants: Mapping[str, Program | str],
    budget: Budget,
    evaluator: Evaluator,
    sandbox: Sandbox,
) -> dict[str, list[Reading]]:
    """All contestants on some samples, and the full cache and random entries beside them."""
    entries = [sample.entries(budget) for sample in samples]
    jobs: dict[str, list[Job]] = {
        FULL: [full_job(sample) for sample in samples],
        RANDOM: [random_job(sample, count) for sample, count in zip(samples, entries, strict=True)],
    }
    programs = {name: given for name, given in contestants.items() if isinstance(given, Program)}
    contexts = [c for sample, count in zip(samples, entries, strict=True) for c in sample.contexts(count)]
    outcomes = sandbox.run(list(programs.values()), contexts) if programs else []
    for name, outcome in zip(programs, outcomes, strict=True):
        if outcome.refusal is not None or outcome.selections is None:
            raise outcome.refusal or ResultsError(
                expected=f"a selection of {name}", received="none", remedy="run the program by itself"
            )
        jobs[name] = jobs_of(samples, outcome.selections)
    for name, given in contestants.items():
        if isinstance(given, str):
            policy = parse_prompt_policy(given)
            jobs[name] = [job_of_policy(s, policy, count) for s, count in zip(samples, entries, strict=True)]
    return dict(zip(jobs, read_side_by_side(evaluator.read, list(jobs.values())), strict=True))


def _measurements(rows: Sequence[Measured], contestant: str) -> list[Measurement]:
    """Strata are tasks at a length and ratio; what is drawn is the sample, which comes at each ratio."""
    return [
        Measurement((row.task, row.length, row.ratio), row.sample, row.sample, row.logprob)
        for row in rows
        if row.contestant == contestant
    ]


def _paired(rows: Sequence[Measured], program: str, other: str) -> Paired:
    return paired_difference(_measurements(rows, program), _measurements(rows, other))
