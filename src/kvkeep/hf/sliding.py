"""The layers of a KeepCache that keep a window of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvkeep.errors import UnsupportedError
from kvkeep.hf.progress import Progress, running


class KeepSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A sliding-window layer: keeps its own window, is never evicted, and holds no more than it uses."""

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, sliding_window: int, progress: Progress) -> None:
        super().__init__(sliding_window=sliding_window)
        self.progress = progress
        self.record: Callable[[], None] = lambda: None
        self.marked: tuple[Tensor | None, ...] = ()  # what the cache's last cut still needs, for `rewind`

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers does it; what is kept is copied, since a view would keep the whole text alive."""
        running(self.progress).touched = True
        full: tuple[Tensor, Tensor] = super().update(key_states.detach(), value_states.detach(), *args, **kwargs)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        self.record()
        return full

    def activate_past_recording(self) -> None:
        """Refused: assisted decoding would roll back what other layers have evicted."""
        raise refused_assisted_decoding()

    def snapshot(self) -> tuple[Tensor | None, Tensor | None, int]:
        """What the layer holds; exact and without a copy, since updates replace the tensors."""
        return self.keys, self.values, self.cumulative_length

    def restore(self, snapshot: tuple[Tensor | None, Tensor | None, int]) -> None:
        """Hold what `snapshot` gave."""
        self.keys, self.values, self.cumulative_length = snapshot
        self.is_initialized = self.keys is not None
        if self.keys is not None:
            self.device, self.dtype = self.keys.device, self.keys.dtype

    def reset(self) -> None:
        """Hold nothing."""
        self.keys = self.values = None
        self.marked = ()
        self.is_initialized = False
        self.cumulative_length = 0

    def nbytes(self) -> int:
        """Bytes of the window, and of the window at the last cut where that is another."""
        held = {t.data_ptr(): t for t in (self.keys, self.values, *self.marked) if t is not None}
        return sum(t.untyped_storage().nbytes() for t in held.values())


def refused_assisted_decoding() -> UnsupportedError:
    """The error for modes that roll the cache back step by step."""
    return UnsupportedError(
        expected="a generation mode that only appends: greedy, sampling or beams",
        received="assisted or speculative decoding, which rolls the cache back",
        remedy="generate without an assistant, or use a DynamicCache",
    )
