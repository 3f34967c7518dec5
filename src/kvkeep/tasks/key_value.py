"""Look-up in a JSON object of random ids: nothing but exact recall, and several questions of each context.

Liu et al. 2024 (arXiv 2307.03172), section 3. Here several keys are asked of one context, each on its own, as when one
compressed cache serves many requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvkeep.errors import TaskError
from kvkeep.tasks.draws import Distinct, Draws, uuid4
from kvkeep.tasks.fitting import Costs, Draft, TokenCounter
from kvkeep.tasks.generating import generate, weave
from kvkeep.tasks.protocols import Sample, Tokenizer, Turn

QUESTIONS = 5
MAX_NEW_TOKENS = 64

_INTRO = "This JSON object holds a value for each of its keys.\n\n{"
_GAP = "}\n\n"
_QUESTION = 'Which value does the JSON object above hold for the key "{key}"?'


@dataclass(frozen=True)
class KeyValue:
    """The task. The object is cut into as many equal parts as there are questions; each part has one of the answers.

    Attributes:
        questions: asked of each context, in random order.
    """

    questions: int = QUESTIONS

    @property
    def name(self) -> str:
        """`key_value`."""
        return "key_value"

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """See `Task.samples`. A turn's needle is the pair that it asks for.

        Raises:
            TaskError: see there; or not one question.
        """
        if self.questions < 1:
            raise TaskError(
                expected="at least one question a context", received=str(self.questions), remedy="ask for more"
            )
        return generate(
            self.name,
            lambda counter, draws: _Row(counter, draws, self.questions),
            tokenizer,
            length=length,
            count=count,
            seed=seed,
            first=first,
            provider="generated",
            options=() if self.questions == QUESTIONS else (("questions", self.questions),),
        )


class _Row:
    """The recipe of a row; one pair that is not asked for is the unit."""

    most = None
    least = 0

    def __init__(self, counter: TokenCounter, draws: Draws, questions: int) -> None:
        self._draws = draws
        self._distinct = Distinct(draws.stream("pairs"))
        self._asked = [self._pair() for _ in range(questions)]
        self._rest: list[tuple[str, str]] = []
        self._turns = tuple(
            Turn(
                question=_QUESTION.format(key=key),
                references=(value,),
                metric="match_all",
                max_new_tokens=MAX_NEW_TOKENS,
                answer_prefix=f'"{key}":',  # ends before the quote, which some tokenizers join with what follows
            )
            for key, value in self._asked
        )
        self._costs = Costs(
            lambda low, high: counter.counts([f"{_written(pair)},\n" for pair in self._others(high)[low:]])
        )

    def _pair(self) -> tuple[str, str]:
        return self._distinct.draw(uuid4), self._distinct.draw(uuid4)

    def _others(self, count: int) -> list[tuple[str, str]]:
        self._rest += [self._pair() for _ in range(count - len(self._rest))]
        return self._rest[:count]

    def cost(self, units: int) -> int:
        return self._costs.upto(units)

    def build(self, units: int) -> Draft:
        rng, asked = self._draws.stream("places"), len(self._asked)
        # Place i lies in part i of the gaps between the pairs that are not asked for; questions come in any order.
        bounds = [part * (units + 1) // asked for part in range(asked + 1)]
        places = [rng.randrange(low, max(high, low + 1)) for low, high in pairwise(bounds)]
        rng.shuffle(places)
        others = [_written(pair) for pair in self._others(units)]
        passage = weave(others, [_written(pair) for pair in self._asked], places, ",\n").after(_INTRO)
        return Draft(passage.text + _GAP, self._turns, tuple((span,) for span in passage.spans))


def _written(pair: tuple[str, str]) -> str:
    return f'"{pair[0]}": "{pair[1]}"'
