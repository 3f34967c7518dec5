"""One training run in one process or in several, by accelerate: who writes, who takes which part, how gradients meet.

Scorers are small and lie whole in every process; their gradients are averaged by hand. The model is wrapped as
`accelerate launch` was told to: data parallel, or sharded (FSDP). Checkpoints hold whole tensors, and so can be taken
up by another number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from kvkeep.learn.config import LearnError

_MODEL, _OPTIMIZER = "model.", "optimizer."


class Processes:
    """The processes of a run.

    Args:
        device: that the model is on; of a CUDA device each process takes the one that it was given.
        batch: sequences of a step.
        sequences: in all.

    Attributes:
        count: processes.
        index: this one, from 0.
        writes: whether it is the one that writes.
        device: to compute on.

    Raises:
        LearnError: processes that cannot have equally many sequences in each step.
    """

    def __init__(self, device: torch.device, batch: int, sequences: int) -> None:
        self._accelerator = Accelerator(cpu=device.type == "cpu")
        self.count, self.index = self._accelerator.num_processes, self._accelerator.process_index
        self.writes = self._accelerator.is_main_process
        self.device = self._accelerator.device if self.count > 1 else device
        if batch % self.count or sequences % self.count:
            raise LearnError(
                expected=f"a batch and a number of sequences that {self.count} processes can share equally",
                received=f"a batch of {batch}, {sequences} sequences",
                remedy=f"make both multiples of {self.count}: --batch {-(-batch // self.count) * self.count}",
            )

    @property
    def _sharded(self) -> bool:
        return bool(self._accelerator.distributed_type == DistributedType.FSDP)

    def refuse_sharding(self, what: str) -> None:
        """Refuse FSDP for something that needs whole weights.

        Raises:
            LearnError: the run is sharded.
        """
        if self._sharded:
            raise LearnError(
                expected=f"data-parallel processes for {what}, which are small",
                received="FSDP",
                remedy="launch without FSDP, or train all weights",
            )

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """The model and its optimizer as this kind of run needs them."""
        model, optimizer = self._accelerator.prepare(model, optimizer, device_placement=[self.count > 1, True])
        return model, optimizer

    def unwrapped(self, model: Any) -> Any:
        """The model itself."""
        return self._accelerator.unwrap_model(model)

    def alone(self, model: Any) -> AbstractContextManager[Any]:
        """Gradients that are not exchanged yet."""
        context: AbstractContextManager[Any] = self._accelerator.no_sync(model)
        return context

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        self._accelerator.backward(loss)

    def clip(self, model: Any, highest: float) -> float:
        """Clip the norm of the model's gradient, and return it as it was."""
        norm: Any = self._accelerator.clip_grad_norm_(model.parameters(), highest)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def average_gradients(self, module: nn.Module) -> None:
        """Give a module that every process has the mean of their gradients."""
        if self.count > 1:
            for parameter in module.parameters():
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._accelerator.reduce(mine, "mean")

    def averaged(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The mean of numbers that every process has."""
        if self.count == 1:
            return dict(numbers)
        values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=self.device)
        return dict(zip(numbers, self._accelerator.reduce(values, "mean").tolist(), strict=True))

    def wait(self) -> None:
        """For all others."""
        self._accelerator.wait_for_everyone()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def whole_state(self, model: Any) -> dict[str, Tensor] | None:
        """All weights of a model whose processes have a part of them each; None where the model has them itself."""
        return dict(self._accelerator.get_state_dict(model)) if self._sharded else None

    def state_of(self, model: Any, optimizer: Any) -> dict[str, Tensor]:
        """What is trained, and the optimizer's moments, as whole tensors by name; none where a process does not write.

        Args:
            model: as `prepare` gave it.
            optimizer: likewise; None before the first step.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights: Any = get_model_state_dict(model, options=options)
        once = {name for name, _ in self.unwrapped(model).named_parameters()}  # a tied weight has two names
        found = {f"{_MODEL}{name}": tensor for name, tensor in weights.items() if name in once}
        if optimizer is not None:
            states: Any = get_optimizer_state_dict(model, _plain(optimizer), options=options).get("state", {})
            for name, state in states.items():
                found |= {f"{_OPTIMIZER}{name}.{key}": torch.as_tensor(value) for key, value in state.items()}
        return found

    def take_up(self, model: Any, optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
        """Put model and optimizer back to what `state_of` gave."""
        weights, moments = (_behind(prefix, tensors) for prefix in (_MODEL, _OPTIMIZER))
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))
        if not moments:
            return
        options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
        state: dict[str, dict[str, Tensor]] = {}
        for place, tensor in moments.items():
            name, _, key = place.rpartition(".")
            state.setdefault(name, {})[key] = tensor
        groups = get_optimizer_state_dict(model, _plain(optimizer), options=options)["param_groups"]
        given: Any = {"state": state, "param_groups": groups}
        set_optimizer_state_dict(model, _plain(optimizer), given, options=options)


class SavedBytes:
    """A context that counts what is kept for gradients within it, each storage once, the parameters' left out.

    Args:
        model: whose parameters.

    Attributes:
        total: bytes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        self._seen = {_storage(parameter).data_ptr() for parameter in model.parameters()}
        self._hooks = saved_tensors_hooks(self._count, lambda tensor: tensor)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _storage(tensor: Any) -> torch.UntypedStorage:
    """Where the numbers of a tensor stand, or those of this process's part of it."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    found: torch.UntypedStorage = local.untyped_storage()
    return found


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _behind(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
