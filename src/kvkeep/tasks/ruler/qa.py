"""RULER's two question tasks: the documents that answer a question, among others that do not.

Hsieh et al. 2024 (arXiv 2404.06654), section 3. Deviations: the documents of a row are shuffled anew for each row, so
that the answer is not in the same place in all rows of a length; no document comes twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Protocol

from kvkeep.errors import TaskError
from kvkeep.tasks.draws import Draws
from kvkeep.tasks.fitting import CharSpan, Costs, Draft, TokenCounter
from kvkeep.tasks.generating import generate
from kvkeep.tasks.protocols import Sample, Tokenizer, Turn
from kvkeep.tasks.ruler.wording import Wording, shown, wording

MAX_NEW_TOKENS = 32
_LEAST_DOCUMENT_TOKENS = 8  # no row needs more documents than its length has room for


class Question(Protocol):
    """A question with its documents, as `kvkeep.tasks.qa` reads them."""

    @property
    def question(self) -> str:
        """In words."""
        ...

    @property
    def references(self) -> tuple[str, ...]:
        """Right answers; one of them is enough."""
        ...

    @property
    def gold(self) -> tuple[str, ...]:
        """The documents that the answer hangs on."""
        ...

    @property
    def others(self) -> tuple[str, ...]:
        """Documents of the same article or search, which distract most."""
        ...

    @property
    def provider(self) -> str:
        """Where it was read from."""
        ...


@dataclass(frozen=True)
class RulerQa:
    """One of the two tasks; row `i` asks question `i`.

    Attributes:
        variant: `qa_1` (SQuAD) or `qa_2` (HotpotQA).
        wording: `own`, `compat` (RULER's strings, from an installed lm-eval), or one's own.
        path: a file of the data set, see `kvkeep.tasks.qa`; None: the one that comes along.
        questions: the data set itself, in place of a file.
    """

    variant: str
    wording: str | Wording = "own"
    path: str | PathLike[str] | None = None
    questions: Sequence[Question] | None = None

    @property
    def name(self) -> str:
        """`ruler/qa_1` or `ruler/qa_2`."""
        return f"ruler/{self.variant}"

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """See `Task.samples`. Needles are the gold documents.

        Raises:
            TaskError: the data set cannot be read, or has fewer questions or documents than are asked for.
        """
        words, questions = wording(self.wording), self._read()
        if first + count > len(questions):
            raise TaskError(
                expected=f"at most {len(questions)} samples of {self.name}, which has as many questions",
                received=f"{count} from {first} on",
                remedy="ask for fewer, or pass a larger data set",
            )
        pool = list(dict.fromkeys(document for one in questions for document in (*one.gold, *one.others)))
        return generate(
            self.name,
            lambda counter, draws: _Row(counter, draws, words, questions[draws.index], pool),
            tokenizer,
            length=length,
            count=count,
            seed=seed,
            first=first,
            provider=questions[0].provider if questions else "",
            options=shown(words),
        )

    def _read(self) -> Sequence[Question]:
        if self.questions is not None:
            return self.questions
        from kvkeep.tasks import qa  # not needed for questions that are given

        read = qa.read_squad if self.variant == "qa_1" else qa.read_hotpot
        questions: Sequence[Question] = read(self.path)
        return questions


class _Row:
    """The recipe of a row; one document that does not answer is the unit."""

    least = 0

    def __init__(
        self, counter: TokenCounter, draws: Draws, words: Wording, question: Question, pool: Sequence[str]
    ) -> None:
        self._draws, self._words, self._gold = draws, words, question.gold
        rng = draws.stream("documents")
        near = list(dict.fromkeys(document for document in question.others if document not in question.gold))
        rng.shuffle(near)
        wanted = min(len(pool), draws.length // _LEAST_DOCUMENT_TOKENS + len(near) + len(question.gold))
        taken = {*question.gold, *near}
        self._others = near + [document for document in rng.sample(pool, wanted) if document not in taken]
        self.most = len(self._others)
        frame = words.documents
        self._turn = Turn(
            question=frame.question.format(query=question.question),
            references=question.references,
            metric="match_any",
            max_new_tokens=MAX_NEW_TOKENS,
            answer_prefix=frame.prefix.format(query=question.question),
        )
        self._counter, self._costs = counter, Costs(self._costs_of)

    def _costs_of(self, low: int, high: int) -> list[int]:
        # Apart, since the counter remembers documents, which other rows have at other places.
        headers = self._counter.counts([f"\n\n{self._document(place, '')}" for place in range(low, high)])
        documents = self._counter.counts(self._others[low:high])
        return [header + document for header, document in zip(headers, documents, strict=False)]

    def _document(self, place: int, text: str) -> str:
        return self._words.document.format(number=place + 1, document=text)

    def cost(self, units: int) -> int:
        return self._costs.upto(units)

    def build(self, units: int) -> Draft:
        documents = [*self._gold, *self._others[:units]]
        order = list(range(len(documents)))
        self._draws.stream("order").shuffle(order)
        text = self._words.documents.intro
        gold: list[CharSpan] = [(0, 0)] * len(self._gold)
        for place, which in enumerate(order):
            shown_document = self._document(place, documents[which])
            text += ("\n\n" if place else "") + shown_document
            if which < len(gold):
                gold[which] = (len(text) - len(documents[which]), len(text))
        return Draft(text + self._words.documents.gap, (self._turn,), (tuple(gold),))
