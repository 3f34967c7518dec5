"""Work in other processes comes back in order, made once in each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvkeep.errors import ResultsError
from kvkeep.hf.pools import make_pool


def make() -> Callable[[int], tuple[int, int, int]]:
    made_by = os.getpid()
    return lambda unit: (unit * unit, made_by, torch.get_num_threads())


@pytest.fixture
def threads() -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("name", ["serial", "processes", "ray"])
def test_results_come_in_the_order_of_units(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "ray":
        pytest.importorskip("ray")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with make_pool(name, make, 2, make()) as pool:
        found = list(pool.map(range(20)))
        again = list(pool.map([3]))
        taken: list[int] = []

        def units() -> Iterator[int]:
            for unit in range(20):
                taken.append(unit)
                yield unit

        mixed = pool.unordered(units())
        first = next(mixed)
        ahead = len(taken)
        rest = list(mixed)
    assert [square for square, _, _ in found] == [unit * unit for unit in range(20)]
    assert again[0][0] == 9
    assert sorted(square for square, _, _ in [first, *rest]) == [unit * unit for unit in range(20)]
    assert ahead == (1 if name == "serial" else 4)
    workers = {worker for _, worker, _ in found}
    assert (workers == {os.getpid()}) == (name == "serial")
    assert len(workers) <= 2
    assert all(count <= max(1, threads) for _, _, count in found) or name == "ray"


def test_what_is_no_pool_is_refused() -> None:
    with pytest.raises(ResultsError, match="did you mean 'serial'"):
        make_pool("seriel", make, 1, make())
    with pytest.raises(ResultsError, match="at least one worker"):
        make_pool("processes", make, 0, make())
