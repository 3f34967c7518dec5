"""Files of tensors that are there whole or not at all, and that come back as they were written or are refused.

A safetensors file with a JSON text in its header, and a SHA-256 of the text and the tensors beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvkeep.store.digest import sha256_of
from kvkeep.whole_files import replacing


def write_sealed(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file, whole and on the disk or not at all; a former one stays until then.

    Args:
        path: in a folder that exists.
        facts: as JSON holds them.
        tensors: on any device.

    Raises:
        OSError: a path that cannot be written to.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(dict(facts), sort_keys=True)
    try:
        with replacing(path, durable=True) as draft:
            save_file(plain, draft, metadata={"kvkeep": text, "sha256": sha256_of(text, plain)})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_sealed(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of a file, on the CPU.

    Raises:
        ValueError: no such file, one of something else, or a damaged one; in words.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(str(error)) from error
    text = metadata.get("kvkeep", "")
    if not text or metadata.get("sha256") != sha256_of(text, tensors):
        raise ValueError("a file with other bytes than were saved" if text else "a file of something else")
    facts: dict[str, Any] = json.loads(text)
    return facts, tensors
