"""Ranges of positions, as a caller writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.store import Held

Span = tuple[int | None, int | None]


def protected_entries(spans: Sequence[Span], held: Held | Observation, length: int) -> tuple[Tensor | None, int]:
    """The entries that a caller protects.

    Args:
        spans: of positions, as slices.
        held: entries of rows of one text.
        length: of the text.

    Returns:
        `[B, H_kv, N]` those that are held, None without spans; and how many positions the spans cover.
    """
    if not spans:
        return None, 0
    protected = torch.zeros_like(held.valid)
    for span in spans:
        start, end, _ = slice(*span).indices(length)
        protected |= (held.positions >= start) & (held.positions < end)
    return protected, len(positions_in(spans, length))


def positions_in(spans: Sequence[Span], length: int) -> set[int]:
    """The positions that some spans cover in a text of `length` tokens."""
    return {position for span in spans for position in range(*slice(*span).indices(length))}
