"""What RULER-style tasks say: kvkeep's own words, or the original ones.

Scores compare with published ones only in the original words, which come with lm-eval (see `compat`). kvkeep's own say
the same in other words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvkeep.errors import TaskError


@dataclass(frozen=True)
class Frame:
    """What stands around a context. Questions and prefixes may hold fields of `str.format`.

    Attributes:
        intro: in front of the context, with the white space between the two.
        gap: white space between the context and the question.
        question: behind it.
        prefix: the beginning of the answer.
    """

    intro: str
    gap: str
    question: str
    prefix: str


@dataclass(frozen=True)
class Wording:
    """The words of all tasks, and the fields that they have.

    Attributes:
        name: `own` or `compat`.
        noise: a passage that says nothing, which is repeated.
        kinds: one and many of what is hidden, for `numbers` and `uuids`.
        needle: with `kind`, `kinds`, `key` and `value`.
        one: asks for the only value of the only key, with `kind`, `kinds` and `query`.
        many: asks for several, with the same fields.
        assign: gives a variable `name` a `value`.
        copy: gives a variable `name` what the variable `source` has.
        variables: asks for all variables with a `value`, of which there are `count`.
        common: asks for the ten most common words.
        frequent: asks for the three most frequent coded words.
        documents: asks the `query` of documents.
        document: one of them, with its `number` and its text, `document`.
    """

    name: str
    noise: str
    kinds: Mapping[str, tuple[str, str]]
    needle: str
    one: Frame
    many: Frame
    assign: str
    copy: str
    variables: Frame
    common: Frame
    frequent: Frame
    documents: Frame
    document: str


OWN = Wording(
    name="own",
    noise="The lamp is lit. The kettle is warm. The road is long. Nobody is in a hurry. Rain comes and goes.",
    kinds={"numbers": ("number", "numbers"), "uuids": ("code", "codes")},
    needle="A secret {kind} of {key} is {value}.",
    one=Frame(
        intro="Secret {kinds} are hidden in the text below. Remember them, for you will be asked about them.\n",
        gap="\n",
        question="What is the secret {kind} of {query} according to the text above?",
        prefix="The secret {kind} of {query} is",
    ),
    many=Frame(
        intro="Secret {kinds} are hidden in the text below. Remember them, for you will be asked about them.\n",
        gap="\n",
        question="What are all the secret {kinds} of {query} according to the text above?",
        prefix="The secret {kinds} of {query} are",
    ),
    assign="SET {name} TO {value}",
    copy="SET {name} TO {source}",
    variables=Frame(
        intro="In the text below, variables are set to a number, or to what another variable was set to before. "
        "Follow who ends up with which number.\n\n",
        gap="\n",
        question="Which variables of the text above are set to {value}, be it directly or through others?",
        prefix="These {count} variables are set to {value}:",
    ),
    common=Frame(
        intro="Each word of the numbered list below comes several times, and some come far more often than the rest. "
        "Remember those.\n",
        gap="\n",
        question="Which 10 words come most often in the list above?",
        prefix="The 10 words that come most often are:",
    ),
    frequent=Frame(
        intro="The text below is written in code. Keep count of its words, and find the three that come most often.\n",
        gap="\n",
        question="Which three words come most often in the coded text above? Leave the dots (...) out of account, and "
        "name the words without explaining anything.",
        prefix="The three words that come most often are:",
    ),
    documents=Frame(
        intro="Find the answer to a question in the documents below. Reply with the answer and nothing else.\n\n"
        "These are the documents.\n\n",
        gap="\n\n",
        question="Find the answer to the question in the documents above. Reply with the answer and nothing else.\n\n"
        "Question: {query}",
        prefix="Answer:",
    ),
    document="Document {number}:\n{document}",
)


def wording(name: str | Wording) -> Wording:
    """The words of that name; a `Wording` is returned as it is.

    Raises:
        TaskError: an unknown name, or `compat` without lm-eval.
    """
    if isinstance(name, Wording):
        return name
    if name == "own":
        return OWN
    if name == "compat":
        from kvkeep.tasks.ruler.compat import read  # it imports this module

        return read()
    raise TaskError(
        expected="the wording 'own' or 'compat'",
        received=repr(name),
        remedy="'compat' reads RULER's own strings from an installed lm-eval",
    )


def shown(words: Wording) -> tuple[tuple[str, str | int | float], ...]:
    """The option that tells samples in other words apart; nothing for kvkeep's own."""
    return () if words.name == "own" else (("wording", words.name),)
