"""The demo's promises that need no model: each fact once, spread, none at the end, no answer in its question."""

from itertools import pairwise

import pytest

from kvkeep.data import check_text, load_demo

DEMO = load_demo()


def test_the_demo_is_whole():
    assert DEMO.title == "A week at Port Ellery"
    assert DEMO.licence == "Apache-2.0"
    assert 7_000 < len(DEMO.text) < 9_000
    assert "\n\n" in DEMO.text
    assert DEMO.text.isascii()
    assert len(DEMO.questions) == 12
    assert len({question.question for question in DEMO.questions}) == 12


@pytest.mark.parametrize("question", DEMO.questions, ids=lambda question: question.answers[0])
def test_each_fact_stands_once_where_it_is_said_to_stand(question):
    first = question.answers[0]
    assert DEMO.text.count(first) == 1
    assert question.depth == round(DEMO.text.index(first) / len(DEMO.text), 4)
    assert all(DEMO.text.count(answer) <= 1 for answer in question.answers)
    assert question.is_right(question.reference)
    assert not question.is_right(question.question)


def test_the_facts_are_spread_and_none_is_at_the_end():
    depths = [question.depth for question in DEMO.questions]
    assert depths == sorted(depths)
    assert 0.02 < depths[0] < 0.05
    assert 0.80 < depths[-1] < 0.85
    gaps = [b - a for a, b in pairwise(depths)]
    assert min(gaps) > 0.05
    assert max(gaps) < 0.10


def test_an_answer_counts_as_a_whole_word_in_any_case():
    room = next(question for question in DEMO.questions if question.answers[0] == "58")
    assert room.is_right("It was Room 58.")
    assert room.is_right("FIFTY-EIGHT")
    assert not room.is_right("It was room 158.")
    assert not room.is_right("It was the 58th room.")


def test_the_check_text_is_one_paragraph_of_prose():
    text = check_text()
    assert text.startswith("For two days we made our way up")
    assert "\n" not in text
    assert len(text) > 3_000
