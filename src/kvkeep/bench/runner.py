"""A run: samples of tasks, measured once each and appended to a log that a killed run goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep.bench.measuring import is_asked_aware
from kvkeep.bench.rollouts import rollouts_of
from kvkeep.bench.settings import Settings
from kvkeep.bench.worker import Unit, Worker, measurer
from kvkeep.errors import TaskError
from kvkeep.hf.pools import make_pool
from kvkeep.results import Key, ResultLog, row_key
from kvkeep.tasks.protocols import Sample, Task, Tokenizer


def run(
    settings: Settings,
    tasks: list[Task],
    folder: str | Path,
    *,
    loaded: tuple[Any, Any] | None = None,
    device: str = "cpu",
    executor: str = "serial",
    workers: int = 1,
    batch_rows: int = 32,
    memory_limit: int | None = None,
    claims: str | Path | None = None,
    on_rows: Callable[[int, int, str], None] = lambda done, total, task: None,
) -> Path:
    """Measure what is missing in a folder.

    Args:
        settings: of the run; a folder that has rows already must have the same ones.
        tasks: the tasks that the settings name.
        folder: of the results.
        loaded: model and tokenizer, where they are at hand.
        device: of the model.
        executor: serial, processes or ray.
        workers: of the executors that have several.
        batch_rows: caches that answer together; more of them want more memory.
        memory_limit: bytes that the prefill which all policies share may hold; where it would hold more, each cache
            reads the text by itself.
        claims: a claims file to declare before the run.
        on_rows: told after each row how many there are, how many there will be, and the task.

    Returns:
        The folder.

    Raises:
        ResultsError: another run's folder, or a row that cannot be written.
        TaskError: a length that is too small for a task and the template.
        BudgetError: a sample of which not even one cache fits into the memory limit; before anything is measured.
    """
    options: dict[str, Any] = {"device": device, "batch_rows": batch_rows, "memory_limit": memory_limit}
    worker = Worker(settings, loaded, **options)
    with ResultLog(folder, settings.to_dict(), claims) as log:
        samples = list(_samples(settings, tasks, worker.tokenizer, worker.overhead))
        keys = {sample.key: list(_keys(settings, sample)) for sample in samples}
        total = sum(map(len, keys.values()))

        def missing() -> Iterator[Unit]:
            for sample in samples:
                there = frozenset(key for key in keys[sample.key] if key in log)
                if len(there) < len(keys[sample.key]):
                    yield sample, there

        for sample, _ in missing():
            worker.check_memory(sample)
        on_rows(len(log), total, "")
        make = partial(measurer, settings, options)
        # In this process rows come one by one, so that a run which is killed in a sample keeps those that were done.
        with make_pool(executor, make, workers, worker.rows) as pool:
            for rows in pool.unordered(missing()):
                for row in rows:
                    log.append(row)
                    on_rows(len(log), total, row.task)
    return Path(folder)


def _samples(settings: Settings, tasks: list[Task], tokenizer: Tokenizer, overhead: int) -> Iterator[Sample]:
    """Each sample once, and once for each rollout where answers are drawn."""
    known: set[str] = set()
    for sample in _texts(settings, tasks, tokenizer, overhead):
        if sample.key in known:  # of a set whose samples have no length, under another length
            continue
        known.add(sample.key)
        yield from [sample] if settings.sampling is None else rollouts_of(sample, settings.rollouts)


def _texts(settings: Settings, tasks: list[Task], tokenizer: Tokenizer, overhead: int) -> Iterator[Sample]:
    for task in tasks:
        for length in settings.lengths:
            room = length - overhead
            if room < 1:
                raise TaskError(
                    expected=f"a length above the {overhead} tokens of the chat template",
                    received=f"{length}",
                    remedy="ask for more tokens",
                )
            for sample in task.samples(tokenizer, length=room, count=settings.samples, seed=settings.seed):
                # In results, under the length that was asked for, template included.
                yield replace(sample, length=length) if sample.length else sample


def _keys(settings: Settings, sample: Sample) -> Iterator[Key]:
    for protocol in settings.protocols:
        for index, turn in enumerate(sample.turns):
            if protocol == "query-aware" and not is_asked_aware(turn):
                continue
            for policy, budget in settings.cuts:
                yield row_key(sample.key, index, policy, budget.describe(), protocol)
