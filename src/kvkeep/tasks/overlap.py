"""How much two texts have in common: longest common subsequences, ROUGE-L and the similarity of lines of code.

Written here rather than taken from a package. LongBench's numbers come from PyPI's `rouge` 1.0.1, whose summary-level
ROUGE-L no maintained package computes (`rouge-score` does another), and which returns 0 for sentences of more than
about a thousand words, where its recursion ends. The subsequences here are found by bit-parallel arithmetic on
Python's integers, so that a prediction of a million words takes about a second and little memory.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence

_WORD = re.compile(r"[a-z0-9]+")


def lcs_length(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """The length of the longest common subsequence of two sequences."""
    short, long = sorted((a, b), key=len)
    row = (1 << len(short)) - 1
    for row in _lcs_rows(short, long):  # noqa: B007  the last one counts
        pass
    return len(short) - row.bit_count()


def _lcs_rows(short: Sequence[Hashable], long: Sequence[Hashable]) -> Iterator[int]:
    """The table of the longest common subsequence, row by row: one integer for each item of `long`.

    Bit i is 0 where the subsequence of `short[: i + 1]` and the items of `long` so far is one longer than that of
    `short[:i]` and them; so the zeros among the lowest i bits count the subsequence of `short[:i]` and them.

    Source: Hyyrö 2004, Bit-parallel LCS-length computation revisited.
    """
    everything = (1 << len(short)) - 1
    places: dict[Hashable, int] = {}
    for index, item in enumerate(short):
        places[item] = places.get(item, 0) | 1 << index
    row = everything
    for item in long:
        matches = row & places.get(item, 0)
        row = ((row + matches) | (row - matches)) & everything
        yield row


def lcs_items(reference: Sequence[str], prediction: Sequence[str]) -> list[str]:
    """The items of one longest common subsequence; of several, the one that `rouge` 1.0.1 takes."""
    known = set(reference)
    prediction = [item for item in prediction if item in known]  # the others change nothing, not even the choice
    rows = [(1 << len(reference)) - 1, *_lcs_rows(reference, prediction)]

    def length(i: int, j: int) -> int:
        return i - (rows[j] & ((1 << i) - 1)).bit_count()

    items = []
    i, j = len(reference), len(prediction)
    while i and j:
        if reference[i - 1] == prediction[j - 1]:
            items.append(reference[i - 1])
            i, j = i - 1, j - 1
        elif length(i - 1, j) > length(i, j - 1):
            i -= 1
        else:
            j -= 1
    return items[::-1]


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L: the F-measure of the longest common subsequence of words, in 0..1.

    Words are runs of ASCII letters and digits in lower case, not stemmed, as in PyPI's `rouge-score` 0.1.2.

    Source: Lin 2004, ROUGE: a package for automatic evaluation of summaries, section 3.1, with beta = 1.
    """
    predicted, wanted = _WORD.findall(prediction.lower()), _WORD.findall(reference.lower())
    common = lcs_length(predicted, wanted)
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def rouge_l_summary(prediction: str, reference: str) -> float:
    """Summary-level ROUGE-L as PyPI's `rouge` 1.0.1 computes it, in 0..1: what LongBench reports.

    Both texts are split into sentences at full stops and into words at white space, case and punctuation kept. Each
    word counts once: precision and recall are the shares of the distinct words of the prediction, and of the
    reference, that stand in a longest common subsequence of any pair of their sentences.

    Source: Lin 2004, section 3.2, where words are not made distinct; `rouge/rouge_score.py`. Deviation: no limit on
    the length of a sentence, where the package fails and LongBench then counts 0.
    """
    predicted, wanted = _sentences(prediction), _sentences(reference)
    if not predicted or not wanted:
        return 0.0
    common: set[str] = set()
    known = {word for sentence in wanted for word in sentence}
    candidates = dict.fromkeys(tuple(sentence) for sentence in predicted if not known.isdisjoint(sentence))
    for sentence in wanted:
        for candidate in candidates:
            common.update(lcs_items(sentence, candidate))
    precision = len(common) / len({word for sentence in predicted for word in sentence})
    recall = len(common) / len(known)
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # A piece of white space alone becomes one empty word, in the package too.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def similarity(a: str, b: str) -> float:
    """Twice the longest common subsequence of characters over both lengths, rounded to per cent: 0.0, 0.01 .. 1.0.

    Source: `fuzz.ratio` of PyPI's `fuzzywuzzy` with `python-Levenshtein` installed, and of `rapidfuzz`, which does not
    round. Without that package `fuzzywuzzy` falls back to difflib, which finds a little less.
    """
    if a == b:
        return 1.0
    return round(100 * 2 * lcs_length(a, b) / (len(a) + len(b))) / 100
