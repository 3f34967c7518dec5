"""Which letter of a multiple-choice question an answer takes, by the rules of two benchmarks.

The rules are copied in their effects, oddities too, since only so are scores comparable with published ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WITH_BRACKETS = re.compile(r"The correct answer is \(([A-D])\)")
_WITHOUT = re.compile(r"The correct answer is ([A-D])")
_FOUR = re.compile(r"\b[A-D]\b")
_TEN = re.compile(r"\b[A-J]\b")
_CHOICE_MARKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
_CODE_MARKS = str.maketrans(dict.fromkeys("\n`'\"-*", " "))
_CHOICE_CUES = ("answer is:", "answer:", "answer is", "option is")
_CODE_CUES = ("answer is:", "is:", "answer:", "correct option is:")


def stated_letter(prediction: str) -> str | None:
    """The letter in the sentence `The correct answer is (B)`, with brackets or without; None if there is none.

    Source: `extract_answer` of LongBench-v2's pred.py. kvpress asks for this sentence and nothing else, which is never
    more generous.
    """
    text = prediction.replace("*", "")
    found = _WITH_BRACKETS.search(text) or _WITHOUT.search(text)
    return found.group(1) if found else None


def choice_sentence(prediction: str, references: Sequence[str]) -> float:
    """1 if the letter of LongBench-v2's sentence is the reference, else 0; without the sentence 0."""
    return float(stated_letter(prediction) == references[0])


def choice(prediction: str, references: Sequence[str]) -> float:
    """1 if an answer takes the right letter of A to D.

    First LongBench-v2's sentence, if it is there. Then InfiniteBench's rules, in this order: the last letter that
    stands alone, in the first line that has one; the answer begins with a letter; it is the right option's text; what
    follows "answer is", "answer:" or "option is"; the first word made of these letters. The article "A" counts as a
    letter, there as here.

    Args:
        prediction: the answer.
        references: the right letter, then, where known, the right option's text.

    Source: `get_score_one_longbook_choice_eng` of InfiniteBench's compute_scores.py, in the version of kvpress.
    """
    if (letter := stated_letter(prediction)) is not None:
        return float(letter == references[0])
    text = prediction.strip()
    if not text:
        return 0.0
    if _last_alone(text, _FOUR) in references:
        return 1.0
    if text[0] in "ABCD":
        return float(text[0] in references)
    if text in references:
        return 1.0
    text = re.sub(" +", " ", text.translate(_CHOICE_MARKS))
    if (following := _after_cue(text, _CHOICE_CUES)) is not None:
        return float(following.startswith(tuple(filter(None, references))))
    first = next((word for word in text.split() if word in "ABCD"), None)
    return float(first in references)


def code_debug(prediction: str, references: Sequence[str]) -> float:
    """1 if an answer names the faulty function, by its letter of A to J or by its name.

    An answer that begins with the right letter is right, even as the beginning of a word: so "Answer" is an A, there
    as here.

    Args:
        prediction: the answer.
        references: the right letter, then, where known, the function's name.

    Source: `get_score_one_code_debug` of InfiniteBench's compute_scores.py, in the version of kvpress.
    """
    text = prediction.strip()
    if _last_alone(text, _TEN) == references[0]:
        return 1.0
    text = text.translate(_CODE_MARKS).replace("Option", " ").replace("option", " ")
    text = re.sub(" +", " ", text)
    if text.startswith(tuple(filter(None, references))):
        return 1.0
    following = _after_cue(text, _CODE_CUES)
    return float(following is not None and following.startswith(tuple(filter(None, references))))


def _last_alone(text: str, letters: re.Pattern[str]) -> str | None:
    # The benchmark's own pattern looks ahead for a further letter at each one, which takes quadratic time on a line
    # of many.
    for line in text.split("\n"):
        if found := letters.findall(line):
            return str(found[-1])
    return None


def _after_cue(text: str, cues: Sequence[str]) -> str | None:
    """What follows the first cue of the list that occurs, and one character; None if none occurs."""
    for cue in cues:
        if (start := text.find(cue)) >= 0:
            return text[start + len(cue) + 1 :]
    return None
