"""What asks a model to repeat a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvkeep.hf.turns import TurnTexts, encode_after
from kvkeep.observation import SecondPass

# The words of the authors' code. A later chunk is asked for by the last tokens of the one before it.
_FIRST = "\n\nRepeat the previous context exactly."
_FURTHER = "\n\nRepeat the part of the previous context exactly, starting with"
_OVERLAP = 8


@dataclass(frozen=True)
class RepeatPrompt:
    """What asks a model to repeat a text, as tokens. Without any, the model reads the bare tokens once more.

    Attributes:
        first: before the first chunk of a text.
        further: before each later chunk; the last tokens of the chunk before it follow.
        footer: from the request to the model's first word.
    """

    first: tuple[int, ...] = ()
    further: tuple[int, ...] = ()
    footer: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, footer: str | None = None) -> RepeatPrompt:
        """The request of KVzip's authors.

        Args:
            tokenizer: the model's.
            footer: from the user's last word to the model's first; None: what the chat template says.

        Raises:
            UnsupportedError: a chat template that cannot be split.
        """
        if footer is None:
            footer = TurnTexts.of(tokenizer).footer

        def encode(before: str, text: str) -> tuple[int, ...]:
            return tuple(encode_after(tokenizer, before, text))

        return cls(encode("a", _FIRST), encode("a", _FURTHER), encode(".", footer))

    def question(self, ids: Tensor, start: int, end: int) -> Tensor:
        """The tokens that make a model repeat `ids[start:end]`, these included."""
        asks = [*self.first] if start == 0 else [*self.further, *ids[max(0, start - _OVERLAP) : start].tolist()]
        return torch.cat([torch.tensor([*asks, *self.footer], dtype=torch.long), ids[start:end]])

    def longest(self, length: int, second_pass: SecondPass) -> int:
        """The most tokens that are fed at once for a text of `length` tokens."""
        first = len(self.first) + len(self.footer) + min(length, second_pass.chunk)
        further = len(self.further) + _OVERLAP + len(self.footer) + min(length - second_pass.chunk, second_pass.chunk)
        return max(first, further) if length > second_pass.chunk else first
