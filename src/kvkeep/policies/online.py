"""Policies that hold a cap at every step: what they see, and how they say which held entry leaves.

A cell spends its cap B on s sinks, a window of the w newest tokens and k slots. Every token enters the window. When a
token leaves it, it has a priority: it takes a free slot, or the slot of the lowest priority, or is dropped if its own
is not higher (of equal ones the older stays; see `running`). So no cell ever holds more than B entries, and which ones
is the same whether a text comes token by token or in chunks of any size.

There are two ways to a priority. A `StaticPolicy` says it once, when the token leaves the window, from keys and values
and a memory of its own; so a whole chunk can be read at once under a mask. A `WatchingPolicy` follows the attention
that each held entry receives, step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.errors import BudgetError, PolicyError
from kvkeep.observation import Rotary
from kvkeep.policies.protocols import NameOfClass

# The memory of a policy for one layer: tensors by name, `[B, ...]`. They are never written to; a step makes new ones.
# So caches share them in forks and marks, pick rows of them, and save and weigh them, without asking the policy.
State = Mapping[str, Tensor]

# Bookkeeping of an entry beside keys, values and position: see store/slots.py.
PRIORITY_BYTES = 4


@dataclass(frozen=True)
class Geometry:
    """How a cell spends its cap.

    Attributes:
        sinks: s, first tokens that stay.
        window: w, newest tokens that stay, the current one included.
        slots: k, tokens that stay beside them, by priority.
        state: entries that the policy's memory of the cell is worth, rounded up.
    """

    sinks: int
    window: int
    slots: int
    state: int = 0

    @property
    def held(self) -> int:
        """Entries that a full cell holds, `s + w + k`."""
        return self.sinks + self.window + self.slots

    @property
    def entries(self) -> int:
        """The cap that it fills, the memory included."""
        return self.held + self.state


@dataclass(frozen=True)
class Cells:
    """The cells of one layer.

    Attributes:
        rows: B.
        kv_heads: H_kv.
        key_size: D.
        value_size: D of the values.
        dtype: of keys and values.
        device: of keys and values.
        layer: index of the layer in the model.
    """

    rows: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    layer: int = 0

    @property
    def entry_bytes(self) -> int:
        """Bytes of one key and one value vector."""
        return (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Arrivals:
    """New tokens of some rows, and those that leave the window meanwhile.

    The last m of the n new tokens push one out each, in order: with new token `n - m + i` goes leaving token i, which
    stands w positions before it. Nobody leaves before the window is full.

    Attributes:
        keys: `[B, H_kv, n, D]` of the new tokens, after rotation.
        values: `[B, H_kv, n, D]`.
        positions: `[B, n]` int64.
        leaving_keys: `[B, H_kv, m, D]`, m <= n.
        leaving_values: `[B, H_kv, m, D]`.
        leaving_positions: `[B, m]` int64.
        layer: index of the layer in the model.
        rotary: the layer's rotary embedding, if the policy asks for it.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    leaving_keys: Tensor
    leaving_values: Tensor
    leaving_positions: Tensor
    layer: int = 0
    rotary: Rotary | None = None


class OnlinePolicy(ABC):
    """Holds a cap at every step. Subclasses are frozen dataclasses; their fields are the options."""

    name: ClassVar[str] = cast(str, NameOfClass())
    needs_rotary: ClassVar[bool] = False

    @abstractmethod
    def protects(self, entries: int) -> tuple[int, int]:
        """How many of the first and of the newest tokens stay whatever the priorities say: (sinks, window).

        Args:
            entries: the cap of a cell.
        """

    def begin(self, cells: Cells) -> State:
        """The memory of a layer before its first token, `[B, ...]` each; none if the policy has none.

        Its size must not depend on the text: it is taken out of the slots once and for all.
        """
        return {}

    def geometry(self, entries: int, state: int = 0) -> Geometry:
        """How a cell spends `entries`, `state` of which go to the policy's memory."""
        sinks, window = self.protects(entries)
        return Geometry(sinks, window, entries - sinks - window - state, state)


