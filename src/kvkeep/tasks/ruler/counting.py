"""RULER's two counting tasks: the ten common words of a list, and the three frequent ones of a coded text.

Hsieh et al. 2024 (arXiv 2404.06654), section 3. Their answers hang on the whole context, so that they have no needles.
Deviations: no word of a list is part of a common one or the other way round, since answers are found as substrings; a
coded text grows by one word at a time, and is never so short that ranks tie.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import pi
from random import Random
from string import ascii_lowercase
from typing import ClassVar

from kvkeep.tasks.draws import Distinct, Draws, adjectives, made_up_word, nouns
from kvkeep.tasks.fitting import Costs, Draft, TokenCounter
from kvkeep.tasks.generating import RecipeOf
from kvkeep.tasks.protocols import Turn
from kvkeep.tasks.ruler.worded import WordedTask
from kvkeep.tasks.ruler.wording import Frame, Wording

COMMON = 10
CWE_MAX_NEW_TOKENS = 120
FWE_MAX_NEW_TOKENS = 50
LONG = 4096  # from this length on, words come as often as in RULER's long rows

_ZETA_2 = pi**2 / 6
_CODE_LETTERS = 6
_NO_TIES_FROM = 74  # scale from which the ranks 4 and 5, and so all before them, differ by one occurrence at least


@dataclass(frozen=True)
class RulerCwe(WordedTask):
    """Common words extraction."""

    name: ClassVar[str] = "ruler/cwe"

    def _recipe(self, words: Wording) -> RecipeOf:
        return lambda counter, draws: _CommonRow(counter, draws, words.common)


@dataclass(frozen=True)
class RulerFwe(WordedTask):
    """Frequent words extraction."""

    name: ClassVar[str] = "ruler/fwe"

    def _recipe(self, words: Wording) -> RecipeOf:
        return lambda counter, draws: _FrequentRow(counter, draws, words.frequent)


class _Words:
    """Different words, the first ten of which are the common ones: English ones, then made-up ones.

    Args:
        rng: draws them.
        avoid: words that none of them may be part of, nor have as a part.
    """

    def __init__(self, rng: Random, avoid: Sequence[str] = ()) -> None:
        self._rng = rng
        self._apart = list(avoid)
        self._english = [*adjectives(), *nouns()]
        rng.shuffle(self._english)
        self._drawn: list[str] = []
        self._known: set[str] = set()

    def upto(self, count: int) -> list[str]:
        """The first so many."""
        while len(self._drawn) < count:
            word = self._english.pop() if self._english else made_up_word(self._rng)
            if word in self._known or any(other in word or word in other for other in self._apart):
                continue
            self._drawn.append(word)
            self._known.add(word)
            if len(self._drawn) <= COMMON:
                self._apart.append(word)
        return self._drawn[:count]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class _CommonRow:
    """The recipe of a row; one more word that is not common is the unit."""

    most = None
    least = 1

    def __init__(self, counter: TokenCounter, draws: Draws, frame: Frame) -> None:
        self._draws, self._frame, self._counter = draws, frame, counter
        long = draws.length >= LONG
        self._often, self._seldom = (30, 3) if long else (6, 1)
        self._words = _Words(draws.stream("words"))
        common = self._words.upto(COMMON)
        example = _Words(draws.stream("example"), common).upto(40 if long else 20)
        listed = self._shuffled(example, *((10, 3) if long else (3, 1)), draws.stream("example order"))
        solved = f"{frame.question} {frame.prefix} {_numbered(example[:COMMON])}"
        self._before = f"{frame.intro}{_numbered(listed)}{frame.gap}{solved}\n{frame.intro}"
        self._turn = Turn(
            question=frame.question,
            references=tuple(common),
            metric="match_all",
            max_new_tokens=CWE_MAX_NEW_TOKENS,
            answer_prefix=frame.prefix,
        )
        self._costs = Costs(self._costs_of)

    @staticmethod
    def _shuffled(words: Sequence[str], often: int, seldom: int, rng: Random) -> list[str]:
        listed = list(words[:COMMON]) * often + list(words[COMMON:]) * seldom
        rng.shuffle(listed)
        return listed

    def _costs_of(self, low: int, high: int) -> list[int]:
        words = self._counter.counts([f" {word}" for word in self._words.upto(COMMON + high)[COMMON + low :]])
        start = COMMON * self._often + self._seldom * low
        numbers = self._counter.counts([f" {start + place + 1}." for place in range(self._seldom * (high - low))])
        each = [sum(numbers[at : at + self._seldom]) for at in range(0, len(numbers), self._seldom)]
        return [self._seldom * word + number for word, number in zip(words, each, strict=True)]

    def cost(self, units: int) -> int:
        return self._costs.upto(units)

    def build(self, units: int) -> Draft:
        words = self._words.upto(COMMON + units)
        listed = self._shuffled(words, self._often, self._seldom, self._draws.stream("order"))
        return Draft(f"{self._before}{_numbered(listed)}{self._frame.gap}", (self._turn,), ((),))


class _FrequentRow:
    """The recipe of a row; one occurrence of a coded word is the unit.

    At the scale W, the word of rank k comes floor(W / (zeta(2) k^2)) times. As W grows, occurrences are added one by
    one; the first units of a row are those at its smallest scale.
    """

    most = None

    def __init__(self, counter: TokenCounter, draws: Draws, frame: Frame) -> None:
        self._draws, self._frame, self._counter = draws, frame, counter
        self._next: list[tuple[float, int, int]] = [(_ZETA_2, 1, 1)]  # scale, rank, which occurrence
        self._ranks: list[int] = []
        self._scales: list[float] = []
        self._vocabulary = ["..."]  # the most frequent word of all, which is not asked for
        self._distinct = Distinct(draws.stream("vocabulary"))
        self.least = self._until(_NO_TIES_FROM)
        self._turn = Turn(
            question=frame.question,
            references=tuple(self._word(rank) for rank in (2, 3, 4)),
            metric="match_all",
            max_new_tokens=FWE_MAX_NEW_TOKENS,
            answer_prefix=frame.prefix,
        )
        self._costs = Costs(
            lambda low, high: counter.counts([f" {self._word(rank)}" for rank in self._upto(high)[low:]])
        )

    def _until(self, scale: float) -> int:
        """How many occurrences there are at a scale."""
        while not self._scales or self._scales[-1] <= scale:
            self._grow()
        return bisect_right(self._scales, scale)

    def _upto(self, occurrences: int) -> list[int]:
        """The ranks of the first so many occurrences."""
        while len(self._ranks) < occurrences:
            self._grow()
        return self._ranks[:occurrences]

    def _grow(self) -> None:
        scale, rank, which = heappop(self._next)
        self._scales.append(scale)
        self._ranks.append(rank)
        heappush(self._next, ((which + 1) * _ZETA_2 * rank**2, rank, which + 1))
        if which == 1:
            heappush(self._next, (_ZETA_2 * (rank + 1) ** 2, rank + 1, 1))

    def _word(self, rank: int) -> str:
        while len(self._vocabulary) < rank:
            self._vocabulary.append(self._distinct.draw(_coded_word))
        return self._vocabulary[rank - 1]

    def cost(self, units: int) -> int:
        return self._costs.upto(units)

    def build(self, units: int) -> Draft:
        words = [self._word(rank) for rank in self._upto(units)]
        self._draws.stream("order").shuffle(words)
        return Draft(f"{self._frame.intro}{' '.join(words)}{self._frame.gap}", (self._turn,), ((),))


def _coded_word(rng: Random) -> str:
    return "".join(rng.choices(ascii_lowercase, k=_CODE_LETTERS))
