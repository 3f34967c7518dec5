"""The grid of lengths and depths."""

import re

import pytest
from tasks.toys import needle_texts, toy_samples, toy_tokenizer

from kvkeep.errors import TaskError

FACT = r"The ferryman of ([A-Z][a-z]+) keeps his savings in a ([a-z]+ [a-z]+) under the stairs\."


def test_the_form_of_a_sample():
    for sample in toy_samples("niah", 800, 6):
        (turn,) = sample.turns
        town, thing = re.findall(FACT, sample.context)[0]
        assert len(re.findall(FACT, sample.context)) == 1
        assert turn.references == (thing,)
        assert turn.question == f"In what does the ferryman of {town} keep his savings? Answer from the text above."
        assert turn.answer_prefix == f"The ferryman of {town} keeps his savings in a"
        assert re.fullmatch(FACT, needle_texts(sample)[0].strip())
        assert sample.context.count(town) == 1
        assert thing[0] not in "aeiou"


def test_depths_come_in_turn_and_are_told():
    samples = toy_samples("niah", 800, 13)
    assert [dict(sample.options)["depth"] for sample in samples] == [*range(0, 101, 10), 0, 10]
    assert samples[0].key != samples[11].key
    assert "depth=100" in samples[10].key
    assert toy_samples("niah", 800, 3, depths=(12.5,))[2].options == (("depth", 12.5),)


@pytest.mark.parametrize("length", [800, 2000])
def test_the_needle_stands_behind_the_last_sentence_before_its_depth(length):
    for sample in toy_samples("niah", length, 11):
        depth = dict(sample.options)["depth"]
        ((start, end),) = sample.turns[0].needles
        tokens = len(toy_tokenizer()(sample.context, add_special_tokens=False)["input_ids"])
        place = 100 * start / (tokens - (end - start))
        before, after = sample.context.split("The ferryman of", 1)
        if depth == 0:
            assert before == "Read this text carefully.\n\n"
        elif depth == 100:
            assert after.endswith("under the stairs.\n\n")
        else:
            assert before.endswith(". ")
            assert depth - 100 * 140 / tokens <= place <= depth + 100 * 16 / tokens  # a sentence, and the intro


@pytest.mark.parametrize("depths", [(), (-1,), (50, 101)])
def test_depths_that_are_none_are_refused(depths):
    with pytest.raises(TaskError, match="per cent"):
        toy_samples("niah", 800, depths=depths)
