"""Several questions on one text, with follow-ups that make sense only behind the answer before them.

Each context has a few people, about each of whom two facts stand in different places. The first question finds the
person, the second one asks about "that person", so that it needs the cache of the first turn. A last question asks how
a sentence of the text itself goes on: what nobody put there matters too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvkeep.errors import TaskError
from kvkeep.tasks.draws import Distinct, Draws, made_up_name, nouns
from kvkeep.tasks.fitting import CharSpan, Draft, TokenCounter
from kvkeep.tasks.generating import generate
from kvkeep.tasks.prose import Prose
from kvkeep.tasks.protocols import Sample, Tokenizer, Turn
from kvkeep.tasks.text import Haystack, HaystackLike, haystack

PEOPLE = 3
MAX_NEW_TOKENS = 32

_INTRO = "Read this text carefully. Questions about it follow.\n\n"
_GAP = "\n\n"
_FIRST_NAMES = ("Ada", "Bruno", "Clara", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irma", "Jonas", "Karin", "Linus")
_PRIZES = ("{noun} prize", "{noun} medal", "{noun} race", "{noun} lottery")
_WON = "The {prize} was won by {who}."
_LIVES = "{who} lives in the town of {town}."
_ASK_WHO = "Who won the {prize}, according to the text above?"
_BEGIN_WHO = "The {prize} was won by"
_ASK_TOWN = "And in which town does that person live?"
_BEGIN_TOWN = "That person lives in the town of"
_GIVEN, _ASKED = 9, 4  # words of a sentence that are given, and those behind them that are asked for
_RESERVE = 96  # tokens, so that a sentence that is chosen before the length is known is in the row for sure
_ASK_WORDS = 'How does the sentence of the text above go on that begins with these words: "{words}"?'


@dataclass(frozen=True)
class MultiTurn:
    """The task: two turns for each person, then one on the text itself.

    Attributes:
        people: in each context.
        haystack: see `kvkeep.tasks.text.haystack`.
    """

    people: int = PEOPLE
    haystack: HaystackLike = None

    @property
    def name(self) -> str:
        """`multi_turn`."""
        return "multi_turn"

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """See `Task.samples`. A follow-up's needles are its own fact, then the one that names the person.

        Raises:
            TaskError: see there; or a number of people that there are no names for.
        """
        if not 1 <= self.people <= len(_FIRST_NAMES):
            raise TaskError(
                expected=f"1 to {len(_FIRST_NAMES)} people", received=str(self.people), remedy="ask for fewer or more"
            )
        text = haystack(self.haystack)
        return generate(
            self.name,
            lambda counter, draws: _Row(counter, draws, text, self.people),
            tokenizer,
            length=length,
            count=count,
            seed=seed,
            first=first,
            provider=text.name,
            options=() if self.people == PEOPLE else (("people", self.people),),
        )


class _Row:
    """The recipe of a row; one word of prose is the unit."""

    most = None

    def __init__(self, counter: TokenCounter, draws: Draws, text: Haystack, people: int) -> None:
        self._draws, self._text = draws, text
        self._names: list[str] = []
        self._facts: list[str] = []
        turns: list[Turn] = []
        rng, distinct = draws.stream("people"), Distinct(draws.stream("names"), self._clashes)
        for first_name, noun in zip(rng.sample(_FIRST_NAMES, people), rng.sample(nouns(), people), strict=True):
            surname, town = (self._name(distinct) for _ in range(2))
            who, prize = f"{first_name} {surname}", rng.choice(_PRIZES).format(noun=noun)
            self._facts += [_WON.format(who=who, prize=prize), _LIVES.format(who=who, town=town)]
            turns.append(_turn(_ASK_WHO.format(prize=prize), surname, _BEGIN_WHO.format(prize=prize)))
            turns.append(_turn(_ASK_TOWN, town, _BEGIN_TOWN, continues=True))
        self._prose = Prose(text, draws.stream("start").choice(text.starts()), counter)
        taken = counter.of_turns(_GAP, turns) + sum(counter.counts([f" {fact}" for fact in (_INTRO, *self._facts)]))
        sentence, end = self._choose(self._prose.words_for(draws.length - taken - _RESERVE))
        self._sentence = " ".join(sentence)
        self.least = max(end, self._prose.least(len(self._facts)))
        begin = " ".join(sentence[:_GIVEN])
        asked = " ".join(sentence[_GIVEN : _GIVEN + _ASKED])
        self._turns = (*turns, _turn(_ASK_WORDS.format(words=begin), asked, begin))

    def _name(self, distinct: Distinct) -> str:
        self._names.append(distinct.draw(made_up_name))
        return self._names[-1]

    def _clashes(self, name: str) -> bool:
        """No name may be found within another one, or in the text."""
        low = name.lower()
        return self._text.holds(name) or any(low in other.lower() or other.lower() in low for other in self._names)

    def _choose(self, words: int) -> tuple[list[str], int]:
        """A sentence among the first so many words, or behind them if none will do; and where it ends."""
        while True:
            sentences = self._prose.sentences(words)
            ends = list(accumulate(len(sentence) for sentence in sentences))
            order = list(range(len(sentences)))
            self._draws.stream("sentence").shuffle(order)
            text = " ".join(self._prose.words(words + _RESERVE))
            for which in order:
                sentence = sentences[which]
                long = len(sentence) >= _GIVEN + _ASKED and '"' not in " ".join(sentence)
                if long and text.count(" ".join(sentence[:_GIVEN])) == 1:
                    return sentence, ends[which]
            if words > 4 * len(self._text.words):
                raise TaskError(
                    expected=f"a text with sentences of {_GIVEN + _ASKED} words or more, each there once",
                    received=f"none in {self._text.name}",
                    remedy="pass another text",
                )
            words = 2 * max(words, 16)

    def cost(self, units: int) -> int:
        return self._prose.cost(units)

    def _places(self, gaps: Sequence[int], _: int) -> Sequence[int]:
        return self._draws.stream("places").sample(gaps, len(self._facts))

    def build(self, units: int) -> Draft:
        passage = self._prose.passage(units, self._facts, self._places).after(_INTRO)
        needles: list[tuple[CharSpan, ...]] = []
        for won, lives in zip(passage.spans[::2], passage.spans[1::2], strict=True):
            needles += [(won,), (lives, won)]
        start = passage.text.index(self._sentence)
        needles.append(((start, start + len(self._sentence)),))
        return Draft(passage.text + _GAP, self._turns, tuple(needles))


def _turn(question: str, reference: str, prefix: str, *, continues: bool = False) -> Turn:
    return Turn(question, (reference,), "match_all", MAX_NEW_TOKENS, answer_prefix=prefix, continues=continues)
