"""Metrics: worked examples of their sources, independent versions, and what models really write."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import TaskError
from kvkeep.tasks import overlap
from kvkeep.tasks.metrics import METRICS, normalise, score

HOSTILE = [
    "",
    " ",
    "\x00\x01\x1f",
    "\n" * 1000,
    "\ud800",
    "İstanbul ﬁ ǅ 😀 \u202e",
    "٣ ² Ⅷ",
    "{" * 1000,
    "\\boxed{" * 300,
    "[" * 5000,
    "A" * 1000,
    "9" * 5000,
    "`#//",
    "The correct answer is (",
    "answer is:",
]
REFERENCES = {
    "retrieval": ("Paragraph 3",),
    "cloze": ('{"<mask-0>": "Bob"}',),
    "choice": ("B", "the second"),
    "choice_sentence": ("B",),
    "code_debug": ("B", "parse"),
}


@pytest.mark.parametrize("name", sorted(METRICS))
@pytest.mark.parametrize("prediction", HOSTILE, ids=range(len(HOSTILE)))
def test_every_metric_bears_what_a_model_may_write(name, prediction):
    value = score(name, prediction, REFERENCES.get(name, ("42", "a right answer")))
    assert type(value) is float
    assert 0.0 <= value <= 1.0


@pytest.mark.parametrize("name", sorted(METRICS))
def test_long_predictions_take_no_quadratic_time(name):
    begun = time.perf_counter()
    for prediction in ("A B 1 word. " * 20_000, "x" * 200_000, "\\boxed{{" * 20_000, "(" * 200_000):
        assert 0.0 <= score(name, prediction, REFERENCES.get(name, ("42", "a right answer"))) <= 1.0
    assert time.perf_counter() - begun < 20


@pytest.mark.parametrize("name", sorted(METRICS))
def test_the_reference_itself_is_right(name):
    prediction = {
        "boxed": r"\boxed{42}",
        "retrieval": "Paragraph 3",
        "cloze": '{"<mask-0>": "Bob"}',
        "choice": "B",
        "choice_sentence": "The correct answer is (B).",
        "code_debug": "B",
    }.get(name, "42")
    references = REFERENCES.get(name, ("42",))
    assert score(name, prediction, references) == pytest.approx(1.0, abs=1e-7)


def test_unknown_names_get_near_ones():
    with pytest.raises(TaskError, match="did you mean 'rouge_l'"):
        score("rouge-l", "a", ("a",))


@pytest.mark.parametrize(
    ("prediction", "references", "said"),
    [
        (None, ("a",), "a prediction that is text"),
        ("a", "abc", r"\('abc',\)"),
        ("a", (), "at least one reference"),
    ],
)
def test_wrong_arguments_are_named(prediction, references, said):
    with pytest.raises(TaskError, match=said):
        score("f1", prediction, references)


@pytest.mark.parametrize(
    ("name", "references"),
    [("match_all", ("a", "")), ("match_any", ("",)), ("retrieval", ("12",)), ("cloze", ("Bob",)), ("cloze", ("{}",))],
)
def test_references_that_a_metric_cannot_use_are_errors(name, references):
    with pytest.raises(TaskError):
        score(name, "a", references)


# RULER


def test_match_all_is_the_share_of_references_in_any_case():
    assert score("match_all", "Blue is 17, RED is 23", ("17", "red", "green")) == 2 / 3
    assert score("match_any", "Blue is 17, RED is 23", ("green", "red")) == 1.0
    assert score("match_any", "Blue", ("green", "red")) == 0.0


def test_control_characters_part_the_text():
    assert score("match_all", "71\x0042", ("7142",)) == 0.0  # kvpress deletes them, and finds it
    assert score("match_all", "71\x0042", ("71\n42",)) == 1.0
    assert score("match_any", "\x01\x02", ("a",)) == 0.0
    assert score("match_all", "7\x7f", ("7\x7f",)) == 1.0  # only U+0000 to U+001F


# SQuAD, LongBench


@pytest.mark.parametrize(
    ("prediction", "references", "f1", "exact"),
    [
        ("The Denver Broncos!", ("Denver Broncos",), 1.0, 1.0),
        ("in Jackson County", ("Jackson County, Missouri",), 2 / 3, 0.0),
        ("a an the", ("",), 1.0, 1.0),  # no-answer questions of SQuAD 2.0
        ("something", ("",), 0.0, 0.0),
        ("", ("answer",), 0.0, 0.0),
        ("cat cat dog", ("cat dog dog",), 2 / 3, 0.0),  # bags, not sets
        ("no", ("yes", "no, it is not", "No"), 1.0, 1.0),
        ("1,000 people", ("1000 people",), 1.0, 1.0),
        ("an\tapple  a day", ("apple day",), 1.0, 1.0),
        ("theatre", ("atre",), 0.0, 0.0),
    ],
)
def test_squad(prediction, references, f1, exact):
    assert score("f1", prediction, references) == pytest.approx(f1)
    assert score("exact_match", prediction, references) == exact


vocabulary = st.sampled_from(["the", "a", "an", "cat", "dog.", "Dog,", "ran", "7", ",", "...", "ÄÖ"])
words = st.lists(vocabulary, max_size=12).map(" ".join)


@given(words, words)
def test_f1_agrees_with_precision_and_recall_spelled_out(prediction, reference):
    p, r = Counter(normalise(prediction).split()), Counter(normalise(reference).split())
    if not p or not r:
        expected = float(p == r)
    elif not (common := (p & r).total()):
        expected = 0.0
    else:
        precision, recall = common / p.total(), common / r.total()
        expected = 2 * precision * recall / (precision + recall)
    assert score("f1", prediction, (reference,)) == pytest.approx(expected)


def test_f1_of_characters():
    assert score("f1_characters", "北京。", ("在北京",)) == pytest.approx(0.8)
    assert score("f1_characters", "“红 楼梦”", ("红楼梦",)) == 1.0
    assert score("f1_characters", "。", ("红",)) == 0.0


def test_only_the_first_line_counts_where_longbench_says_so():
    assert score("f1_first_line", "\n\nParis\nQuestion: and Rome?", ("Paris",)) == 1.0
    assert score("f1", "\n\nParis\nQuestion: and Rome?", ("Paris",)) < 1.0
    assert score("rouge_l_summary_first_line", "they met\nmore", ("they met",)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("prediction", "references", "value"),
    [
        ("Food", ("Food", "Food", "Animal", "Sport"), 1.0),
        ("Food or Animal", ("Food", "Food", "Animal", "Sport"), 0.5),
        ("Animal\nFood", ("Food", "Food", "Animal", "Sport"), 0.0),
        # a part of the right name does not count
        ("Other location", ("Other location", "location", "Other location"), 1.0),
        ("location", ("Other location", "location", "Other location"), 0.0),
        # of two parts one after the other, LongBench leaves the second in
        ("a b c", ("a b c", "a", "b", "a b c"), 0.5),
        ("a b c", ("a b c", "a", "x", "a b c", "b"), 1.0),
        # without a list of classes, the right one alone
        ("Food", ("Food",), 1.0),
    ],
)
def test_classification(prediction, references, value):
    assert score("classification", prediction, references) == value


def test_numbers_of_paragraphs():
    assert score("retrieval", "Paragraph 12, or 13", ("Paragraph 12",)) == 0.5
    assert score("retrieval", "段落7", ("段落7",)) == 1.0
    assert score("retrieval", "Paragraph 1", ("Paragraph 12",)) == 0.0
    assert score("count", "There are 7 paragraphs, 7.", ("7",)) == 1.0
    assert score("count", "7 of 9", ("7",)) == 0.5
    assert score("count", "seven", ("7",)) == 0.0


def test_code_similarity_takes_the_first_line_of_code():
    assert score("code_similarity", "\n\n```python\n# a comment\nreturn x\n", ("return x",)) == 1.0
    assert score("code_similarity", "// only\n`marks`", ("return x",)) == 0.0
    assert score("code_similarity", "return y", ("return x",)) == 0.88  # 14/16, rounded to per cent


# ROUGE-L and subsequences


def naive_lcs(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table


def naive_items(reference, prediction):
    """The subsequence that a walk back through the table finds, preferring to shorten the prediction."""
    table = naive_lcs(reference, prediction)
    i, j, items = len(reference), len(prediction), []
    while i and j:
        if reference[i - 1] == prediction[j - 1]:
            items.insert(0, reference[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return items


@given(st.lists(st.sampled_from("abcd"), max_size=20), st.lists(st.sampled_from("abcde"), max_size=20))
def test_subsequences_agree_with_the_table(a, b):
    assert overlap.lcs_length(a, b) == naive_lcs(a, b)[-1][-1]
    assert overlap.lcs_items(a, b) == naive_items(a, b)


def test_rouge_l_of_the_paper():
    """Lin 2004, section 3.1: S1 is the reference; S2 scores 3/4, S3 2/4, and S4 2/4."""
    reference = ("police killed the gunman",)
    assert score("rouge_l", "police kill the gunman", reference) == 0.75
    assert score("rouge_l", "the gunman kill police", reference) == 0.5
    assert score("rouge_l", "the gunman police killed", reference) == 0.5


def test_union_of_subsequences_of_the_paper():
    """Lin 2004, section 3.2: w1 w2 w3 w4 w5 against two sentences has a union of four words: recall 4/5."""
    value = score("rouge_l_summary", "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", ("w1 w2 w3 w4 w5",))
    precision, recall = 4 / 8, 4 / 5  # eight distinct words in the prediction
    assert value == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-7)


@pytest.mark.parametrize(
    ("prediction", "reference", "value"),
    [  # computed with PyPI's rouge 1.0.1
        ("the cat sat on the mat", "the cat is on the mat", 0.7999999950000002),
        ("the cat. the dog", "the dog. the cat", 0.999999995),
        ("a b c d. e f g", "g f e. d c b a", 0.2857142807142858),
        ("Hello there. General Kenobi.", "General Kenobi said hello there.", 0.6666666617283951),
        ("a. ", "b. ", 0.4999999950000001),  # the empty word behind the last full stop is one
        ("...", "a b", 0.0),
    ],
)
def test_rouge_l_of_longbench(prediction, reference, value):
    assert overlap.rouge_l_summary(prediction, reference) == pytest.approx(value, abs=1e-12)


def test_rouge_agrees_with_its_packages_where_they_are():
    rouge = pytest.importorskip("rouge").Rouge()
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    draw = random.Random(0)
    vocabulary = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "fast", ".", "Away,", "then", "home.", "it"]
    for _ in range(200):
        a, b = (" ".join(draw.choices(vocabulary, k=draw.randint(1, 40))) for _ in range(2))
        assert overlap.rouge_l(a, b) == pytest.approx(scorer.score(b, a)["rougeL"].fmeasure, abs=1e-12)
        if a.replace(".", "") and b.replace(".", ""):
            theirs = rouge.get_scores([a], [b], avg=True)["rouge-l"]["f"]
            assert overlap.rouge_l_summary(a, b) == pytest.approx(theirs, abs=1e-12)


def test_a_sentence_of_many_words_is_scored():
    """There `rouge` 1.0.1 runs out of recursion, and LongBench counts 0."""
    text = " ".join(f"w{i}" for i in range(3000))
    assert score("rouge_l_summary", text, (text,)) == pytest.approx(1.0)


# choices


@pytest.mark.parametrize(
    ("prediction", "sentence", "choice"),
    [
        ("The correct answer is (B).", 1.0, 1.0),
        ("**The correct answer is (B)**", 1.0, 1.0),
        ("The correct answer is B", 1.0, 1.0),
        ("The correct answer is (C), not B", 0.0, 0.0),
        ("The correct answer is (b)", 0.0, 0.0),
        ("B", 0.0, 1.0),
        ("B. the second", 0.0, 1.0),
        ("I would say A or B", 0.0, 1.0),  # the last one of the line
        ("I would say B or A", 0.0, 1.0),  # not the last one, but then the first one: rules add up
        ("I would say A, or the second", 0.0, 0.0),
        ("Bananas", 0.0, 1.0),  # begins with the letter
        ("the second", 0.0, 1.0),
        ("So the answer is: the second one", 0.0, 1.0),
        ("So the answer is: the third one", 0.0, 0.0),
        ("option is", 0.0, 0.0),
        ("first line A\nsecond line B", 0.0, 0.0),
        ("none of these", 0.0, 0.0),
        ("I think (BC) it is", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_choices(prediction, sentence, choice):
    assert score("choice_sentence", prediction, ("B",)) == sentence
    assert score("choice", prediction, ("B", "the second")) == choice


def test_an_empty_option_is_no_free_point():
    assert score("choice", "the answer is: what", ("B", "")) == 0.0
    assert score("code_debug", "what", ("B", "")) == 0.0


@pytest.mark.parametrize(
    ("prediction", "value"),
    [
        ("H", 1.0),
        ("The error is in H", 1.0),
        ("parse_row() crashes", 1.0),
        ("`parse_row` crashes", 0.0),  # a mark in front leaves a space in front
        ("Option H", 1.0),
        ("the answer is: parse_row", 1.0),
        ("the answer is: other", 0.0),
        ("F. other", 0.0),
        ("the answer is:", 0.0),
    ],
)
def test_code_debug(prediction, value):
    assert score("code_debug", prediction, ("H", "parse_row")) == value


# numbers and words of InfiniteBench


@pytest.mark.parametrize(
    ("name", "prediction", "references", "value"),
    [
        ("number", "The pass key is 71432. Remember 1.", ("71432",), 1.0),
        ("number", "1, then 71432", ("71432",), 0.0),
        ("number", "071432", ("71432",), 0.0),
        ("number", "-71432", ("71432",), 1.0),
        ("number", "71,432", ("71432",), 0.0),
        ("first_number", "It is 3.50", ("3.5",), 1.0),
        ("first_number", "It is 07.", ("7",), 1.0),
        ("first_number", "It is 7.5", ("7",), 0.0),
        ("first_number", "none", ("7",), 0.0),
        ("last_number", "The return value is: `-12`.", ("-12",), 1.0),
        ("last_number", "12 or 13", ("12",), 0.0),
        ("last_number", "12 apples", ("12",), 0.0),
        ("number_prefix", "[1, 4, 8]", ("1", "4", "8"), 1.0),
        ("number_prefix", "1 4 9 8", ("1", "4", "8", "16"), 0.5),
        ("number_prefix", "0 1", ("0", "01"), 1.0),
        ("number_prefix", "", ("1",), 0.0),
        ("word", '{"key": "0a-1b"}', ("0a-1b",), 1.0),
        ("word", "0a-1bc", ("0a-1b",), 0.0),
    ],
)
def test_numbers_and_words(name, prediction, references, value):
    assert score(name, prediction, references) == value


# LooGLE


@pytest.mark.parametrize(
    ("prediction", "value"),
    [
        ('{"<mask-0>": "Bob", "<mask-1>": "Paris"}', 1.0),
        ("{'<mask-0>': 'Bob', '<mask-1>': 'Rome'}", 0.5),
        ("  {'<mask-0>': 'Bob'}", 0.5),
        ("__import__('os').getcwd()", 0.0),
        ("['Bob']", 0.0),
        ("{" * 9_000, 0.0),
        ("{'<mask-0>': {}", 0.0),
        ("{[]: 1}", 0.0),
    ],
)
def test_cloze(prediction, value):
    assert score("cloze", prediction, ('{"<mask-0>": "Bob", "<mask-1>": "Paris"}',)) == value
