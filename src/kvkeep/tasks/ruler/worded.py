"""What the tasks of RULER share that need nothing but their wording."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvkeep.tasks.generating import RecipeOf, generate
from kvkeep.tasks.protocols import Sample, Tokenizer
from kvkeep.tasks.ruler.wording import Wording, shown, wording


@dataclass(frozen=True)
class WordedTask(ABC):
    """A task that is generated from words alone.

    Attributes:
        wording: `own`, `compat` (RULER's strings, from an installed lm-eval), or one's own.
    """

    name: ClassVar[str]

    wording: str | Wording = "own"

    @abstractmethod
    def _recipe(self, words: Wording) -> RecipeOf:
        """How a row is made."""

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """See `Task.samples`."""
        words = wording(self.wording)
        return generate(
            self.name,
            self._recipe(words),
            tokenizer,
            length=length,
            count=count,
            seed=seed,
            first=first,
            provider="generated",
            options=shown(words),
        )
