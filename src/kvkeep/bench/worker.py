"""What measures samples: a loaded model, here or in another process."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from kvkeep.bench.measuring import Measurer
from kvkeep.bench.settings import Settings
from kvkeep.hf.models import load_model, model_sha256
from kvkeep.results import Key, Row
from kvkeep.tasks.protocols import Sample

# A sample, and those of its rows that are there already.
Unit = tuple[Sample, frozenset[Key]]


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


def measurer(settings: Settings, options: Mapping[str, Any]) -> Callable[[Unit], list[Row]]:
    """What measures samples in another process: all rows of one that are missing.

    Args:
        settings: of the run.
        options: for the `Worker`.
    """
    worker = Worker(settings, **options)
    return lambda unit: list(worker.rows(unit))


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
