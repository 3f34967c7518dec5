"""Calibrations of models: a file for each, written once, and found again by the hash of the model.

A policy that declares `Needs(statistics=...)` gets them layer by layer; `kvkeep calibrate` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep.calibrated import OF_MODEL, LayerStatistics
from kvkeep.errors import ModelFileError
from kvkeep.hf.embedded import kvkeep_home
from kvkeep.hf.models import model_sha256
from kvkeep.hf.once import once_for_weights
from kvkeep.store.sealed import read_sealed, write_sealed

SCHEMA_VERSION = 1
_NAMES = tuple(field.name for field in fields(LayerStatistics))


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a corpus told about a model.

    Attributes:
        layers: statistics by the layer's index in the model; layers of full attention only.
        facts: where they come from, as JSON holds it: `model_sha256`, `model`, `corpus`, `digest`, `texts`, `length`,
            `sinks`, `queries`, `version`.
    """

    layers: Mapping[int, LayerStatistics]
    facts: Mapping[str, Any]

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file. It appears under its name when it is whole; a former one stays until then.

        Raises:
            ModelFileError: a path that cannot be written to.
        """
        path = Path(path).expanduser()
        tensors = {
            name: torch.stack([getattr(layer, name).float().cpu() for layer in self.layers.values()]) for name in _NAMES
        }
        tensors["layers"] = torch.tensor(list(self.layers), dtype=torch.int64)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, {"schema_version": SCHEMA_VERSION, **self.facts}, tensors)
        except OSError as error:
            raise ModelFileError(
                expected="a path that can be written to", received=f"{path}: {error}", remedy="choose another"
            ) from None
        return path

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ModelFileError: no such file, or one of something else, of another version, or damaged.
        """
        path = Path(path).expanduser()
        try:
            facts, tensors = read_sealed(path)
        except ValueError as error:
            raise _unreadable(path, str(error)) from None
        if facts.get("schema_version") != SCHEMA_VERSION:
            raise _unreadable(path, f"schema version {facts.get('schema_version', 'none')}, not {SCHEMA_VERSION}")
        if not _whole(tensors):
            raise _unreadable(path, "tensors that are missing, not finite, or do not agree with one another")
        return cls(
            {
                int(index): LayerStatistics(**{name: tensors[name][place] for name in _NAMES})
                for place, index in enumerate(tensors["layers"])
            },
            facts,
        )


def calibration_path(model_sha256: str, home: Path | None = None) -> Path:
    """Where the calibration of a model is looked for: in the folder of `kvkeep_home()`, by the hash of the model."""
    return (home or kvkeep_home()) / "calibrations" / f"{model_sha256.replace(':', '-')}.safetensors"


def calibrations_of(model: PreTrainedModel, places: Iterable[str]) -> dict[str, Calibration]:
    """The calibrations that a policy asks for, checked to be this model's.

    Args:
        model: unwrapped.
        places: `model` for the cache folder, or paths of files.

    Raises:
        ModelFileError: none there, one of another model, or a damaged one.
    """
    return {place: _calibration_of(model, place) for place in places}


def _calibration_of(model: PreTrainedModel, place: str) -> Calibration:
    sha256 = _identity(model)
    path = calibration_path(sha256) if place == OF_MODEL else Path(place).expanduser()
    command = f"kvkeep calibrate --model {getattr(model.config, '_name_or_path', '') or 'MODEL'}"
    if place != OF_MODEL:
        command += f" --out {place}"
    if not path.is_file():
        raise ModelFileError(
            expected=f"a calibration of this model at {path}, which the policy judges by",
            received="no such file",
            remedy=f"run `{command}` once; from Python, see kvkeep.calibration.calibrate",
        )
    stamp = path.stat()
    found = _read(path, stamp.st_mtime_ns, stamp.st_size)
    if found.facts.get("model_sha256") != sha256:
        raise ModelFileError(
            expected=f"a calibration of the model {sha256}",
            received=f"{path}, one of {found.facts.get('model_sha256')}",
            remedy=f"run `{command}` for this model",
        )
    return found


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int, size: int) -> Calibration:
    return Calibration.load(path)


# Of a model that came from no file this reads all weights.
_identity = once_for_weights(model_sha256)


def _whole(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of a calibration, `[layers, ...]`."""
    if set(tensors) != {"layers", *_NAMES} or tensors["layers"].ndim != 1:
        return False
    mean, filters = tensors["query_mean"], tensors["filters"]
    if mean.ndim != 3 or filters.ndim != 3:
        return False
    layers, heads, size = mean.shape
    shapes = {
        "layers": (layers,),
        "query_covariance": (layers, heads, size, size),
        "filters": (layers, filters.shape[1], size),
        "copying": (layers, heads),
    }
    finite = all(bool(torch.isfinite(tensors[name]).all()) for name in _NAMES)
    return finite and all(tuple(tensors[name].shape) == shape for name, shape in shapes.items())


def _unreadable(path: Path, received: str) -> ModelFileError:
    return ModelFileError(
        expected="a whole file that `kvkeep calibrate` wrote",
        received=f"{path}: {received}",
        remedy="calibrate the model again",
    )
