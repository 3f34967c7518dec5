"""How right an answer is: one number in 0..1 for a prediction and its references.

    score("match_all", "The numbers are 17 and 23.", ("17", "23", "42"))     # 0.666...
    score("f1", "in Jackson County", ("Jackson County, Missouri",))          # 0.666...
    score("boxed", r"... so \\boxed{\\frac{1}{2}}", ("0.5",))                  # 1.0

What the references mean is up to the metric; the docstring of each says so, and where it comes from. A prediction may
be anything that a model writes: empty, endless, full of control characters. All metrics take time linear in it, up to
a factor of the length of the references.
"""

from __future__ import annotations

import ast
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvkeep.errors import TaskError, near_names
from kvkeep.tasks import boxed, choices, overlap

__all__ = ["METRICS", "Metric", "score"]

Metric = Callable[[str, Sequence[str]], float]
"""A prediction and its references, at least one; 0 is wrong, 1 is right."""

_CONTROL = re.compile("[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DIGITS = re.compile(r"[0-9]+")
_NUMBERS = re.compile(r"\d+")
_DECIMALS = re.compile(r"[0-9]+\.[0-9]+|[0-9]+")
_PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"
    + "｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏",
)
_WORD_MARKS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
_CODE_MARKS = str.maketrans(dict.fromkeys("\n.`'\":", " "))
_LONGEST_LITERAL = 10_000  # characters; Python's own parser fails on deep nesting in ways that are not exceptions


def score(name: str, prediction: str, references: Sequence[str]) -> float:
    """How right a prediction is.

    Args:
        name: a name in `METRICS`.
        prediction: the answer, without the prompt and the answer's prefix.
        references: what is right, in the form that the metric asks for.

    Returns:
        0.0 for wrong, 1.0 for right, and between them where the metric knows half measures.

    Raises:
        TaskError: an unknown name; no references; a reference that the metric cannot use; a prediction that is no text.
    """
    if name not in METRICS:
        raise TaskError(expected="the name of a metric", received=repr(name), remedy=near_names(name, METRICS))
    if not isinstance(prediction, str):
        raise TaskError(
            expected="a prediction that is text",
            received=repr(prediction),
            remedy="pass '' for an answer without tokens",
        )
    if isinstance(references, str):
        raise TaskError(
            expected="a sequence of references",
            received=f"the text {references[:80]!r}",
            remedy=f"wrap it: ({references[:80]!r},)",
        )
    if not references:
        raise TaskError(
            expected=f"at least one reference for the metric {name!r}",
            received="none",
            remedy="a set whose answers are not public, such as ZeroSCROLLS, can be run but not scored here",
        )
    return METRICS[name](prediction, references)


def match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of the references that stand in the prediction, in any case.

    The prediction is stripped, each control character U+0000 to U+001F becomes a new line, and it is stripped again.

    Source: `string_match_all` and `postprocess_pred` of RULER. kvpress deletes the control characters instead, so that
    a reference may be found across one.
    """
    text = _without_control(prediction)
    return sum(reference.lower() in text for reference in _filled(references)) / len(references)


def match_any(prediction: str, references: Sequence[str]) -> float:
    """1 if any reference stands in the prediction, in any case; control characters as in `match_all`.

    Source: `string_match_part` of RULER; InfiniteBench's longdialogue_qa_eng in kvpress does the same.
    """
    text = _without_control(prediction)
    return float(any(reference.lower() in text for reference in _filled(references)))


def _without_control(prediction: str) -> str:
    return _CONTROL.sub("\n", prediction.strip()).strip().lower()


def _filled(references: Sequence[str]) -> Sequence[str]:
    if not all(references):
        raise TaskError(
            expected="references that are not empty",
            received=repr(tuple(references)),
            remedy="an empty text stands in every prediction; remove it, or use the metric 'exact_match'",
        )
    return references


def normalise(text: str) -> str:
    """Text in lower case without ASCII punctuation, without the articles a, an, the, with single spaces.

    Source: `normalize_answer` of SQuAD's evaluation script.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 if the prediction equals any reference after SQuAD's normalisation.

    Source: `exact` of SQuAD 2.0's evaluation script.
    """
    answer = normalise(prediction)
    return float(any(answer == normalise(reference) for reference in references))


def f1(prediction: str, references: Sequence[str]) -> float:
    """F1 of the bags of words after SQuAD's normalisation, the best over the references.

    A reference of which nothing is left, the empty one too, is matched by a prediction of which nothing is left.

    Source: `compute_f1` of SQuAD 2.0's evaluation script. LongBench and InfiniteBench compute the same, but for that.
    """
    words = normalise(prediction).split()
    return max(_bag_f1(words, normalise(reference).split()) for reference in references)


def f1_characters(prediction: str, references: Sequence[str]) -> float:
    """F1 of the bags of characters without white space and punctuation, Chinese too; the best over the references.

    Source: `qa_f1_score_zh` of InfiniteBench, for longbook_qa_chn.
    """
    characters = _chinese(prediction)
    return max(_bag_f1(characters, _chinese(reference)) for reference in references)


def _chinese(text: str) -> str:
    return "".join(text.lower().translate(_CHINESE_PUNCTUATION).split())


def _bag_f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    if not predicted or not wanted:
        return float(not predicted and not wanted)
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted))


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L, the best over the references: see `overlap.rouge_l`."""
    return max(overlap.rouge_l(prediction, reference) for reference in references)


