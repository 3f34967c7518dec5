"""`check_policy` finds nothing in our online policies, and something in every broken one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.policies import OnlinePolicy, StaticPolicy, WatchingPolicy, available_policies
from kvkeep.policies.online import Arrivals, Cells, Geometry, State
from kvkeep.testing import check_policy


@dataclass(frozen=True)
class Sound(StaticPolicy):
    """Keeps what is like the tokens before it: a memory, and reading with it. Its children spoil it."""

    def protects(self, entries: int) -> tuple[int, int]:
        return 2, max(1, entries // 4)

    def begin(self, cells: Cells) -> State:
        return {"mean": torch.zeros(cells.rows, cells.kv_heads, cells.key_size, device=cells.device)}

    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        count, leaving = arrivals.keys.shape[2], arrivals.leaving_keys.shape[2]
        means, mean = [], state["mean"]
        for step in range(count):
            mean = 0.9 * mean + 0.1 * torch.nn.functional.normalize(arrivals.keys[:, :, step].float(), dim=-1)
            means.append(mean)
        read = torch.stack(means, dim=2)[:, :, count - leaving :]
        return self.rated(read, torch.nn.functional.normalize(arrivals.leaving_keys.float(), dim=-1)), {"mean": mean}

    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        return (memory * keys).sum(-1)


@dataclass(frozen=True)
class SoundWatcher(WatchingPolicy):
    def protects(self, entries: int) -> tuple[int, int]:
        return 1, 2

    def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
        return torch.maximum(priorities, attention.amax(2))


ONLINE = [*available_policies("online"), "online-random[sinks=0,window=1]", "online-streaming-llm[sinks=0]"]


@pytest.mark.parametrize("policy", [*ONLINE, Sound(), SoundWatcher()], ids=str)
def test_sound_policies_keep_the_contract(policy: Any) -> None:
    assert check_policy(policy) == []


@dataclass(frozen=True)
class OverTheCap(Sound):
    def geometry(self, entries: int, state: int = 0) -> Geometry:
        return Geometry(2, 4, entries - 5, state)


@dataclass(frozen=True)
class ForgetsItsMemory(Sound):
    def geometry(self, entries: int, state: int = 0) -> Geometry:
        return Geometry(2, 4, entries - 6, 0)


@dataclass(frozen=True)
class NoWindow(Sound):
    def protects(self, entries: int) -> tuple[int, int]:
        return 2, 0


@dataclass(frozen=True)
class Grows(Sound):
    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        priorities, after = super().priorities(arrivals, {"mean": state["mean"][..., :8]})
        return priorities, {"mean": torch.cat([after["mean"], state["mean"]], dim=-1)}


@dataclass(frozen=True)
class Coarse(Sound):
    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        return super().rated(memory, keys).double()


@dataclass(frozen=True)
class OneHead(Sound):
    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        return super().rated(memory, keys)[:, :1]


@dataclass(frozen=True)
class DividesByZero(Sound):
    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        return super().rated(memory, keys) / keys.square().sum(-1)


@dataclass(frozen=True)
class Draws(Sound):
    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        return torch.rand(keys.shape[:3])


@dataclass(frozen=True)
class Counts(Sound):
    """Not the generator: a number of its own that grows with every call."""

    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        calls.append(None)
        return super().rated(memory, keys) + len(calls)


calls: list[None] = []


@dataclass(frozen=True)
class LooksAhead(Sound):
    """Reads with what the whole chunk has left, not with what was known when the token went."""

    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        return super().rated(memory[:, :, -1:], keys) if keys.shape[2] else keys.sum(-1)


@dataclass(frozen=True)
class ChunkRanks(Sound):
    """Ranks within the chunk."""

    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        return super().rated(memory, keys).argsort(-1).float()


@dataclass(frozen=True)
class PoolsRows(Sound):
    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        rated = super().rated(memory, keys)
        return rated - rated.mean(0, keepdim=True)


@dataclass(frozen=True)
class WritesToItsMemory(Sound):
    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        priorities, after = super().priorities(arrivals, state)
        state["mean"].copy_(after["mean"])
        return priorities, after


@dataclass(frozen=True)
class WritesToKeys(Sound):
    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        arrivals.keys.mul_(2)
        return super().priorities(arrivals, state)


@dataclass(frozen=True)
class AddsInPlace(SoundWatcher):
    def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
        return priorities.add_(attention.sum(2))


@dataclass(frozen=True)
class LastChunkOnly(SoundWatcher):
    def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
        return attention.mean(2)


@dataclass(frozen=True)
class WrongShape(SoundWatcher):
    def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
        return attention[:, :1, -1]


@dataclass(frozen=True)
class Neither(OnlinePolicy):
    def protects(self, entries: int) -> tuple[int, int]:
        return 1, 2


@dataclass
class NotFrozen(Sound.__base__):  # type: ignore[misc,name-defined]  # a frozen one could not be derived from
    protects = Sound.protects
    begin = Sound.begin
    priorities = Sound.priorities
    rated = Sound.rated


BROKEN: list[tuple[Callable[[], OnlinePolicy], str]] = [
    (OverTheCap, "over the cap"),
    (ForgetsItsMemory, "wrong geometry"),
    (NoWindow, "wrong geometry"),
    (Grows, "over the cap"),
    (Coarse, "float32 priorities"),
    (OneHead, "float32 priorities"),
    (DividesByZero, "not finite"),
    (Draws, "global random generator"),
    (Draws, "not deterministic"),
    (Counts, "not deterministic"),
    (LooksAhead, "how a text is divided"),
    (ChunkRanks, "how a text is divided"),
    (PoolsRows, "rows see one another"),
    (WritesToItsMemory, "changes its input"),
    (WritesToKeys, "changes its input"),
    (AddsInPlace, "changes its input"),
    (LastChunkOnly, "how a text is divided"),
    (WrongShape, "float32 priorities"),
    (Neither, "which is neither"),
    (NotFrozen, "not a frozen dataclass"),
]


def cases() -> Iterator[Any]:
    for make, fault in BROKEN:
        yield pytest.param(make, fault, id=f"{make.__name__}-{fault.replace(' ', '-')}")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("make", "fault"), list(cases()))
def test_broken_policies_are_told_what_they_break(make: Callable[[], OnlinePolicy], fault: str) -> None:
    found = check_policy(make(), raise_on_failure=False)
    assert any(fault in sentence for sentence in found), found
    with pytest.raises(PolicyError, match="contract"):
        check_policy(make())