class StaticPolicy(OnlinePolicy):
    """Gives each token a priority when it leaves the window, once and for all."""

    @abstractmethod
    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        """Read a chunk of tokens.

        What comes out must not depend on how a text is divided into chunks.

        Args:
            arrivals: n new tokens, m of which push another one out of the window.
            state: what `begin` or the last call returned.

        Returns:
            `[B, H_kv, m]` float32, finite, higher stays: the priority of each leaving token, as it is when the new
            token that pushes it out has come. And the memory behind the chunk.
        """

    def step(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        """`priorities` for one new token, n = 1; for policies that have a shorter way for it."""
        return self.priorities(arrivals, state)


class WatchingPolicy(OnlinePolicy):
    """Follows the attention that entries receive: once a cell is full it is asked at each token of a text."""

    @abstractmethod
    def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
        """The priorities of all held entries after some queries.

        Args:
            priorities: `[B, H_kv, N]` float32 before them; zero for new entries.
            attention: `[B, H_kv, q, N]` float32, mean over the query heads of a group; zero where a query does not see
                an entry. All N entries were held while the q queries came.

        Returns:
            `[B, H_kv, N]` float32, finite, higher stays.
        """


def quarter(entries: int) -> int:
    """The usual window: a quarter of the cap, at least the current token."""
    return max(1, entries // 4)


def state_bytes(policy: OnlinePolicy, cells: Cells) -> int:
    """Bytes of the policy's memory of a layer, all rows together."""
    state = policy.begin(replace(cells, device=torch.device("meta")))
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def split_cap(policy: OnlinePolicy, entries: int, cells: Cells, protect: Sequence[tuple[int, int]] = ()) -> Geometry:
    """How each cell of a layer spends its cap.

    Args:
        policy: says how many sinks and how wide a window.
        entries: the cap.
        cells: what the policy's memory must be made for.
        protect: ranges of positions that the caller protects; those beyond the sinks take slots.

    Raises:
        BudgetError: no slot is left for the policy to give away.
        PolicyError: a geometry over the cap, or without a window.
    """
    one = replace(cells, rows=1)
    state = -(-state_bytes(policy, one) // (cells.kv_heads * cells.entry_bytes))  # rounded up
    geometry = policy.geometry(entries, state)
    pinned = _covered(protect, geometry.sinks)
    if geometry.slots - pinned < 1:
        parts = [f"{geometry.sinks} sinks", f"a window of {geometry.window}", f"{state} for the policy's memory"]
        raise BudgetError(
            expected=f"at least one entry of each cell's {entries} beside "
            + ", ".join([*parts, f"{pinned} protected positions"]),
            received=f"{geometry.slots - pinned}",
            remedy=f"allow at least {entries + 1 - geometry.slots + pinned} entries, or choose fewer sinks, a smaller "
            "window or fewer protected positions",
        )
    if geometry.entries > entries or geometry.sinks < 0 or geometry.window < 1 or geometry.state < state:
        raise PolicyError(
            expected=f"a geometry from {policy.name} of at most {entries} entries, {state} of them for its memory, "
            "with a window of at least 1",
            received=f"{geometry}, which is {geometry.entries} entries",
            remedy="sinks + window + slots + state is the cap",
        )
    return geometry


def _covered(spans: Sequence[tuple[int, int]], first: int) -> int:
    """How many positions from `first` on some ranges cover together."""
    total = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, first))
        first = max(first, end)
    return total


def refuse_ratio(policy: OnlinePolicy, budget: Budget) -> None:
    """Refuse a budget that depends on the length of a text that has not ended.

    Raises:
        BudgetError: a compression ratio.
    """
    if budget.compression_ratio is not None:
        raise BudgetError(
            expected=f"entries=... or bytes=... for {policy.name}, which holds a cap at every step",
            received=f"{budget}, which depends on the length of a text that has not ended",
            remedy="for example entries=512",
        )


def check_priorities(priorities: Tensor, shape: tuple[int, ...], policy: OnlinePolicy, layer: int) -> None:
    """Refuse priorities that are not float32, of another shape, or not finite.

    On devices other than the CPU the numbers are not looked at: that would wait for the device at every step.

    Raises:
        PolicyError: naming the policy and the layer.
    """
    if tuple(priorities.shape) != shape or priorities.dtype != torch.float32:
        raise PolicyError(
            expected=f"float32 priorities of shape {shape} from {policy.name}",
            received=f"{priorities.dtype} of shape {tuple(priorities.shape)} in layer {layer}",
            remedy="return one float32 number for each entry of each KV head",
        )
    if priorities.is_cpu and not bool(priorities.isfinite().all()):
        raise PolicyError(
            expected=f"finite priorities from {policy.name}",
            received=f"NaN or infinity in layer {layer}",
            remedy="guard divisions and logarithms; where the model's logits are not finite either, it is the model",
        )
