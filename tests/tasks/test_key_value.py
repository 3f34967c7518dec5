"""Look-up in a JSON object, several questions of one context."""

import json
import re

import pytest
from tasks.toys import needle_texts, toy_samples

from kvkeep.errors import TaskError


def held(sample):
    return json.loads(sample.context[sample.context.index("{") :])


def test_the_context_is_json_and_each_turn_asks_for_one_of_its_keys():
    for sample in toy_samples("key_value", 3000, 3):
        pairs = held(sample)
        assert len(sample.turns) == 5
        assert len({*pairs, *pairs.values()}) == 2 * len(pairs)
        for index, turn in enumerate(sample.turns):
            key = re.fullmatch(r'Which value does the JSON object above hold for the key "(.*)"\?', turn.question)[1]
            assert turn.references == (pairs[key],)
            assert turn.answer_prefix == f'"{key}":'
            assert not turn.continues
            assert (turn.metric, turn.max_new_tokens) == ("match_all", 64)
            assert f'"{key}": "{pairs[key]}"' in needle_texts(sample, index)[0]
        assert len({turn.question for turn in sample.turns}) == 5


def test_answers_are_spread_over_the_object():
    parts = []
    for sample in toy_samples("key_value", 6000, 6):
        pairs = list(held(sample).values())
        places = [pairs.index(turn.references[0]) for turn in sample.turns]
        for part, place in enumerate(sorted(places)):
            assert part / 5 - 1 / 20 <= place / len(pairs) <= (part + 1) / 5 + 1 / 20
        parts.append([place * 5 // len(pairs) for place in places])
    assert len({tuple(part) for part in parts}) > 1  # asked in any order


def test_the_number_of_questions_is_an_option():
    (sample,) = toy_samples("key_value", 1024, questions=1)
    assert len(sample.turns) == 1
    assert sample.key == "key_value/1024/0/questions=1/0"
    assert toy_samples("key_value", 1024)[0].key == "key_value/1024/0/0"
    with pytest.raises(TaskError, match="at least one question"):
        toy_samples("key_value", 1024, questions=0)


def test_a_row_may_hold_nothing_but_what_is_asked_for():
    with pytest.raises(TaskError) as caught:
        toy_samples("key_value", 200)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert len(held(toy_samples("key_value", least)[0])) == 5
