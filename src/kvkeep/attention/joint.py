"""One softmax over pieces of entries that lie apart: what the faster paths share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.store.tail import Tail

# Scores of at most this many (query, entry) pairs exist at once.
_BLOCK_ELEMENTS = 2**24


@dataclass(frozen=True, eq=False)
class Piece:
    """Some entries of one cell, or of C cells where all shapes begin with C.

    Attributes:
        keys: `[n, D]`.
        values: `[n, D]`.
        hidden: `[1, q or 1, n]` true where a query must not look; None where each sees everything.
    """

    keys: Tensor
    values: Tensor
    hidden: Tensor | None


def scaled(query: Tensor, scaling: float) -> Tensor:
    """The query times the scaling, in at least float32.

    Half precision does not do for the scores: in float16 a large key overflows, in bfloat16 a score of 60 is off by up
    to an eighth.
    """
    return query.to(torch.promote_types(query.dtype, torch.float32)) * scaling


def attend_pieces(query: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Attention of a cell's queries over its entries, in the type of the queries.

    Args:
        query: `[G, q, D]`, or `[C, G, q, D]` for C cells; from `scaled`.
        pieces: the entries; no piece is empty.

    Returns:
        `[G, q, D]` or `[C, G, q, D]`; zeros for a query that sees nothing.
    """
    *cells, group, count, size = query.shape
    flat = query.reshape(*cells, group * count, size)
    scores = []
    for piece in pieces:
        score = flat @ piece.keys.to(query.dtype).transpose(-2, -1)
        if piece.hidden is not None:
            score.view(*cells, group, count, -1).masked_fill_(piece.hidden, -torch.inf)
        scores.append(score)
    weights = torch.cat(scores, dim=-1).softmax(-1)
    output, start = None, 0
    for piece in pieces:
        end = start + piece.keys.shape[-2]
        part = weights[..., start:end] @ piece.values.to(query.dtype)
        output, start = part if output is None else output + part, end
    if output is None:
        raise RuntimeError("attention over nothing")
    output = output.view(*cells, group, count, -1)
    blind = _sees_nothing(pieces)
    return output if blind is None else output.masked_fill(blind, 0)


def _sees_nothing(pieces: Sequence[Piece]) -> Tensor | None:
    """True `[1, q or 1, 1]` for a query that sees nothing; None where each sees something."""
    blind = None
    for piece in pieces:
        if piece.hidden is None:
            return None
        all_hidden = piece.hidden.all(-1, keepdim=True)
        blind = all_hidden if blind is None else blind & all_hidden
    return blind


def query_blocks(count: int, pairs: int) -> Iterator[slice]:
    """Slices of `count` queries, so that no more scores exist at once than fit.

    Args:
        count: queries of one head.
        pairs: scores for each of them, over all heads that are computed together.
    """
    step = max(1, _BLOCK_ELEMENTS // pairs)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def visible_columns(tail: Tail, block: slice, count: int) -> tuple[int, Tensor | None]:
    """What a block of the newest queries sees of the tail.

    Args:
        tail: their own keys are its last columns.
        block: of the queries.
        count: queries in all.

    Returns:
        How many columns some query of the block sees, the rest being the future or slack; and
        `[B or 1, 1, q or 1, columns]` true where a query must not look, None where each sees all of them.
    """
    queries = block.stop - block.start
    columns = tail.length - count + block.stop
    hidden = None
    if queries > 1:
        places = torch.arange(columns, device=tail.keys.device)
        hidden = (places > places[columns - queries :, None])[None, None]
    if tail.valid is not None:
        padding = ~tail.valid[:, None, None, :columns]
        hidden = padding if hidden is None else hidden | padding
    return columns, hidden


def tail_of(tail: Tail | None, count: int) -> Tail:
    """The tail, which must have the keys of `count` queries."""
    if tail is None or tail.length < count:
        raise RuntimeError("queries come after their own keys have been appended to the layer")
    return tail
