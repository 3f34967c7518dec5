"""Follow-ups that hang on the answer before them, and a question on the text itself."""

import re

import pytest
from tasks.toys import needle_texts, toy_haystack, toy_samples

from kvkeep.errors import TaskError
from kvkeep.tasks.text import Haystack

WON = r"The ([a-z]+ [a-z]+) was won by ([A-Z][a-z]+) ([A-Z][a-z]+)\."
LIVES = r"([A-Z][a-z]+) ([A-Z][a-z]+) lives in the town of ([A-Z][a-z]+)\."


def test_the_form_of_a_sample():
    for sample in toy_samples("multi_turn", 1500, 5):
        won = {prize: (first, last) for prize, first, last in re.findall(WON, sample.context)}
        lives = {(first, last): town for first, last, town in re.findall(LIVES, sample.context)}
        assert len(won) == len(lives) == 3
        assert [turn.continues for turn in sample.turns] == [False, True] * 3 + [False]
        for index in range(0, 6, 2):
            who, town = sample.turns[index : index + 2]
            prize = re.fullmatch(r"Who won the ([a-z]+ [a-z]+), according to the text above\?", who.question)[1]
            assert who.references == (won[prize][1],)
            assert who.answer_prefix == f"The {prize} was won by"
            assert town.question == "And in which town does that person live?"
            assert town.references == (lives[won[prize]],)
            assert town.answer_prefix == "That person lives in the town of"
            person = " ".join(won[prize])
            assert needle_texts(sample, index)[0].strip() == f"The {prize} was won by {person}."
            second = [text.strip() for text in needle_texts(sample, index + 1)]
            assert second == [
                f"{person} lives in the town of {lives[won[prize]]}.",
                f"The {prize} was won by {person}.",
            ]


def test_no_name_is_found_within_another_one():
    for sample in toy_samples("multi_turn", 2500, 10, people=12):
        names = [turn.references[0] for turn in sample.turns[:-1]]
        assert len(names) == 24
        for name in names:
            assert not toy_haystack().holds(name)
            assert sum(name.lower() in other.lower() for other in names) == 1


def test_a_name_within_another_one_is_not_drawn(monkeypatch):
    offered = iter(["Tolvar", "Olva", "Utolvarn", "Tolvar", "Drimek"])
    monkeypatch.setattr("kvkeep.tasks.multi_turn.made_up_name", lambda rng: next(offered))
    (sample,) = toy_samples("multi_turn", 1024, people=1)
    assert [turn.references for turn in sample.turns[:2]] == [("Tolvar",), ("Drimek",)]


def test_the_last_question_is_on_a_sentence_of_the_text_itself():
    for sample in toy_samples("multi_turn", 1500, 5):
        turn = sample.turns[-1]
        begin = re.search(r'that begins with these words: "(.*)"\?', turn.question)[1]
        assert len(begin.split()) == 9
        assert turn.answer_prefix == begin
        assert len(turn.references[0].split()) == 4
        assert sample.context.count(begin) == 1
        assert f"{begin} {turn.references[0]}" in sample.context
        assert toy_haystack().holds(needle_texts(sample, 6)[0].strip())


def test_the_number_of_people_is_an_option():
    (sample,) = toy_samples("multi_turn", 1024, people=1)
    assert len(sample.turns) == 3
    assert sample.options == (("people", 1),)
    for people in (0, 13):
        with pytest.raises(TaskError, match="1 to 12 people"):
            toy_samples("multi_turn", 1024, people=people)


def test_a_text_without_long_sentences_is_refused():
    short = Haystack.of("short", ["Too short to ask about. " * 50])
    with pytest.raises(TaskError, match="sentences of 13 words or more"):
        toy_samples("multi_turn", 800, haystack=short)
