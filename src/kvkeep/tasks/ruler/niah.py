"""The eight needle tasks of RULER: facts of one form in noise, in prose, or among facts of the same form.

Hsieh et al. 2024 (arXiv 2404.06654), section 3. Deviations from the published generator: rows depend on their index
alone; a row is filled up to its last unit; every row has another stretch of the haystack; keys and values are all
different and stand nowhere else in the text; every gap between sentences or lines is equally likely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvkeep.tasks.draws import Distinct, Draws, made_up_pair, number, uuid4, word_pair
from kvkeep.tasks.fitting import Costs, Draft, TokenCounter
from kvkeep.tasks.generating import Passage, generate, weave
from kvkeep.tasks.prose import Prose
from kvkeep.tasks.protocols import Sample, Tokenizer, Turn
from kvkeep.tasks.ruler.wording import Frame, Wording, shown, wording
from kvkeep.tasks.text import Haystack, HaystackLike, haystack

MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class Variant:
    """One row of RULER's table.

    Attributes:
        among: what the needles are hidden in.
        keys: what keys are.
        values: what values are.
        key_count: keys that needles are about.
        value_count: values of each key.
        query_count: keys that are asked for.
    """

    among: Literal["noise", "prose", "needles"]
    keys: Literal["words", "uuids"] = "words"
    values: Literal["numbers", "uuids"] = "numbers"
    key_count: int = 1
    value_count: int = 1
    query_count: int = 1


VARIANTS = {
    "niah_single_1": Variant("noise"),
    "niah_single_2": Variant("prose"),
    "niah_single_3": Variant("prose", values="uuids"),
    "niah_multikey_1": Variant("prose", key_count=4),
    "niah_multikey_2": Variant("needles"),
    "niah_multikey_3": Variant("needles", keys="uuids", values="uuids"),
    "niah_multivalue": Variant("prose", value_count=4),
    "niah_multiquery": Variant("prose", key_count=4, query_count=4),
}


@dataclass(frozen=True)
class RulerNiah:
    """One of the needle tasks.

    Attributes:
        variant: a name in `VARIANTS`.
        wording: `own`, `compat` (RULER's strings, from an installed lm-eval), or one's own.
        haystack: see `kvkeep.tasks.text.haystack`; only for variants in prose.
    """

    variant: str
    wording: str | Wording = "own"
    haystack: HaystackLike = None

    @property
    def name(self) -> str:
        """Such as `ruler/niah_single_1`."""
        return f"ruler/{self.variant}"

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """See `Task.samples`. Needles are the sentences of the keys asked for, in the order of the references."""
        words, variant = wording(self.wording), VARIANTS[self.variant]
        text = haystack(self.haystack) if variant.among == "prose" else None

        def recipe(counter: TokenCounter, draws: Draws) -> _Row:
            facts = _Facts(draws, variant, words, text.holds if text is not None else lambda _: False)
            return _Row(facts, _body(facts, text, counter))

        return generate(
            self.name,
            recipe,
            tokenizer,
            length=length,
            count=count,
            seed=seed,
            first=first,
            provider=text.name if text is not None else "generated",
            options=shown(words),
        )


class _Facts:
    """Keys, values and needles of a row, and the question about some of them."""

    def __init__(self, draws: Draws, variant: Variant, words: Wording, forbidden: Callable[[str], bool]) -> None:
        self.draws, self.variant, self.words = draws, variant, words
        self._kind, self._kinds = words.kinds[variant.values]
        # One set for all: a uuid that is a key must not be a value either.
        self._distinct = Distinct(draws.stream("facts"), forbidden)
        keys = [self._key() for _ in range(variant.key_count)]
        values = {key: [self._value() for _ in range(variant.value_count)] for key in keys}
        self.needles = [self._needle(key, value) for key in keys for value in values[key]]
        asked = draws.stream("question").sample(range(len(keys)), variant.query_count)
        self.references = tuple(value for which in asked for value in values[keys[which]])
        self.gold = [which * variant.value_count + v for which in asked for v in range(variant.value_count)]
        self.frame, self.fields = self._question([keys[which] for which in asked])

    def another(self) -> str:
        """A needle about another key."""
        return self._needle(self._key(), self._value())

    def _key(self) -> str:
        words = self.variant.keys == "words"
        return self._distinct.draw(word_pair, made_up_pair) if words else self._distinct.draw(uuid4)

    def _value(self) -> str:
        return self._distinct.draw(number if self.variant.values == "numbers" else uuid4)

    def _needle(self, key: str, value: str) -> str:
        return self.words.needle.format(kind=self._kind, kinds=self._kinds, key=key, value=value)

    def _question(self, keys: Sequence[str]) -> tuple[Frame, dict[str, str]]:
        query = ", ".join(keys[:-1]) + f", and {keys[-1]}" if len(keys) > 1 else keys[0]
        frame = self.words.one if len(self.references) == 1 else self.words.many
        return frame, {"kind": self._kind, "kinds": self._kinds, "query": query}


class _Body:
    """What needles are hidden in."""

    def __init__(self, least: int, cost: Callable[[int], int], build: Callable[[int], Passage]) -> None:
        self.least, self.cost, self.build = least, cost, build


def _body(facts: _Facts, text: Haystack | None, counter: TokenCounter) -> _Body:
    needles, draws = facts.needles, facts.draws
    if text is not None:
        prose = Prose(text, draws.stream("start").choice(text.starts()), counter)

        def places(gaps: Sequence[int], _: int) -> Sequence[int]:
            return draws.stream("places").sample(gaps, len(needles))

        return _Body(prose.least(len(needles)), prose.cost, lambda words: prose.passage(words, needles, places))

    made: list[str] = []

    def lines(count: int) -> list[str]:
        if facts.variant.among == "noise":
            return [facts.words.noise] * count
        made.extend(facts.another() for _ in range(count - len(made)))
        return made[:count]

    def build(count: int) -> Passage:
        places = draws.stream("places").sample(range(count + 1), len(needles))
        return weave(lines(count), needles, places, "\n")

    costs = Costs(lambda low, high: counter.counts([f"\n{line}" for line in lines(high)[low:]]))
    return _Body(len(needles), costs.upto, build)


class _Row:
    """The recipe of a row."""

    most = None

    def __init__(self, facts: _Facts, body: _Body) -> None:
        self._facts, self._body = facts, body
        self.least = body.least
        frame, fields = facts.frame, facts.fields
        self._turn = Turn(
            question=frame.question.format(**fields),
            references=facts.references,
            metric="match_all",
            max_new_tokens=MAX_NEW_TOKENS,
            answer_prefix=frame.prefix.format(**fields),
        )

    def cost(self, units: int) -> int:
        return self._body.cost(units)

    def build(self, units: int) -> Draft:
        frame = self._facts.frame
        passage = self._body.build(units).after(frame.intro.format(**self._facts.fields))
        gold = tuple(passage.spans[which] for which in self._facts.gold)
        return Draft(passage.text + frame.gap, (self._turn,), (gold,))
