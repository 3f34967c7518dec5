"""An answer watched while it is generated: passed on piece by piece, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer


class Watch(TextStreamer):  # type: ignore[misc]  # transformers is not typed
    """A streamer for `model.generate`; the clock starts when it is made.

    Args:
        tokenizer: writes the tokens as text.
        on_text: called with each piece of the answer as it comes; None for the times alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self._started = time.perf_counter()
        self._times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called by `generate`: first with the prompt, then with each token."""
        if not self.next_tokens_are_prompt:
            self._times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with text that no later token changes."""
        if self._on_text is not None and text:
            self._on_text(text)

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token; 0 if there was none."""
        return self._times[0] - self._started if self._times else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Rate of the tokens after the first; 0 if there was only one."""
        if len(self._times) < 2:
            return 0.0
        return (len(self._times) - 1) / max(self._times[-1] - self._times[0], 1e-9)
