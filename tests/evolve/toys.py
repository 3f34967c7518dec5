"""Tasks of a few lines and a store of samples: a tiny model is through with them in no time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvkeep.evolve.sample_store import SampleSet, SampleStore
from kvkeep.evolve.samples import SampleSettings
from kvkeep.testing import fake_model

from ..bench.toy import Toy


@dataclass(frozen=True)
class OtherToy(Toy):
    """The same under another name, with other samples."""

    name: ClassVar[str] = "toy/shades"

    def samples(self, tokenizer: Any, *, length: int, count: int, seed: int = 0, first: int = 0) -> Any:
        return super().samples(tokenizer, length=length, count=count, seed=seed + 1000, first=first)


def tiny(architecture: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, Any]:
    return fake_model(architecture, dtype=dtype, layers=2, seed=seed)


def sample_settings(**changes: Any) -> SampleSettings:
    values: dict[str, Any] = {"length": 400, "probe": 1, "stage1": 1, "stage2": 2, "heldout": 2}
    return SampleSettings(**(values | changes))


def collected(folder: Path, loaded: tuple[Any, Any] | None = None, tasks: Any = None, **changes: Any) -> SampleSet:
    store = SampleStore(folder, limit_bytes=2**28)
    return store.collect(*(loaded or tiny()), tasks or [Toy(), OtherToy()], sample_settings(**changes))
