"""Makes a row as long as it may be: units are added to it until the next one would not fit.

A recipe can make its row with any number of units (words, lines, documents) and estimates what they cost. The row is
tokenised as a whole only to verify an estimate; what that teaches corrects the next one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvkeep.errors import TaskError
from kvkeep.tasks.protocols import Tokenizer, Turn

CharSpan = tuple[int, int]
Offsets = Sequence[tuple[int, int]]

_TRIES = 16  # sizes that are tried before the largest one that fitted is taken


@dataclass(frozen=True)
class Draft:
    """A row before its tokens are known.

    Attributes:
        context: the text.
        turns: without needles.
        needles: for each turn, spans of the context's characters.
        options: of the sample.
    """

    context: str
    turns: tuple[Turn, ...]
    needles: tuple[tuple[CharSpan, ...], ...]
    options: tuple[tuple[str, str | int | float], ...] = ()


class Recipe(Protocol):
    """A row that can be made in many sizes. What it draws at random does not depend on the sizes that were tried."""

    @property
    def least(self) -> int:
        """The smallest number of units."""
        ...

    @property
    def most(self) -> int | None:
        """The largest number of units; None if there is no end to them."""
        ...

    def cost(self, units: int) -> int:
        """About how many tokens the units take, without what else is in the row; never falls as units grow."""
        ...

    def build(self, units: int) -> Draft:
        """The row with so many units."""
        ...


@dataclass(frozen=True)
class Fitted:
    """A row whose tokens are known.

    Attributes:
        draft: the row.
        units: in it.
        offsets: of the context's tokens, in characters.
        total: tokens of context, questions and prefixes, and those that may be generated.
    """

    draft: Draft
    units: int
    offsets: Offsets
    total: int


class TooShort(Exception):
    """The smallest row does not fit; `needed` tokens would do."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class TokenCounter:
    """Counts tokens, without special ones. Remembers short texts, of which rows are made.

    Args:
        tokenizer: a fast one, which tells where its tokens stand.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, int] = {}

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text on its own."""
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if new:
            batch = self._tokenizer(new, add_special_tokens=False, verbose=False)  # type: ignore[arg-type]
            self._known.update((text, len(ids)) for text, ids in zip(new, batch["input_ids"], strict=True))
        return [self._known[text] for text in texts]

    def count(self, text: str) -> int:
        """Tokens of a text on its own."""
        return self.counts([text])[0]

    def of_turns(self, context: str, turns: Sequence[Turn]) -> int:
        """Tokens that follow the context, answers included: those of the longest chain of turns.

        As plain text without a chat template: each answer stands in a line of its own, and so does each question that
        follows one.
        """
        gap = context[len(context.rstrip()) :]
        longest = chain = 0
        for turn in turns:
            own = self._behind("\n" if turn.continues else gap, turn.question) + turn.max_new_tokens
            own += self.count(f"\n{turn.answer_prefix}")
            chain = own + (chain + self.count("\n") if turn.continues else 0)
            longest = max(longest, chain)
        return longest

    def _behind(self, gap: str, text: str) -> int:
        """Tokens that a text adds behind white space, which may fall into other tokens once something follows it."""
        return max(self.count(text), self.count(gap + text) - self.count(gap)) if gap else self.count(text)

    def offsets(self, text: str) -> Offsets:
        """See `token_offsets`."""
        return token_offsets(self._tokenizer, text)


def token_offsets(tokenizer: Tokenizer, text: str) -> Offsets:
    """Where each token stands in the text; none of them is a special one.

    Raises:
        TaskError: a tokenizer that does not tell.
    """
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets: Offsets = encoded["offset_mapping"]
    except (NotImplementedError, KeyError, TypeError) as error:
        raise TaskError(
            expected="a fast tokenizer, which tells where its tokens stand in the text",
            received=f"{type(tokenizer).__name__}, which does not ({type(error).__name__})",
            remedy="load the tokenizer with AutoTokenizer.from_pretrained(..., use_fast=True)",
        ) from error
    return offsets


def token_span(offsets: Offsets, span: CharSpan) -> tuple[int, int]:
    """The tokens that cover a span of characters, from the first one up to but not including the last.

    Raises:
        TaskError: no tokens cover it.
    """
    start, end = span
    first = bisect_right(offsets, start, key=lambda token: token[1])
    last = bisect_left(offsets, end, key=lambda token: token[0])
    if first >= last or offsets[first][0] > start or offsets[last - 1][1] < end:
        raise TaskError(
            expected="a tokenizer whose tokens cover the text that they stand for",
            received=f"none for the characters {start} to {end}",
            remedy="use another tokenizer",
        )
    return first, last


class Costs:
    """Running totals of what units cost, made as far as they are asked for.

    Args:
        of: what the units from the first index up to but not including the second cost.
    """

    def __init__(self, of: Callable[[int, int], Sequence[int]]) -> None:
        self._of = of
        self._totals = [0]

    def upto(self, units: int) -> int:
        """Cost of the first so many units."""
        while (known := len(self._totals) - 1) < units:
            for cost in self._of(known, max(units, known + 128)):
                self._totals.append(self._totals[-1] + cost)
        return self._totals[units]


def fit(recipe: Recipe, counter: TokenCounter, length: int) -> Fitted:
    """The row that is at most `length` tokens long, and would not be so with one more unit.

    Raises:
        TooShort: not even the smallest row fits.
        TaskError: all units together do not fill the length.
    """

    def made(units: int) -> Fitted:
        draft = recipe.build(units)
        offsets = counter.offsets(draft.context)
        return Fitted(draft, units, offsets, len(offsets) + counter.of_turns(draft.context, draft.turns))

    best = row = made(recipe.least)
    if row.total > length:
        raise TooShort(row.total)
    tried = {row.units}
    for _ in range(_TRIES):
        units = _largest(recipe, length - (row.total - recipe.cost(row.units)), length)
        if units in tried:  # the same one again: nothing more to learn
            break
        row = made(units)
        tried.add(units)
        if row.total <= length and row.units > best.units:
            best = row
    if units != best.units:  # estimates went round in a circle
        best = _grow(best, made, recipe.most, length)
    if recipe.most is not None and best.units >= recipe.most and best.total < length:
        raise TaskError(
            expected=f"enough text for {length} tokens",
            received=f"{best.total} tokens with all of it in",
            remedy=f"ask for at most {best.total} tokens, or pass more text",
        )
    return best


def _grow(best: Fitted, made: Callable[[int], Fitted], most: int | None, length: int) -> Fitted:
    for _ in range(_TRIES):
        if most is not None and best.units >= most:
            break
        row = made(best.units + 1)
        if row.total > length:
            break
        best = row
    return best


def _largest(recipe: Recipe, tokens: int, length: int) -> int:
    """The largest number of units that cost at most so many tokens."""
    limit = recipe.least + length  # a unit has a token at least; without a limit, one of none would run for ever
    if recipe.most is not None:
        limit = min(limit, recipe.most)
    low, high = recipe.least, min(limit, recipe.least + 16)
    while high < limit and (cost := recipe.cost(high)) <= tokens:
        # A little further than those so far make likely; far too many would have to be drawn and tokenised too.
        likely = high * tokens // max(1, cost)
        low, high = high, min(limit, max(likely, high) + high // 32 + 4)
    return max(low, bisect_right(range(high + 1), tokens, lo=low, key=recipe.cost) - 1)
