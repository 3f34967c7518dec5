"""What a turn is made of: the pieces of the chat template, their tokens, and what may be said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvkeep.errors import CacheStateError, UnsupportedError

_CONTENT = "<<kvkeep-content-of-the-turn>>"
_ANSWER = "<<kvkeep-answer>>"

# Characters before a joint that can matter to the tokens behind it: longer than any special token in use.
JOINT = 64


@dataclass(frozen=True)
class TurnTexts:
    """A chat template, split around what people and the model say.

    Attributes:
        header: before the first user's words, a default system prompt included.
        footer: from the user's last word to the model's first.
        between: from the model's last word to the next user's first.
    """

    header: str
    footer: str
    between: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> TurnTexts:
        """Split a tokenizer's template; a tokenizer without one gives plain text with line breaks.

        Raises:
            UnsupportedError: a template that changes or repeats the words, or one without a system role.
        """
        if not getattr(tokenizer, "chat_template", None):
            return cls(header=f"{system}\n\n" if system else "", footer="\n", between="\n")
        needs = "a chat template that writes each message once, as it is"
        if not system:
            return cls._split(tokenizer, [], needs)
        without = cls._split(tokenizer, [], needs)
        needs = "a chat template with a system role, since system= was given"
        texts = cls._split(tokenizer, [{"role": "system", "content": system}], needs)
        if texts.header == without.header and system.strip() not in texts.header:
            raise _refused(tokenizer, needs, "leaves the system message out")
        return texts

    @classmethod
    def _split(cls, tokenizer: PreTrainedTokenizerBase, start: list[dict[str, str]], needs: str) -> TurnTexts:
        user = {"role": "user", "content": _CONTENT}
        turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}, user]
        write: Any = tokenizer.apply_chat_template
        try:
            first = str(write([*start, user], tokenize=False, add_generation_prompt=True))
            both = str(write([*start, *turns], tokenize=False))
        except ImportError:
            raise
        except Exception as error:  # templates raise what they like: Jinja's errors, or Python's within them
            raise _refused(tokenizer, needs, f"fails with {type(error).__name__}: {error}") from error
        rest = both.partition(_ANSWER)[2]
        counts = first.count(_CONTENT), both.count(_CONTENT), both.count(_ANSWER), rest.count(_CONTENT)
        if counts != (1, 1, 1, 1):
            raise _refused(tokenizer, needs, "changes, drops or repeats them")
        header, _, footer = first.partition(_CONTENT)
        return cls(header, footer, between=rest.partition(_CONTENT)[0])


def encode_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Tokens of a text in its place, where a tokenizer of the SentencePiece family puts no space of its own.

    The text is tokenised together with what stands before it, and the tokens of that are cut off. Where the two share
    a token, which the model has seen the first half of, a line break stands in; where that fails too, nothing does.

    Args:
        tokenizer: writes no special tokens of its own here.
        before: what stands before, or the end of it; empty for the very first text.
        text: to be tokenised.
    """

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False)["input_ids"]) if words else []

    for anchor in (before[-JOINT:], "\n") if before else ():
        known, both = encode(anchor), encode(anchor + text)
        if both[: len(known)] == known:
            return both[len(known) :]
    return encode(text)


def check_words(what: str, text: Any) -> None:
    """Refuse what is no string, or an empty one."""
    if not isinstance(text, str) or not text:
        raise CacheStateError(
            expected=f"{what}, as a string",
            received="an empty string" if text == "" else f"{type(text).__name__} {text!r}"[:80],
            remedy="pass some words; where there is no text, leave ingest out and ask at once",
        )


def _refused(tokenizer: PreTrainedTokenizerBase, needs: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        expected=needs,
        received=f"that of {type(tokenizer).__name__}, which {what}",
        remedy="use a tokenizer without one (chat_template = None: plain text), or KeepCache with model.generate",
    )
