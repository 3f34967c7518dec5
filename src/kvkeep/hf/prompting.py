"""How the texts of a sample become tokens: in the model's chat template, or as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.turns import JOINT, TurnTexts, encode_after
from kvkeep.tasks.protocols import Turn

# Joins what the tokenizer may not split otherwise: the template's own tokens are few.
_SLACK = 8


@dataclass(frozen=True)
class Context:
    """The tokens of a context, in its place in the conversation.

    Attributes:
        ids: the template's header and the context.
        offset: of the context's first token among them.
        end: the end of the context's words, which the next tokens follow.
    """

    ids: tuple[int, ...]
    offset: int
    end: str


class Prompting:
    """Turns the texts of samples into tokens.

    Args:
        tokenizer: its chat template is used if it has one.
        template: false does without.
    """

    def __init__(self, tokenizer: Any, template: bool = True) -> None:
        self.tokenizer = tokenizer
        self.has_template = template and bool(getattr(tokenizer, "chat_template", None))
        self._texts = TurnTexts.of(tokenizer) if self.has_template else TurnTexts("", "\n", "\n")

    @property
    def overhead(self) -> int:
        """Tokens that the template adds to a sample's own, at most."""
        if not self.has_template:
            return _SLACK
        texts = self._texts.header, self._texts.footer
        return sum(len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts) + _SLACK

    def context(self, text: str) -> Context:
        """The context, behind the template's header."""
        header = self._texts.header
        ids = list(self.tokenizer(header, add_special_tokens=not self.has_template)["input_ids"])
        return Context((*ids, *encode_after(self.tokenizer, header, text)), len(ids), text[-JOINT:])

    def question(self, end: str, turn: Turn) -> list[int]:
        """A question behind a context or an earlier question, up to the answer's first token.

        Args:
            end: of what stands before.
            turn: the question and the beginning of its answer.
        """
        return encode_after(self.tokenizer, end, turn.question) + self.footer(turn)

    def continuation(self, end: str, turn: Turn) -> list[int]:
        """The text that follows a context at once."""
        return encode_after(self.tokenizer, end, turn.references[0])

    def footer(self, turn: Turn) -> list[int]:
        """From the last word of the question to the answer's first token."""
        footer = self._texts.footer
        return encode_after(self.tokenizer, turn.question, footer) + encode_after(
            self.tokenizer, footer, turn.answer_prefix
        )

    def follow_up(self, turn: Turn) -> list[int]:
        """A question behind the answer to an earlier one, up to its answer's first token."""
        between = self._texts.between
        ids = encode_after(self.tokenizer, "\n", between)
        return ids + self.question(between, turn)

    def reference(self, turn: Turn) -> list[int]:
        """The first right answer, as the model would say it after the answer's beginning."""
        before = turn.answer_prefix or self._texts.footer
        spaced = turn.answer_prefix and not turn.answer_prefix[-1].isspace()
        return encode_after(self.tokenizer, before, (" " if spaced else "") + turn.references[0])

    def needles(self, context: Context, turn: Turn) -> list[int]:
        """Positions of what the answer hangs on, among the context's tokens."""
        return [context.offset + at for start, end in turn.needles for at in range(start, end)]

    def repeat_prompt(self) -> RepeatPrompt:
        """Asks for the repetition of a context, for policies that judge by it."""
        return RepeatPrompt.of(self.tokenizer, self._texts.footer)
