"""From a recipe to samples: what all generated tasks have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.errors import TaskError
from kvkeep.tasks.draws import Draws
from kvkeep.tasks.fitting import CharSpan, Fitted, Recipe, TokenCounter, TooShort, fit, token_span
from kvkeep.tasks.protocols import Sample, Tokenizer

RecipeOf = Callable[[TokenCounter, Draws], Recipe]


@dataclass(frozen=True)
class Passage:
    """Text with things put into it.

    Attributes:
        text: all of it.
        spans: of the characters of what was put in, in the order in which it was given.
    """

    text: str
    spans: tuple[CharSpan, ...]

    def after(self, text: str) -> Passage:
        """The same with a text in front."""
        shift = len(text)
        return Passage(text + self.text, tuple((start + shift, end + shift) for start, end in self.spans))


def weave(units: Sequence[str], inserted: Sequence[str], places: Sequence[int], separator: str) -> Passage:
    """Put each inserted text before the unit at its place; those of one place stay in their order."""
    spans: list[CharSpan] = [(0, 0)] * len(inserted)
    pieces: list[str] = []
    at = done = 0

    def append(piece: str) -> None:
        nonlocal at
        at += len(piece) + (len(separator) if pieces else 0)
        pieces.append(piece)

    for which in sorted(range(len(inserted)), key=lambda index: places[index]):
        if done < places[which]:
            append(separator.join(units[done : places[which]]))
            done = places[which]
        append(inserted[which])
        spans[which] = (at - len(inserted[which]), at)
    if done < len(units):
        append(separator.join(units[done:]))
    return Passage(separator.join(pieces), tuple(spans))


def generate(
    name: str,
    recipe: RecipeOf,
    tokenizer: Tokenizer,
    *,
    length: int,
    count: int,
    seed: int,
    first: int,
    provider: str,
    options: tuple[tuple[str, str | int | float], ...] = (),
) -> Iterator[Sample]:
    """Samples of a task, each as long as it may be.

    Args:
        name: of the task.
        recipe: makes a row from its randomness.
        tokenizer: counts tokens.
        length: see `Task.samples`.
        count: see `Task.samples`.
        seed: see `Task.samples`.
        first: see `Task.samples`.
        provider: where texts come from.
        options: of all samples, in front of their own.

    Raises:
        TaskError: the length is too small (the error names the least one), or a number makes no sense.
    """
    for what, value, least in (("length", length, 1), ("count", count, 0), ("first", first, 0)):
        _check_number(what, value, least)
    counter = TokenCounter(tokenizer)

    def samples() -> Iterator[Sample]:
        for index in range(first, first + count):
            draws = Draws(name, length, seed, index)
            try:
                row = fit(recipe(counter, draws), counter, length)
            except TooShort:
                raise _too_short(name, recipe, counter, draws, range(first, first + count)) from None
            yield _sample(draws, row, provider, options)

    return samples()


def _sample(draws: Draws, row: Fitted, provider: str, options: tuple[tuple[str, str | int | float], ...]) -> Sample:
    turns = tuple(
        replace(turn, needles=tuple(token_span(row.offsets, span) for span in spans))
        for turn, spans in zip(row.draft.turns, row.draft.needles, strict=True)
    )
    return Sample(
        task=draws.task,
        index=draws.index,
        context=row.draft.context,
        turns=turns,
        length=draws.length,
        seed=draws.seed,
        provider=provider,
        options=options + row.draft.options,
    )


def _too_short(name: str, recipe: RecipeOf, counter: TokenCounter, draws: Draws, rows: range) -> TaskError:
    """Names a length at which all of the rows can be made; rows of another length are other rows."""
    needed = draws.length
    for _ in range(20):
        if (least := max(_least(recipe, counter, replace(draws, length=needed, index=i)) for i in rows)) <= needed:
            break
        needed = least
    return TaskError(
        expected=f"a length of at least {needed} tokens for {name}",
        received=f"{draws.length}",
        remedy="ask for more tokens; those of the question and of the answer count too",
    )


def _least(recipe: RecipeOf, counter: TokenCounter, draws: Draws) -> int:
    made = recipe(counter, draws)
    draft = made.build(made.least)
    return len(counter.offsets(draft.context)) + counter.of_turns(draft.context, draft.turns)


def _check_number(what: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TaskError(
            expected=f"{what} as a whole number of at least {least}",
            received=repr(value),
            remedy="lengths are in tokens; samples are counted from 0",
        )
