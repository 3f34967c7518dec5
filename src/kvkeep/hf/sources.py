"""What users write for a model: its name or place, and the floating type of its weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from kvkeep.errors import ModelFileError, UnsupportedError, near_names
from kvkeep.hf.embedded import KNOWN_MODELS, model_folder

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
Dtype = torch.dtype | Literal["auto"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        kind: a known model, a folder of transformers, a GGUF file, or an id of the hub.
        name: as it was written.
        path: the folder or the file, which of a known model may not be there yet; None for an id of the hub.
    """

    kind: Literal["known", "folder", "gguf", "hub"]
    name: str
    path: Path | None = None

    def dtype(self, wanted: torch.dtype | str) -> Dtype:
        """The floating type to load it in; "auto" stays for folders and the hub, whose checkpoints have a type.

        The weights of known models and of GGUF files are dequantised, which has no type of its own: float32.

        Raises:
            UnsupportedError: an unknown type.
        """
        if wanted == "auto":
            return torch.float32 if self.kind in ("known", "gguf") else "auto"
        for name, known in DTYPES.items():
            if wanted in (name, known):
                return known
        raise UnsupportedError(
            expected="a floating type for the weights",
            received=repr(wanted),
            remedy=near_names(str(wanted), [*DTYPES, "auto"]),
        )


def find_source(name_or_path: str | PathLike[str]) -> Source:
    """Where a model comes from, by what a user writes.

    A string that names a known model is that model, even if a folder of the same name exists. An id of the hub is
    taken as one by its form: nothing is asked of the network.

    Raises:
        ModelFileError: neither of the four kinds; near names are suggested.
    """
    name = str(name_or_path)
    if isinstance(name_or_path, str) and name in KNOWN_MODELS:
        return Source("known", name, model_folder(name))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return Source("folder", name, path)
    if path.is_file() and path.suffix == ".gguf":
        return Source("gguf", name, path)
    is_file = path.exists() or path.suffix == ".gguf"
    if isinstance(name_or_path, str) and not is_file and _HUB_ID.fullmatch(name):
        return Source("hub", name)
    raise ModelFileError(
        expected="a known model, a folder, a .gguf file, or an owner/name of the hub",
        received=f"{name!r}, {'another kind of file' if path.exists() else 'which is none of them'}",
        remedy="check the path" if is_file or len(path.parts) > 1 else near_names(name, KNOWN_MODELS),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A floating type as users write it: `float32`."""
    return str(dtype).removeprefix("torch.")