def rouge_l_summary(prediction: str, references: Sequence[str]) -> float:
    """LongBench's ROUGE-L, the best over the references: see `overlap.rouge_l_summary`."""
    return max(overlap.rouge_l_summary(prediction, reference) for reference in references)


def first_line(metric: Metric) -> Metric:
    """A metric on the first line that is not empty, as LongBench does for trec, triviaqa, samsum and lsht."""

    def on_first_line(prediction: str, references: Sequence[str]) -> float:
        return metric(_first_line(prediction), references)

    return on_first_line


def _first_line(prediction: str) -> str:
    return prediction.lstrip("\n").split("\n", 1)[0]


def classification(prediction: str, references: Sequence[str]) -> float:
    """One over the number of classes that the first line names, if the right one is among them.

    A class whose name is a part of the right one's does not count, or else naming the right one would name both.

    Args:
        prediction: the answer.
        references: the right class, then all classes in the set's order.

    Source: `classification_score` of LongBench, for trec and lsht, with its oddity: the class that follows one that
    was left out is not examined, and counts.
    """
    line, right = _first_line(prediction), references[0]
    classes = references[1:] if right in references[1:] else references
    named = [name for name in classes if name in line]
    index = 0
    while index < len(named):
        if named[index] in right and named[index] != right:
            del named[index]
        index += 1
    return 1 / len(named) if right in named else 0.0


def retrieval(prediction: str, references: Sequence[str]) -> float:
    """The share of the prediction's numbers that are the right paragraph's; the best over the references.

    Args:
        prediction: the answer.
        references: such as "Paragraph 12" or "段落12".

    Source: `retrieval_score` and `retrieval_zh_score` of LongBench.
    """
    numbers = _NUMBERS.findall(prediction)
    return max(_share(numbers, _paragraph(reference)) for reference in references)


def _paragraph(reference: str) -> str:
    if (found := _PARAGRAPH.search(reference)) is None:
        raise TaskError(
            expected="a reference such as 'Paragraph 12'",
            received=repr(reference[:80]),
            remedy="use the metric 'count' for a bare number",
        )
    return found.group(1)


def count(prediction: str, references: Sequence[str]) -> float:
    """The share of the prediction's numbers that equal the reference; the best over the references.

    Source: `count_score` of LongBench, for passage_count.
    """
    numbers = _NUMBERS.findall(prediction)
    return max(_share(numbers, reference.strip()) for reference in references)


