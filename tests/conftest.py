from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill memory that nobody may read with what no test can miss."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not initialised is NaN: whoever reads slack shows it."""

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned_allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            return poison(allocate(*args, **kwargs))

        return poisoned_allocate

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models spend more time on waking threads than on numbers; real ones get the threads of the machine."""
    former = torch.get_num_threads()
    if request.node.get_closest_marker("real") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)
