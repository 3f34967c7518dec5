"""Models by name, and the identity of the weights that a result was made with.

    model, tokenizer = load_model("smollm2-135m")                # known by name: fetched once, then offline
    model, tokenizer = load_model("some-org/some-model")         # an id of the hub, through transformers
    model, tokenizer = load_model("models/mine")                 # a folder of transformers
    model, tokenizer = load_model("models/mine.Q4_K_M.gguf")     # a GGUF file, dequantised at each load

Weights are read from safetensors or GGUF files, never from pickles, and no code that comes with a model is run.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.errors import ModelFileError, UnsupportedError
from kvkeep.hf.convert import QUICK_CHECK_TOKENS, check_model, quiet, read_gguf
from kvkeep.hf.embedded import (
    KNOWN_MODELS,
    WEIGHTS,
    ModelRecord,
    fetch_model,
    kvkeep_home,
    sha256_of,
    verify_folder,
)
from kvkeep.hf.sources import Dtype, find_source

__all__ = ["KNOWN_MODELS", "ModelRecord", "fetch_model", "kvkeep_home", "load_model", "model_sha256"]


def load_model(
    name_or_path: str | PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate (`eval`, transformers' SDPA attention).

    A string that names a known model is that model, even if a folder of the same name exists. Known models are
    fetched on first use (see `fetch_model`), need no network afterwards, and are checked at each load: the hashes of
    their files, and 128 tokens of plain prose whose mean negative log-likelihood must be below the record's bound.
    Other models are checked for being complete, not for being right.

    The weights of known models and of GGUF files are dequantised ones: not those that the model's makers published.

    Args:
        name_or_path: the name of a known model, a folder, a `.gguf` file, or an `owner/name` of the hub.
        dtype: float32, bfloat16, float16 or float64; as a string too. "auto": the type that a folder or a model of
            the hub was saved in; float32 for known models and `.gguf` files, whose weights are dequantised.
        device: of torch, such as "cpu", "cuda" or "cuda:1".

    Raises:
        ModelFileError: an unknown name; a missing, incomplete or damaged file; a known model that fails its check.
        UnsupportedError: an unknown dtype, or a device that is not there.
    """
    source = find_source(name_or_path)
    kind, place = source.dtype(dtype), _as_device(device)
    if source.path is None:
        return _from_pretrained(source.name, kind, place, local=False)
    if source.kind == "known":
        folder = source.path if source.path.exists() else fetch_model(source.name)
        return _load_folder(folder, kind, place, name=source.name)
    load = _load_gguf if source.kind == "gguf" else _load_folder
    return load(source.path, kind, place)


