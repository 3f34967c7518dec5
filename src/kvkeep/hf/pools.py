"""The same work on many units: in this process, in several of this machine, or on a Ray cluster.

What works is made once in each process (a loaded model, say) by a function that can be pickled.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from kvkeep.errors import ResultsError, near_names

Make = Callable[[], Callable[[Any], Any]]

_AHEAD = 2  # units for each worker that are handed out before a result is taken


class Pool(Protocol):
    """Works on units somewhere. A context manager: leaving it lets the workers go."""

    def map(self, units: Sequence[Any]) -> Iterator[Any]:
        """The result of each unit, in their order."""
        ...

    def unordered(self, units: Iterable[Any]) -> Iterator[Any]:
        """The result of each unit as it is done; few units are taken ahead."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Serial:
    """Works in this process.

    Args:
        work: done to each unit.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def map(self, units: Sequence[Any]) -> Iterator[Any]:
        """The result of each unit, in their order."""
        return map(self._work, units)

    def unordered(self, units: Iterable[Any]) -> Iterator[Any]:
        """The result of each unit, one after the other."""
        return map(self._work, units)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Processes:
    """Works in several processes of this machine, each with its share of the threads.

    Args:
        make: makes what works; called once in each process.
        workers: processes.
    """

    def __init__(self, make: Make, workers: int) -> None:
        threads = max(1, torch.get_num_threads() // workers)
        self._ahead = _AHEAD * workers
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(make, threads))

    def map(self, units: Sequence[Any]) -> Iterator[Any]:
        """The result of each unit, in their order."""
        return self._pool.map(_work, units)

    def unordered(self, units: Iterable[Any]) -> Iterator[Any]:
        """The result of each unit as it is done; few units are taken ahead."""
        waiting = iter(units)
        running = {self._pool.submit(_work, unit) for unit in islice(waiting, self._ahead)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
                running |= {self._pool.submit(_work, unit) for unit in islice(waiting, 1)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


class OnRay:
    """Works on a Ray cluster: the one that `RAY_ADDRESS` names or that is connected, else one on this machine.

    Args:
        make: makes what works; called once in each actor.
        workers: actors.

    Raises:
        ResultsError: Ray is not installed.
    """

    def __init__(self, make: Make, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise ResultsError(
                expected="Ray, for --executor ray", received=str(error), remedy='pip install "kvkeep[ray]"'
            ) from error
        self._ray, self._own = ray, not ray.is_initialized()
        if self._own:
            address = os.environ.get("RAY_ADDRESS")
            local = {} if address else {"num_cpus": workers, "include_dashboard": False}
            ray.init(address=address, log_to_driver=False, **local)
        remote = ray.remote(num_cpus=1)(_Actor)
        self._actors = [remote.remote(make) for _ in range(workers)]

    def map(self, units: Sequence[Any]) -> Iterator[Any]:
        """The result of each unit, in their order."""
        results: Iterator[Any] = self._ray.util.ActorPool(self._actors).map(_hand_over, units)
        return results

    def unordered(self, units: Iterable[Any]) -> Iterator[Any]:
        """The result of each unit as it is done; few units are taken ahead."""
        waiting, pool = iter(units), self._ray.util.ActorPool(self._actors)
        for unit in islice(waiting, _AHEAD * len(self._actors)):
            pool.submit(_hand_over, unit)
        while pool.has_next():
            yield pool.get_next_unordered()
            for unit in islice(waiting, 1):
                pool.submit(_hand_over, unit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()


def make_pool(name: str, make: Make, workers: int, here: Callable[[Any], Any]) -> Pool:
    """The pool of that name.

    Args:
        name: serial, processes or ray.
        make: makes what works in other processes.
        workers: processes or actors.
        here: what works in this process.

    Raises:
        ResultsError: an unknown name, or less than one worker.
    """
    kinds: Mapping[str, Callable[[], Pool]] = {
        "serial": lambda: Serial(here),
        "processes": lambda: Processes(make, workers),
        "ray": lambda: OnRay(make, workers),
    }
    if name not in kinds:
        raise ResultsError(expected="an executor", received=repr(name), remedy=near_names(name, kinds))
    if workers < 1:
        raise ResultsError(expected="at least one worker", received=f"{workers}", remedy="for example --workers 2")
    return kinds[name]()


class _Actor:
    def __init__(self, make: Make) -> None:
        self._work = make()

    def work(self, unit: Any) -> Any:
        return self._work(unit)


def _hand_over(actor: Any, unit: Any) -> Any:
    return actor.work.remote(unit)


_working: Callable[[Any], Any] | None = None


def _start(make: Make, threads: int) -> None:
    global _working
    torch.set_num_threads(threads)
    _working = make()


def _work(unit: Any) -> Any:
    if _working is None:
        raise RuntimeError("the process was not started as a worker")
    return _working(unit)
