"""TOVA, online: at every step the entry goes that the last token looks at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.policies.online import WatchingPolicy


@dataclass(frozen=True)
class OnlineTOVA(WatchingPolicy):
    """Attention of the last query, averaged over all heads of the layer: one set of entries per layer.

    Oren et al. 2024 (arXiv 2401.06104), section 3. Deviation: the entry goes just before the next token comes, so that
    the cap holds within the step, too; what the paper keeps between two steps is what `entries` minus one keeps here.
    """

    name: ClassVar[str] = "online-tova"

    def protects(self, entries: int) -> tuple[int, int]:
        """Nothing but the current token."""
        return 0, 1

    def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
        """The last row, the same for all heads; they hold the same entries in the same order."""
        return attention[:, :, -1].mean(1, keepdim=True).expand_as(priorities)