def _load_folder(
    folder: Path, dtype: Dtype, device: torch.device, *, name: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a folder; `name` is that of the known model that it must be."""
    manifest = verify_folder(folder, name)
    if not (folder / "config.json").is_file():
        raise ModelFileError(
            expected=f"a model folder of transformers, with config.json, at {folder}",
            received="a folder without config.json",
            remedy="name the folder that holds config.json, the tokenizer and *.safetensors",
        )
    weights = tuple(sorted(folder.glob("*.safetensors")))
    if not weights:
        raise ModelFileError(
            expected=f"weights as *.safetensors in {folder}",
            received="none",
            remedy="save the model with save_pretrained (pickled weights are not read), or finish its download",
        )
    model, tokenizer = _from_pretrained(folder, dtype, device, local=True)
    if manifest is not None and (record := KNOWN_MODELS.get(manifest["record"])):
        check_model(model, tokenizer, record, tokens=QUICK_CHECK_TOKENS)
    # The hash of a fetched model has just been compared with the file.
    _remember(model, weights, sha256=manifest["files"][WEIGHTS]["sha256"] if manifest else None)
    return model, tokenizer


def _load_gguf(path: Path, dtype: Dtype, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = read_gguf(path)
    model = model.to(device=device, dtype=dtype)
    _remember(model, (path,))
    return model, tokenizer


def _from_pretrained(
    source: str | Path, dtype: Dtype, device: torch.device, *, local: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
    try:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation="sdpa",
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # readers of files, parsers and the hub's client raise errors of many kinds
        raise ModelFileError(
            expected=f"a causal language model with its tokenizer that transformers can load from {str(source)!r}"
            + ("" if local else " (no such folder here, so an id of the hub)"),
            received=f"{type(error).__name__}: {error}",
            remedy="check that its files are complete (download it again if in doubt) and that it is a causal "
            "language model" + ("" if local else "; check the id, and that the hub can be reached"),
        ) from error
    if missing := sorted(info["missing_keys"]):
        # transformers fills them with random numbers and goes on.
        raise ModelFileError(
            expected=f"weights for every parameter in {str(source)!r}",
            received=f"none for {len(missing)} of them, such as {missing[0]}",
            remedy="download the model again; it must have the head of a causal language model",
        )
    return model.to(device).eval(), tokenizer


def _as_device(device: torch.device | str) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(1, device=place).item()  # the meta device allocates, but has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a torch without CUDA asserts
        found = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise UnsupportedError(
            expected="a device that torch can use here",
            received=f"{str(device)!r} ({str(error).splitlines()[0]})",
            remedy=f"available: {', '.join(found)}",
        ) from error
    return place


# --- identity ---------------------------------------------------------------------------------------------------------

FULL_FINGERPRINT_BYTES = 4 << 30
SAMPLED_ELEMENTS = 65_536
_WITNESS_ELEMENTS = 64


@dataclass(frozen=True)
class _Origin:
    """The files that a model was read from, and a witness of the weights as they were then."""

    files: tuple[Path, ...]
    stamps: tuple[tuple[int, int], ...]
    witness: str
    sha256: str | None = None


_origins: weakref.WeakKeyDictionary[nn.Module, _Origin] = weakref.WeakKeyDictionary()


def model_sha256(model: nn.Module) -> str:
    """The identity of a model's weights, for results.

    - `<hex>`: SHA-256 of the file that `load_model` read (`model.safetensors` or the `.gguf` file; for several files,
      the hash of the lines `name hash`). The floating type is no part of it.
    - `tensors:<hex>`: for any other model, and for one whose weights were changed after it was loaded (cast to another
      type, too): hash of the config and of every parameter and buffer.
    - `sample:<hex>`: the same for models above 4 GiB, over at most 65,536 evenly spaced elements of each tensor. It
      tells models apart, but a change of few elements can escape it.

    Nothing is set on the model. Hashing takes about a second for a gigabyte, once for a model from files.

    Raises:
        UnsupportedError: the model has parameters without values (on the meta device).
    """
    origin = _origins.get(model)
    if origin and origin.witness == _digest(model, _WITNESS_ELEMENTS):
        if origin.sha256:
            return origin.sha256
        if _stamps(origin.files) == origin.stamps:
            sha256 = _files_sha256(origin.files)
            _origins[model] = replace(origin, sha256=sha256)
            return sha256
    whole = sum(t.numel() * t.element_size() for _, t in _tensors(model)) <= FULL_FINGERPRINT_BYTES
    return f"tensors:{_digest(model, None)}" if whole else f"sample:{_digest(model, SAMPLED_ELEMENTS)}"


def weights_fingerprint(model: nn.Module) -> str:
    """What a saved cache is bound to: names, types, shapes and evenly spaced elements of all weights.

    Unlike `model_sha256` it is the same however the model was loaded, and quick for large models.

    Raises:
        UnsupportedError: the model has parameters without values (on the meta device).
    """
    return _digest(model, SAMPLED_ELEMENTS, with_config=False)


def weights_identity(model: nn.Module) -> str:
    """What a trained scorer is bound to: names, shapes, and the signs of evenly spaced elements of all parameters.

    Rounding changes no sign, not even where a number becomes zero. So it is the same whatever floating type the model
    was loaded in or cast to. Another training flips some among millions; a change that flips none escapes it, such as
    one of norms alone, whose weights are all positive.

    Raises:
        UnsupportedError: the model has parameters without values (on the meta device).
    """
    hasher = hashlib.sha256(b"signs")
    for name, parameter in model.named_parameters():
        hasher.update(f"{name} {tuple(parameter.shape)}\n".encode())
        hasher.update(np.packbits(torch.signbit(_some(name, parameter, SAMPLED_ELEMENTS)).cpu().numpy()).tobytes())
    return hasher.hexdigest()


def _remember(model: nn.Module, files: tuple[Path, ...], sha256: str | None = None) -> None:
    _origins[model] = _Origin(files, _stamps(files), _digest(model, _WITNESS_ELEMENTS), sha256)


def _stamps(files: tuple[Path, ...]) -> tuple[tuple[int, int], ...]:
    """Size and time of change of each file; of a file that is gone, zeros."""
    return tuple((s.st_size, s.st_mtime_ns) if (s := f.stat() if f.exists() else None) else (0, 0) for f in files)


def _files_sha256(files: tuple[Path, ...]) -> str:
    if len(files) == 1:
        return sha256_of(files[0])
    return hashlib.sha256("".join(f"{f.name} {sha256_of(f)}\n" for f in files).encode()).hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name, tied ones once; of buffers also the unsaved ones (rotary frequencies)."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(model: nn.Module, elements: int | None, *, with_config: bool = True) -> str:
    """Hash of the config and of each tensor: of all its elements, or of evenly spaced ones."""
    config = getattr(model, "config", None) if with_config else None
    essentials = {} if config is None else config.to_dict()
    for volatile in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        essentials.pop(volatile, None)
    hasher = hashlib.sha256(json.dumps(essentials, sort_keys=True, default=str).encode())
    for name, tensor in _tensors(model):
        flat = _some(name, tensor, elements)
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if flat.numel():
            hasher.update(flat.cpu().contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _some(name: str, tensor: Tensor, elements: int | None) -> Tensor:
    """All elements of a tensor in one dimension, or evenly spaced ones, at most so many."""
    if tensor.is_meta:
        raise UnsupportedError(
            expected="a model with its weights in memory",
            received=f"{name} on the meta device",
            remedy="load the model without offloading",
        )
    flat = tensor.detach().reshape(-1)
    if elements is not None and flat.numel() > elements:
        flat = flat[:: -(-flat.numel() // elements)]
    return flat
