"""Documents cut into pieces of so many tokens, for what reads real text and asks no questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvkeep.tasks.text import Message


def cut_pieces(documents: Sequence[Message], tokenizer: Any, *, length: int, count: int) -> Iterator[list[int]]:
    """Texts of `length` tokens, from as many documents as possible; without the tokenizer's special tokens.

    First the beginnings of documents that lie evenly spread, then those of the others, then what follows in each.

    Args:
        documents: in an order that means something, such as time.
        tokenizer: makes tokens of them.
        length: tokens of a text; the rest of a document that is shorter is left out.
        count: texts, at most.
    """
    for _, piece in cut_documents(documents, tokenizer, length=length, count=count):
        yield piece


def cut_documents(
    documents: Sequence[Message], tokenizer: Any, *, length: int, count: int
) -> Iterator[tuple[Message, list[int]]]:
    """The same, each with the document that it is of."""
    spread = sorted({index * len(documents) // count for index in range(count)}) if documents else []
    order = [*spread, *sorted(set(range(len(documents))) - set(spread))]
    tokens: dict[int, list[int]] = {}
    start, found = 0, 0
    while order:
        longer = []
        for index in order:
            if found == count:
                return
            if index not in tokens:
                tokens[index] = list(tokenizer(documents[index].text, add_special_tokens=False)["input_ids"])
            piece = tokens[index][start : start + length]
            if len(piece) < length:
                continue
            longer.append(index)
            found += 1
            yield documents[index], piece
        order, start = longer, start + length


def beginning(tokenizer: Any) -> list[int]:
    """The special tokens that a text begins with, if the tokenizer puts some there."""
    first = tokenizer.bos_token_id
    given = tokenizer("a")["input_ids"]
    return [first] if first is not None and given and given[0] == first else []
