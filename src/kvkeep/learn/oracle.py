"""The future itself as a policy, for measurement: how good could a scorer be at all?

The whole text is read with the full cache first, and each entry's priority is the attention that it will really get. So
no name leads to this policy: whoever writes a text does not have its future.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.learn.config import KVpopConfig, LearnError
from kvkeep.learn.ranking import static_priority
from kvkeep.learn.traces import LayerTrace, trace
from kvkeep.policies.online import Arrivals, State, StaticPolicy
from kvkeep.store.digest import sha256_of


@dataclass(frozen=True)
class Oracle(StaticPolicy):
    """Keeps what the rest of one certain text will look at most, in the mean over all later queries.

    KVpop (arXiv 2607.05061), equations 2 and 3, as the teacher of its loss ranks. It is greedy: attention that a query
    pays is that of the full cache, and an entry's worth does not depend on what else is held.

    Attributes:
        tables: by the model's index of a layer, `[B, H_kv, T]` float32: priorities of the text's positions from 0 on.
        sinks: first tokens that stay.
        window: newest tokens that stay.
    """

    tables: Mapping[int, Tensor] = field(compare=False, repr=False)
    sinks: int
    window: int
    digest: str = field(init=False)
    name: ClassVar[str] = "oracle"

    def __post_init__(self) -> None:
        tensors = {str(layer): table for layer, table in self.tables.items()}
        object.__setattr__(self, "digest", sha256_of("oracle", tensors))

    def protects(self, entries: int) -> tuple[int, int]:
        """Sinks and window."""
        return self.sinks, self.window

    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        """From the table.

        Raises:
            LearnError: a layer or a position that the text did not have.
        """
        table = self.tables.get(arrivals.layer)
        positions = arrivals.leaving_positions
        known = -1 if table is None else table.shape[-1] - 1
        last = int(positions.max()) if positions.numel() else 0
        if table is None or last > known or len(table) != len(positions):
            raise LearnError(
                expected=f"the text whose future is known: {0 if table is None else len(table)} rows, positions up to "
                f"{known} in layer {arrivals.layer}",
                received=f"{len(positions)} rows, position {last}",
                remedy="make the oracle of this very text",
            )
        wanted = positions[:, None].expand(-1, table.shape[1], -1)
        return table.to(arrivals.keys.device).gather(-1, wanted), state


def oracle_of(model: Any, ids: Tensor, config: KVpopConfig, log_gamma: Tensor | None = None) -> Oracle:
    """The oracle of a text.

    Args:
        model: one that kvkeep supports.
        ids: `[B, S]`, without padding.
        config: sinks, window, and how the target is made.
        log_gamma: `[C]` of all cells, to let priorities fade as a scorer's do; None is not at all.

    Raises:
        LearnError: a text that is not longer than the window.
    """
    if ids.shape[1] <= config.protected_window:
        raise LearnError(
            expected=f"a text of more than {config.protected_window} tokens, the window",
            received=f"{ids.shape[1]}",
            remedy="nothing leaves the window of shorter ones",
        )
    tables: dict[int, Tensor] = {}

    def see(layer: LayerTrace) -> None:
        target = layer.target(config).float()
        heads = layer.keys.shape[1]
        fall = None if log_gamma is None else log_gamma[layer.ordinal * heads : (layer.ordinal + 1) * heads]
        tables[layer.layer] = target if fall is None else static_priority(target, fall.to(target.device))

    with torch.no_grad():
        trace(model, ids, see)
    return Oracle(tables, config.sinks, config.protected_window)