def _share(numbers: Sequence[str], right: str) -> float:
    return numbers.count(right) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, references: Sequence[str]) -> float:
    """Similarity of the first line of code with the reference, in steps of 0.01; the best over the references.

    The first line of code is the first without a backtick, `#` and `//`; of leading line ends none counts.

    Source: `code_sim_score` of LongBench, for lcc and repobench-p; the ratio is `overlap.similarity`.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(overlap.similarity(line, reference) for reference in references)


def number(prediction: str, references: Sequence[str]) -> float:
    """1 if the first run of digits 0 to 9 is any of the references, digit by digit; signs and commas end a run.

    Source: `first_int_match` of InfiniteBench, for passkey and number_string.
    """
    found = _DIGITS.search(prediction)
    return float(found is not None and found.group() in {reference.strip() for reference in references})


def first_number(prediction: str, references: Sequence[str]) -> float:
    """1 if the first number, whole or decimal, has the value of any of the references.

    Source: `get_score_one_math_find` of InfiniteBench. Deviation: a decimal where an integer is right is compared by
    its value; there it is an error.
    """
    found = _DECIMALS.search(prediction)
    value = boxed.as_number(found.group()) if found else None
    return float(value is not None and any(value == boxed.as_number(reference.strip()) for reference in references))


def last_number(prediction: str, references: Sequence[str]) -> float:
    """1 if the last word, punctuation aside, is an integer of the value of any of the references.

    Source: `get_score_one_code_run` of InfiniteBench.
    """
    words = prediction.translate(_CODE_MARKS).split()
    value = boxed.as_number(words[-1]) if words else None
    return float(value is not None and any(value == boxed.as_number(reference.strip()) for reference in references))


def number_prefix(prediction: str, references: Sequence[str]) -> float:
    """The share of the references, in their order, that the prediction's numbers equal before the first wrong one.

    Source: `get_score_one_math_calc` of InfiniteBench.
    """
    right = 0
    for found, reference in zip(_DIGITS.finditer(prediction), references, strict=False):
        if _digits(found.group()) != _digits(reference.strip()):
            break
        right += 1
    return right / len(references)


def _digits(text: str) -> str:
    # Compared as text: Python refuses to read integers of more than some thousands of digits.
    return text.lstrip("0") or text[-1:]


def word(prediction: str, references: Sequence[str]) -> float:
    """1 if any reference is a word of the prediction, marks `: " ' . , ? ! { }` aside.

    Source: `get_score_one_kv_retrieval` of InfiniteBench.
    """
    words = set(prediction.translate(_WORD_MARKS).split())
    return float(any(reference in words for reference in references))


def cloze(prediction: str, references: Sequence[str]) -> float:
    """The share of the masks that the prediction fills with exactly the right text; the best over the references.

    Args:
        prediction: a mapping from mask to text, as JSON or as a Python literal.
        references: the same, right.

    Source: `get_exact_match` of LooGLE, for shortdep_cloze. There the masks of all samples are counted together; here
    each sample has its share.
    """
    filled = _mapping(prediction)
    shares = []
    for reference in references:
        if not (right := _mapping(reference)):
            raise TaskError(
                expected="a reference that maps masks to texts",
                received=repr(reference[:80]),
                remedy='such as {"<mask-0>": "Paris"}',
            )
        shares.append(sum(filled.get(mask) == text for mask, text in right.items()) / len(right))
    return max(shares)


def _mapping(text: str) -> dict[object, object]:
    """A mapping written as JSON or as a Python literal; empty if it is neither."""
    text = text.strip()
    if len(text) > _LONGEST_LITERAL:
        return {}
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "boxed": boxed.grade,
        "choice": choices.choice,
        "choice_sentence": choices.choice_sentence,
        "classification": classification,
        "cloze": cloze,
        "code_debug": choices.code_debug,
        "code_similarity": code_similarity,
        "count": count,
        "exact_match": exact_match,
        "f1": f1,
        "f1_characters": f1_characters,
        "f1_first_line": first_line(f1),
        "first_number": first_number,
        "last_number": last_number,
        "match_all": match_all,
        "match_any": match_any,
        "number": number,
        "number_prefix": number_prefix,
        "retrieval": retrieval,
        "rouge_l": rouge_l,
        "rouge_l_summary": rouge_l_summary,
        "rouge_l_summary_first_line": first_line(rouge_l_summary),
        "word": word,
    }
)
