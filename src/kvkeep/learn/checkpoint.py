"""Where a training run stands, in one file that is there whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.errors import ModelFileError
from kvkeep.store.sealed import read_sealed, write_sealed

FILE = "checkpoint.safetensors"


def write_checkpoint(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any], **more: Tensor
) -> None:
    """Write parameters, buffers, the optimizer's moments and facts such as the step; a former file stays until then.

    Nothing else is needed to go on: what is drawn at a step depends on the seed and the step alone.

    Args:
        folder: of the run.
        module: what is trained.
        optimizer: of all parameters of the module, in their order.
        facts: as JSON holds them.
        more: other tensors.
    """
    tensors = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    tensors |= {f"more.{name}": tensor for name, tensor in more.items()}
    write_sealed(folder / FILE, facts, tensors)


def read_checkpoint(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Put a run back to where it stood; None where it has not begun.

    Returns:
        The facts and the other tensors.

    Raises:
        ModelFileError: a damaged file, or one of another module.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        facts, tensors = read_sealed(path)
        module.load_state_dict(_behind("module.", tensors))
        given = optimizer.state_dict()
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _behind("optimizer.", tensors).items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({**given, "state": state})
    except (ValueError, RuntimeError) as error:
        raise ModelFileError(
            expected="the whole checkpoint of this run",
            received=f"{path}: {error}",
            remedy="remove it to begin again, or choose another folder",
        ) from None
    return facts, _behind("more.", tensors)


def _behind(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
