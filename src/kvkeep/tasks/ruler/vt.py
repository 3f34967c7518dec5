"""RULER's variable tracking: a chain of assignments in noise; which variables end up with its number?

Hsieh et al. 2024 (arXiv 2404.06654), section 3. As there, a solved example comes first, shorter here where the row is
shorter than 4,096 tokens. Its names and its number are of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from string import ascii_uppercase
from typing import ClassVar

from kvkeep.tasks.draws import Distinct, Draws
from kvkeep.tasks.fitting import Costs, Draft, TokenCounter
from kvkeep.tasks.generating import Passage, RecipeOf, weave
from kvkeep.tasks.protocols import Turn
from kvkeep.tasks.ruler.worded import WordedTask
from kvkeep.tasks.ruler.wording import Wording

HOPS = 4
MAX_NEW_TOKENS = 30
LONG = 4096  # from this length on, the example is as long as RULER's
_EXAMPLE_LINES, _SHORT_EXAMPLE_LINES = 14, 6


@dataclass(frozen=True)
class RulerVt(WordedTask):
    """The task. Needles are the lines of the chain, in the order of the references."""

    name: ClassVar[str] = "ruler/vt"

    def _recipe(self, words: Wording) -> RecipeOf:
        return lambda counter, draws: _Row(counter, draws, words)


class _Chain:
    """A number, the variables that have it, and the lines that say so."""

    def __init__(self, distinct: Distinct, letters: int, words: Wording) -> None:
        def name(rng: Random) -> str:
            return "".join(rng.choices(ascii_uppercase, k=letters))

        self.value = distinct.draw(lambda rng: str(rng.randrange(10_000, 100_000)))
        self.names = [distinct.draw(name) for _ in range(HOPS + 1)]
        copies = zip(self.names[1:], self.names, strict=False)
        self.lines = [
            words.assign.format(name=self.names[0], value=self.value),
            *(words.copy.format(name=later, source=earlier) for later, earlier in copies),
        ]
        fields = {"value": self.value, "count": HOPS + 1}
        self.question = words.variables.question.format(**fields)
        self.prefix = words.variables.prefix.format(**fields)

    def among(self, noise: str, lines: int, rng: Random) -> Passage:
        """The chain in its order, among so many lines of noise."""
        return weave([noise] * lines, self.lines, sorted(rng.sample(range(lines + 1), len(self.lines))), "\n")


class _Row:
    """The recipe of a row; one line of noise is the unit."""

    most = None
    least = HOPS + 1

    def __init__(self, counter: TokenCounter, draws: Draws, words: Wording) -> None:
        self._draws, self._words = draws, words
        distinct = Distinct(draws.stream("variables"))
        self._chain = _Chain(distinct, 5, words)
        frame, example = words.variables, _Chain(distinct, 3, words)
        lines = _EXAMPLE_LINES if draws.length >= LONG else _SHORT_EXAMPLE_LINES
        body = example.among(words.noise, lines, draws.stream("example")).text
        solved = f"{example.question} {example.prefix} {' '.join(example.names)}"
        self._before = f"{frame.intro}{body}{frame.gap}{solved}\n\n{frame.intro}"
        self._turn = Turn(
            question=self._chain.question,
            references=tuple(self._chain.names),
            metric="match_all",
            max_new_tokens=MAX_NEW_TOKENS,
            answer_prefix=self._chain.prefix,
        )
        self._costs = Costs(lambda low, high: counter.counts([f"\n{words.noise}"] * (high - low)))

    def cost(self, units: int) -> int:
        return self._costs.upto(units)

    def build(self, units: int) -> Draft:
        passage = self._chain.among(self._words.noise, units, self._draws.stream("places")).after(self._before)
        return Draft(passage.text + self._words.variables.gap, (self._turn,), (passage.spans,))
