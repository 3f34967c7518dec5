"""All that an eviction needs, as one module and one file: the scorer, the decay, what both were made for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn

from kvkeep.errors import KvkeepError, ModelFileError
from kvkeep.learn.config import KVpopConfig, LearnError, ModelShape
from kvkeep.learn.ranking import log_gamma, static_priority
from kvkeep.learn.scorers.base import CellScorer, part
from kvkeep.learn.scorers.linear import LinearScorer
from kvkeep.learn.scorers.mlp import MLPScorer
from kvkeep.learn.scorers.mlstm import MLSTMScorer
from kvkeep.learn.scorers.zero import ZeroScorer
from kvkeep.store.sealed import read_sealed, write_sealed

SCHEMA_VERSION = 1
FILE = "model.safetensors"  # the name that the hub expects
CONFIG_FILE = "config.json"

SCORERS: Mapping[str, type[CellScorer]] = {
    "mlstm": MLSTMScorer,
    "mlp": MLPScorer,
    "linear": LinearScorer,
    "zero": ZeroScorer,
}


class KVpopScorer(nn.Module, PyTorchModelHubMixin, library_name="kvkeep", tags=["kvpop", "kv-cache"]):
    """A scorer for every cell of a model, and each cell's decay.

    KVpop (arXiv 2607.05061). As it is made it scores nothing, and evicts as StreamingLLM does.

    `save_pretrained` writes a folder with one safetensors file, which knows its configuration and the model's
    fingerprint; `from_pretrained` reads such a folder, or one of the hub.

    Args:
        config: geometry, decay, scorer.
        shape: of the model that it is for.

    Attributes:
        config: likewise.
        shape: likewise.
        scorer: the network.
        alpha: `[C]` float32; what the decay is made of.
    """

    def __init__(self, config: KVpopConfig, shape: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.shape = shape
        self.scorer = SCORERS[config.scorer](config, shape)
        self.alpha = nn.Parameter(torch.zeros(shape.cells))

    def log_gamma(self, cells: slice | None = None) -> Tensor:
        """`[C]`: the logarithm of each cell's decay, of those of one layer where they are named."""
        return log_gamma(part(self.alpha, cells), self.config.decay)

    def forward(self, x: Tensor, cells: slice | None = None, valid: Tensor | None = None) -> Tensor:
        """Scores `[B, C, S - w]` of whole texts; see `CellScorer.forward`."""
        scores: Tensor = self.scorer(x, cells, valid)
        return scores

    def priorities(self, x: Tensor, cells: slice | None = None, valid: Tensor | None = None) -> Tensor:
        """Static priorities `[B, C, S - w]` of whole texts, for `ranking.evict_at`."""
        return static_priority(self(x, cells, valid), self.log_gamma(cells))

    def check_model(self, shape: ModelShape) -> None:
        """Refuse a model that this was not made for.

        Args:
            shape: of the model at hand. An empty fingerprint on either side is not compared.

        Raises:
            LearnError: other layers or heads, or other weights.
        """
        ours, theirs = asdict(self.shape), asdict(shape)
        if not (ours["fingerprint"] and theirs["fingerprint"]):
            ours["fingerprint"] = theirs["fingerprint"] = ""
        if ours != theirs:
            raise LearnError(
                expected=f"the model that the scorer was made for, {_told(ours)}",
                received=_told(theirs),
                remedy="load the same weights, or train a scorer for this model",
            )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, model: ModelShape | None = None, **options: Any
    ) -> Self:
        """Read what `save_pretrained` wrote.

        Args:
            pretrained_model_name_or_path: a folder, or the name of a repository on the hub.
            model: the model that it shall serve; None does not look.
            options: `revision`, `token`, `cache_dir`, `local_files_only` and others of the hub.

        Raises:
            ModelFileError: no such file, or one that is damaged or of something else.
            LearnError: a configuration that cannot be, or another model.
        """
        try:
            made = super().from_pretrained(pretrained_model_name_or_path, **options)
        except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError) as error:
            raise ModelFileError(
                expected="a folder that KVpopScorer.save_pretrained wrote, or a repository of the hub",
                received=f"{pretrained_model_name_or_path}: {error}",
                remedy="look for the path, or for the repository's name",
            ) from None
        except ValueError as error:  # a config.json that is none
            raise _damaged(Path(pretrained_model_name_or_path) / CONFIG_FILE, str(error)) from None
        if model is not None:
            made.check_model(model)
        return made

    def _save_pretrained(self, save_directory: Path) -> None:
        facts = {
            "schema_version": SCHEMA_VERSION,
            "config": self.config.to_dict(),
            "model": asdict(self.shape),
        }
        try:
            write_sealed(save_directory / FILE, facts, self.state_dict())
        except OSError as error:
            raise ModelFileError(
                expected="a folder that can be written to",
                received=f"{save_directory}: {error}",
                remedy="choose another folder",
            ) from None
        # For people and for the hub; we read what is in the weights' own file.
        (save_directory / CONFIG_FILE).write_text(json.dumps(facts, sort_keys=True, indent=2), encoding="utf-8")

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        map_location: str = "cpu",
        strict: bool = True,
        **model_kwargs: Any,
    ) -> Self:
        """The hub's part of `from_pretrained`; what it has read of config.json is not looked at."""
        folder = Path(model_id)
        path = folder / FILE
        if not folder.is_dir():
            path = Path(
                hf_hub_download(
                    repo_id=model_id,
                    filename=FILE,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    token=token,
                    local_files_only=local_files_only,
                )
            )
        facts, tensors = _read(path)
        made = cls(KVpopConfig.from_dict(facts["config"]), ModelShape(**facts["model"]))
        wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != wanted:
            differing = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
            raise _damaged(path, f"tensors that do not fit its configuration: {', '.join(differing)}")
        made.load_state_dict(tensors)
        return made.to(map_location).eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of a scorer's file."""
    try:
        facts, tensors = read_sealed(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if facts.get("schema_version") != SCHEMA_VERSION or not {"config", "model"} <= facts.keys():
        raise ModelFileError(
            expected=f"a scorer file of schema version {SCHEMA_VERSION}",
            received=f"{path} of version {facts.get('schema_version')}",
            remedy="save it again with this version of kvkeep",
        )
    return facts, tensors


def _told(shape: Mapping[str, Any]) -> str:
    weights = f", weights {shape['fingerprint']}" if shape["fingerprint"] else ""
    return f"{shape['layers']} layers of {shape['kv_heads']} KV heads of size {shape['head_size']}{weights}"


def _damaged(path: Path, received: str) -> KvkeepError:
    return ModelFileError(
        expected="a whole file that KVpopScorer.save_pretrained wrote",
        received=f"{path}: {received}",
        remedy="copy or save it again",
    )
