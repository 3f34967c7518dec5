"""What a forward brings, read and checked before any layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.errors import BudgetError, CacheStateError, UnsupportedError
from kvkeep.hf.progress import Progress
from kvkeep.hf.spans import Span


@dataclass(frozen=True, eq=False)
class NewTokens:
    """The new tokens of a forward.

    Attributes:
        positions: `[B, q]` their logical positions.
        valid: `[B, q]` false at padding, None if there is none.
        lengths: logical length of each row when they have been processed.
    """

    positions: Tensor
    valid: Tensor | None
    lengths: list[int]


def read_tokens(
    progress: Progress,
    shape: tuple[int, int],
    mask: Tensor | None,
    position_ids: Tensor | None,
    switch: int | None,
) -> NewTokens:
    """Read the arguments of a forward, and refuse what would not go on from what the cache has seen.

    Args:
        progress: what the cache has seen.
        shape: rows and columns of the input.
        mask: `[B, seen + q]`, false at padding; None if there is none.
        position_ids: `[B, q]` or `[1, q]`, where the caller gives them.
        switch: the length at which the model changes its rotary frequencies; see `rope_switch`.

    Returns:
        The new tokens, on the CPU.

    Raises:
        CacheStateError: an empty input.
        UnsupportedError: another number of rows, a mask or positions that do not fit, or a text across the switch.
    """
    rows, new = shape
    if new == 0 or rows == 0:
        raise CacheStateError(
            expected="at least one new token", received=f"an input of shape {shape}", remedy="pass a non-empty text"
        )
    if progress.lengths and rows != len(progress.lengths):
        raise UnsupportedError(
            expected=f"{len(progress.lengths)} rows, as the cache holds",
            received=f"{rows}",
            remedy="for beams or several return sequences pass a fresh cache",
        )
    before = progress.lengths or [0] * rows
    valid = None if mask is None else _new_columns(mask, progress.columns, before, new)
    steps = torch.ones(rows, new, dtype=torch.long) if valid is None else valid.cpu().long()
    positions = (torch.tensor(before)[:, None] + steps.cumsum(1) - 1).clamp(min=0)
    after = [length + int(count) for length, count in zip(before, steps.sum(1).tolist(), strict=True)]
    _check_positions(position_ids, positions, steps, progress.columns)
    _check_switch(switch, progress.columns, progress.columns + new)
    _check_switch(switch, max(before), max(after))
    return NewTokens(positions, valid, after)


def _new_columns(mask: Tensor, seen: int, before: list[int], new: int) -> Tensor | None:
    """`[B, new]` which of the new tokens are no padding; None if all are."""
    if tuple(mask.shape) != (len(before), seen + new):
        raise UnsupportedError(
            expected=f"an attention mask of shape {(len(before), seen + new)}: tokens seen and new ones",
            received=f"{tuple(mask.shape)}",
            remedy="pass the mask of the whole text, the part that is cached included",
        )
    mask = mask.bool()
    if seen and mask[:, :seen].sum(1).tolist() != before:
        raise UnsupportedError(
            expected="a mask that agrees with the tokens in the cache",
            received="one that hides or shows tokens which were seen otherwise",
            remedy="pass the mask of the prompt with ones for what followed",
        )
    fresh = mask[:, seen:]
    return None if bool(fresh.all()) else fresh


def _check_positions(position_ids: Tensor | None, positions: Tensor, steps: Tensor, seen: int) -> None:
    """Positions must follow the logical length, or the column where padding counts; anything else is refused."""
    if position_ids is None or (position_ids.device.type != "cpu" and steps.shape[1] == 1):
        return  # no synchronisation with a device at every step of a generation
    given = position_ids.cpu()
    if given.ndim != 2 or given.shape[1] != steps.shape[1] or given.shape[0] not in (1, steps.shape[0]):
        raise UnsupportedError(
            expected=f"position_ids of shape {tuple(steps.shape)}",
            received=f"{tuple(given.shape)}",
            remedy="leave position_ids out",
        )
    real = steps.bool()
    columns = (seen + torch.arange(steps.shape[1]))[None].expand_as(steps)
    given = given.expand_as(steps)
    if not (torch.equal(given[real], positions[real]) or torch.equal(given[real], columns[real])):
        raise UnsupportedError(
            expected=f"positions that go on from the {seen} tokens seen",
            received=f"{given[0, :4].tolist()}...",
            remedy="pass new tokens only, without position_ids (a text that the cache has seen wants a fresh "
            "cache); packed sequences are not supported",
        )


def _check_switch(switch: int | None, before: int, after: int) -> None:
    """Keys in the cache have one set of frequencies: all of a text stands on one side of the switch."""
    if switch is not None and before <= switch <= after and (before or after == switch):
        raise UnsupportedError(
            expected=f"a text of fewer than {switch} tokens, answer included, or a prompt of more in one forward",
            received=f"{after - before} tokens after {before}",
            remedy="this model changes its rotary frequencies at that length (longrope), and the cached keys with "
            "them; shorten the text or the answer",
        )


def check_ids(ids: Tensor | None, known: int, seen: int) -> None:
    """Refuse a forward of a text that could not be repeated later, since not all of it was given as tokens.

    Args:
        ids: the new tokens; None where embeddings came instead.
        known: columns whose tokens are known.
        seen: columns that the cache has seen.

    Raises:
        UnsupportedError: see above.
    """
    if ids is not None and known == seen:
        return
    raise UnsupportedError(
        expected="input_ids, from the first token of the text on: this policy makes the model repeat them",
        received="inputs_embeds" if ids is None else f"{seen} tokens before, of which {known} are known",
        remedy="pass input_ids, or use a policy without a second pass, such as snapkv or expected-attention",
    )


def question_spans(question: Span | None, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Positions of the question in each row, none where it is hidden.

    Args:
        question: `(start, end)` as in a slice; None where it is hidden.
        lengths: logical length of each row.

    Raises:
        BudgetError: the span is empty in a row, or lies outside of it.
    """
    if question is None:
        return []
    spans = []
    for length in lengths:
        start, end, _ = slice(*question).indices(length)
        outside = any(at is not None and not -length <= at <= length for at in question)
        if outside or start >= end:
            raise BudgetError(
                expected=f"a question within the {length} tokens of each row, as (start, end)",
                received=f"question={question}",
                remedy="count from the end for rows of different length, such as question=(-12, None)",
            )
        spans.append((start, end))
    return spans
