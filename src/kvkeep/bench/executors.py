"""Where samples are measured: in this process, in several of this machine, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib.metadata import version
from typing import Any, Protocol

import torch

from kvkeep.bench.measuring import Measurer
from kvkeep.bench.settings import Settings
from kvkeep.errors import ResultsError, near_names
from kvkeep.hf.models import load_model, model_sha256
from kvkeep.results import Key, Row
from kvkeep.tasks.protocols import Sample

# A sample, and those of its rows that are there already.
Unit = tuple[Sample, frozenset[Key]]


class Executor(Protocol):
    """Measures samples somewhere."""

    def run(self, units: Iterable[Unit]) -> Iterator[list[Row]]:
        """The rows of each sample, in any order; of a sample that is measured in this process, as they come."""
        ...


class Worker:
    """A loaded model that measures samples.

    Args:
        settings: of the run.
        loaded: model and tokenizer, where they are at hand.
        device: of the model.
        options: batch_rows and memory_limit, see `Measurer`.
    """

    def __init__(
        self, settings: Settings, loaded: tuple[Any, Any] | None = None, device: str = "cpu", **options: Any
    ) -> None:
        model, tokenizer = loaded or load_model(settings.model, dtype=settings.dtype, device=device)
        self.tokenizer = tokenizer
        self._measurer = Measurer(
            model,
            tokenizer,
            settings,
            identity=(settings.model, model_sha256(model)),
            versions=versions(model),
            **options,
        )

    @property
    def overhead(self) -> int:
        """Tokens of the chat template, at most."""
        return self._measurer.prompting.overhead

    def check_memory(self, sample: Sample) -> None:
        """Refuse a sample that cannot be measured within the memory limit; see `Measurer.check_memory`."""
        self._measurer.check_memory(sample)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The rows of a sample that are missing."""
        sample, there = unit
        for row in self._measurer.rows(sample, lambda key: key not in there):
            if row.key not in there:
                yield row

    def measure(self, unit: Unit) -> list[Row]:
        """All rows of a sample that are missing."""
        return list(self.rows(unit))


class Serial:
    """Measures in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def run(self, units: Iterable[Unit]) -> Iterator[list[Row]]:
        """The rows of each sample, one by one."""
        for unit in units:
            for row in self._worker.rows(unit):
                yield [row]


class Processes:
    """Measures in several processes of this machine, each with a model of its own and its share of the threads."""

    def __init__(self, settings: Settings, workers: int, **options: Any) -> None:
        self._settings, self._workers, self._options = settings, workers, options

    def run(self, units: Iterable[Unit]) -> Iterator[list[Row]]:
        """The rows of each sample, as they are done."""
        threads = max(1, torch.get_num_threads() // self._workers)
        pool = ProcessPoolExecutor(
            self._workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(self._settings, threads, self._options),
        )
        with pool:
            yield from _as_completed(pool.submit, _measure, units, 2 * self._workers)


class OnRay:
    """Measures on a Ray cluster: the one that `ray.init` finds, or one on this machine.

    Raises:
        ResultsError: Ray is not installed.
    """

    def __init__(self, settings: Settings, workers: int, **options: Any) -> None:
        try:
            import ray
        except ImportError as error:
            raise ResultsError(
                expected="Ray, for --executor ray", received=str(error), remedy='pip install "kvkeep[ray]"'
            ) from error
        self._ray, self._settings, self._workers, self._options = ray, settings, workers, options

    def run(self, units: Iterable[Unit]) -> Iterator[list[Row]]:
        """The rows of each sample, as they are done."""
        ray = self._ray
        own = not ray.is_initialized()
        if own:
            address = os.environ.get("RAY_ADDRESS")
            local = {} if address else {"num_cpus": self._workers, "include_dashboard": False}
            ray.init(address=address, log_to_driver=False, **local)
        try:
            remote = ray.remote(num_cpus=1)(Worker)
            actors = [remote.remote(self._settings, None, **self._options) for _ in range(self._workers)]
            pool = ray.util.ActorPool(actors)
            waiting = iter(units)
            for unit in _first(waiting, 2 * self._workers):
                pool.submit(lambda actor, unit: actor.measure.remote(unit), unit)
            while pool.has_next():
                yield pool.get_next_unordered()
                for unit in _first(waiting, 1):
                    pool.submit(lambda actor, unit: actor.measure.remote(unit), unit)
        finally:
            if own:
                ray.shutdown()


def make_executor(name: str, settings: Settings, workers: int, worker: Worker, **options: Any) -> Executor:
    """The executor of that name.

    Args:
        name: serial, processes or ray.
        settings: of the run.
        workers: processes or actors.
        worker: of this process.
        options: for the workers: device, batch_rows, memory_limit.

    Raises:
        ResultsError: an unknown name, or less than one worker.
    """
    kinds: Mapping[str, Callable[[], Executor]] = {
        "serial": lambda: Serial(worker),
        "processes": lambda: Processes(settings, workers, **options),
        "ray": lambda: OnRay(settings, workers, **options),
    }
    if name not in kinds:
        raise ResultsError(expected="an executor", received=repr(name), remedy=near_names(name, kinds))
    if workers < 1:
        raise ResultsError(expected="at least one worker", received=f"{workers}", remedy="for example --workers 2")
    return kinds[name]()


def versions(model: Any) -> dict[str, str]:
    """What a run's numbers may hang on."""
    packages = {name: version(name) for name in ("kvkeep", "torch", "transformers")}
    return {
        **packages,
        "python": platform.python_version(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "machine": platform.machine(),
    }


_worker: Worker | None = None


def _start(settings: Settings, threads: int, options: dict[str, Any]) -> None:
    global _worker
    torch.set_num_threads(threads)
    _worker = Worker(settings, **options)


def _measure(unit: Unit) -> list[Row]:
    if _worker is None:
        raise RuntimeError("the process was not started as a worker")
    return _worker.measure(unit)


def _first(units: Iterator[Unit], count: int) -> Iterator[Unit]:
    for _, unit in zip(range(count), units, strict=False):
        yield unit


def _as_completed(
    submit: Callable[..., Future[list[Row]]],
    measure: Callable[[Unit], list[Row]],
    units: Iterable[Unit],
    ahead: int,
) -> Iterator[list[Row]]:
    """Results as they are done, with so many units handed out ahead."""
    waiting = iter(units)
    running = {submit(measure, unit) for unit in _first(waiting, ahead)}
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()
            running |= {submit(measure, unit) for unit in _first(waiting, 1)}
