"""A needle in a haystack: one fact at a given depth of a given length of prose.

The grid of Kamradt (github.com/gkamradt/LLMTest_NeedleInAHaystack), with facts of our own that differ from sample to
sample, and with an answer that is found as a substring, where the original asks another model to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvkeep.errors import TaskError
from kvkeep.tasks.draws import Distinct, Draws, adjectives, made_up_name, nouns
from kvkeep.tasks.fitting import Draft, TokenCounter
from kvkeep.tasks.generating import generate
from kvkeep.tasks.prose import Prose
from kvkeep.tasks.protocols import Sample, Tokenizer, Turn
from kvkeep.tasks.text import Haystack, HaystackLike, haystack

DEPTHS = tuple(range(0, 101, 10))
MAX_NEW_TOKENS = 32

_INTRO = "Read this text carefully.\n\n"
_GAP = "\n\n"
_NEEDLE = "The ferryman of {town} keeps his savings in a {thing} under the stairs."
_QUESTION = "In what does the ferryman of {town} keep his savings? Answer from the text above."
_PREFIX = "The ferryman of {town} keeps his savings in a"


@dataclass(frozen=True)
class Niah:
    """The grid; sample `i` has the depth `depths[i % len(depths)]`, so a multiple of as many samples is a full grid.

    Attributes:
        depths: in per cent of the tokens before the needle, each from 0 to 100; the needle goes to the end of the
            last sentence before that point.
        haystack: see `kvkeep.tasks.text.haystack`.
    """

    depths: Sequence[int | float] = DEPTHS
    haystack: HaystackLike = None

    @property
    def name(self) -> str:
        """`niah`."""
        return "niah"

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """See `Task.samples`. The option `depth` is the one that was asked for.

        Raises:
            TaskError: see there; or no depths, or one that is not a percentage.
        """
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise TaskError(
                expected="depths in per cent, each from 0 to 100",
                received=repr(tuple(self.depths)),
                remedy="for example depths=(0, 25, 50, 75, 100)",
            )
        text = haystack(self.haystack)
        return generate(
            self.name,
            lambda counter, draws: _Row(counter, draws, text, self.depths[draws.index % len(self.depths)]),
            tokenizer,
            length=length,
            count=count,
            seed=seed,
            first=first,
            provider=text.name,
        )


class _Row:
    """The recipe of a row; one word of prose is the unit."""

    most = None

    def __init__(self, counter: TokenCounter, draws: Draws, text: Haystack, depth: int | float) -> None:
        self._depth = depth
        self._prose = Prose(text, draws.stream("start").choice(text.starts()), counter)
        self.least = self._prose.least(1)
        rng = draws.stream("fact")
        town = Distinct(rng, text.holds).draw(made_up_name)
        thing = Distinct(rng, text.holds).draw(_thing)
        self._needle = _NEEDLE.format(town=town, thing=thing)
        self._turn = Turn(
            question=_QUESTION.format(town=town),
            references=(thing,),
            metric="match_all",
            max_new_tokens=MAX_NEW_TOKENS,
            answer_prefix=_PREFIX.format(town=town),
        )

    def cost(self, units: int) -> int:
        return self._prose.cost(units)

    def _place(self, gaps: Sequence[int], count: int) -> Sequence[int]:
        if self._depth == 100:
            return gaps[-1:]  # the end, be it in the midst of a sentence
        reached = self._prose.cost(count) * self._depth / 100
        return [max(gap for gap in gaps if self._prose.cost(gap) <= reached)]

    def build(self, units: int) -> Draft:
        passage = self._prose.passage(units, [self._needle], self._place).after(_INTRO)
        return Draft(passage.text + _GAP, (self._turn,), (passage.spans,), (("depth", self._depth),))


def _thing(rng: Random) -> str:
    """Something that can stand behind "a"."""
    return f"{rng.choice([word for word in adjectives() if word[0] not in 'aeiou'])} {rng.choice(nouns())}"
