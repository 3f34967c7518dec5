"""Running text of a haystack with facts between its sentences; one word is the unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvkeep.tasks.fitting import Costs, TokenCounter
from kvkeep.tasks.generating import Passage, weave
from kvkeep.tasks.text import Haystack

# From the gaps between sentences and the number of words, the gap for each fact.
Choose = Callable[[Sequence[int], int], Sequence[int]]


class Prose:
    """A haystack from some sentence on.

    Args:
        haystack: the text.
        start: index of the word to begin with.
        counter: counts tokens.
    """

    def __init__(self, haystack: Haystack, start: int, counter: TokenCounter) -> None:
        self.haystack = haystack
        self._start = start
        self._costs = Costs(lambda low, high: counter.counts([f" {word}" for word in self._words(low, high)]))

    def _words(self, low: int, high: int) -> list[str]:
        return self.haystack.window(self._start + low, high - low)[0]

    def least(self, gaps: int) -> int:
        """Words that have so many gaps for facts: so many sentences, for one gap more."""
        size = 16
        while True:
            found = self.haystack.window(self._start, size)[1]
            if len(found) > gaps + 1:  # the last one may stand in the midst of a sentence
                return found[gaps]
            size *= 2

    def cost(self, words: int) -> int:
        """Tokens of the first so many words."""
        return self._costs.upto(words)

    def words_for(self, tokens: int) -> int:
        """How many words so many tokens suffice for."""
        return max(0, bisect_right(range(max(0, tokens) + 1), tokens, key=self.cost) - 1)

    def words(self, count: int) -> list[str]:
        """The first so many words."""
        return self._words(0, count)

    def sentences(self, count: int) -> list[list[str]]:
        """The whole sentences among the first so many words."""
        words, gaps = self.haystack.window(self._start, count)
        return [words[low:high] for low, high in pairwise(gaps[:-1])]

    def passage(self, count: int, facts: Sequence[str], choose: Choose) -> Passage:
        """The first so many words, with the facts in gaps between sentences."""
        words, gaps = self.haystack.window(self._start, count)
        return weave(words, facts, choose(gaps, count), " ")
