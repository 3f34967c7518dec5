"""What a cache has seen, and the forward that is running; shared by all of its layers.

A forward's facts (rows, padding, positions, whether the text ends here) are read once, before the first layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from kvkeep.errors import CacheStateError
from kvkeep.observation import SecondPass


@dataclass
class Progress:
    """What a cache has seen, shared by its layers.

    Attributes:
        lengths: logical length of each row: tokens seen, without padding.
        columns: tokens seen with padding, the same for all rows; what transformers calls the sequence length.
        forward: the forward that is running, None between forwards.
        notes: what policies had to change to stay in the budget.
        evict_seconds: time spent on scores, choices and cuts.
    """

    lengths: list[int] = field(default_factory=list)
    columns: int = 0
    forward: Forward | None = None
    notes: list[str] = field(default_factory=list)
    evict_seconds: float = 0.0

    def add_notes(self, notes: Sequence[str]) -> None:
        """Add what is new among the notes."""
        self.notes.extend(note for note in dict.fromkeys(notes) if note not in self.notes)


@dataclass
class Forward:
    """One forward pass.

    Attributes:
        decoder: the model's decoder, for policies that ask for rotary embeddings.
        positions: `[B, q]` logical positions of the new tokens.
        valid: `[B, q]` false at padding, None if there is none.
        lengths: logical length of each row when this forward is done.
        cutting: judge and cut when the layer has attended: the text ends here, or each chunk of it is cut.
        coming: columns of the text that are still to come, where it is cut chunk by chunk.
        reserve: columns that are known to come.
        budgets: for each row, entries a cell may keep on average, for layers that are cut.
        questions: for each row, positions of the question, if it is visible.
        ids: `[B, q]` the new tokens, where a policy repeats the text.
        second_passes: those that come between this forward and its cut: no layer is judged before they are done.
        touched: a layer has begun to store the new tokens, so that a failure leaves the layers out of step.
    """

    decoder: nn.Module
    positions: Tensor
    valid: Tensor | None
    lengths: list[int]
    cutting: bool
    coming: int = 0
    reserve: int = 0
    budgets: Sequence[int] = ()
    questions: Sequence[tuple[int, int]] = ()
    ids: Tensor | None = None
    second_passes: frozenset[SecondPass] = frozenset()
    touched: bool = False

    @property
    def text_lengths(self) -> list[int]:
        """Logical length of each row when its text ends; padding is taken to be on the left."""
        return [length + self.coming for length in self.lengths]


def running(progress: Progress) -> Forward:
    """The forward that is running."""
    if progress.forward is None:
        raise CacheStateError(
            expected="a forward of the model that this cache was made for, with kvkeep attached",
            received="an update from a model that kvkeep is not attached to",
            remedy="make the cache with KeepCache(model, ...) for this very model; after detach make a new one",
        )
    return progress.forward
