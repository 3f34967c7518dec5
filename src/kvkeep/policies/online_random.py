"""Random, online: the floor of every comparison of online policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.policies.online import Arrivals, State, StaticPolicy, quarter
from kvkeep.policies.protocols import require


@dataclass(frozen=True)
class OnlineRandom(StaticPolicy):
    """A random priority for each layer, head and position, the same on every device.

    What is held beside sinks and window is then a uniform sample of all that left the window.

    Attributes:
        sinks: how many of the first entries stay.
        window: how many of the newest tokens stay; None is a quarter of the cap.
        seed: any whole number.
    """

    sinks: int = 4
    window: int | None = None
    seed: int = 0
    name: ClassVar[str] = "online-random"

    def __post_init__(self) -> None:
        check_window(self.sinks, self.window)

    def protects(self, entries: int) -> tuple[int, int]:
        """Sinks and window."""
        return self.sinks, quarter(entries) if self.window is None else self.window

    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        """Uniform in [0, 1)."""
        positions = arrivals.leaving_positions[:, None]  # [B, 1, m]
        heads = torch.arange(arrivals.keys.shape[1], device=positions.device)[:, None]
        # A prime below 2^32: seeds of any size stay apart.
        cells = (self.seed * 1_000_003 + arrivals.layer * 1009) % 4_294_967_291 + heads  # [H_kv, 1]
        # 24 bits, which float32 holds exactly.
        return (scrambled(scrambled(cells) ^ positions) >> 8).float() / 2**24, state


def scrambled(numbers: Tensor) -> Tensor:
    """32 bits that look random, from whole numbers: the finaliser of MurmurHash3 (Appleby, public domain).

    A hash and no generator: the number of a position must not depend on how many were asked for before it.
    """
    x = numbers & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def check_window(sinks: int, window: int | None) -> None:
    """Refuse sinks and a window that make no sense.

    Raises:
        PolicyError: negative sinks, or a window without the current token.
    """
    require(sinks >= 0, "sinks >= 0", f"sinks={sinks}", "4 is usual, 0 is none")
    require(window is None or window >= 1, "window >= 1", f"window={window}", "None is a quarter of the cap")
