"""Randomness that depends on the row alone, and strings that are all different."""

import re
from random import Random

import pytest

from kvkeep.errors import TaskError
from kvkeep.tasks import draws
from kvkeep.tasks.draws import Distinct, Draws


def test_word_lists_hold_single_words_each_once():
    words = [*draws.adjectives(), *draws.nouns()]
    assert len(set(words)) == len(words) > 1400
    assert all(re.fullmatch("[a-z]{2,}", word) for word in words)
    assert list(draws.adjectives()) == sorted(draws.adjectives())
    assert list(draws.nouns()) == sorted(draws.nouns())


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (draws.number, r"[1-9]\d{6}"),
        (draws.uuid4, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
        (draws.word_pair, r"[a-z]+-[a-z]+"),
        (draws.made_up_pair, r"[a-z]{6,}-[a-z]{6,}"),
        (draws.made_up_word, r"[a-z]{7,}"),
        (draws.made_up_name, r"[A-Z][a-z]{4,}"),
    ],
)
def test_what_is_drawn_has_its_form(make, pattern):
    rng = Random(3)
    assert all(re.fullmatch(pattern, make(rng)) for _ in range(200))


def test_a_stream_is_the_same_at_each_call_and_like_no_other():
    row = Draws("task", 1024, 0, 7)
    first = row.stream("facts").random()
    assert row.stream("facts").random() == first
    others = [
        row.stream("places"),
        Draws("other", 1024, 0, 7).stream("facts"),
        Draws("task", 1025, 0, 7).stream("facts"),
        Draws("task", 1024, 1, 7).stream("facts"),
        Draws("task", 1024, 0, 8).stream("facts"),
    ]
    assert first not in {other.random() for other in others}


def test_streams_are_golden():
    """Rows of one seed must be the same on every machine and in every later version."""
    rng = Draws("ruler/vt", 4096, 42, 0).stream("facts")
    assert rng.getrandbits(32) == 0x1CC24949


def test_distinct_strings_are_all_different():
    rng = Random(0)
    distinct = Distinct(rng, forbidden=lambda text: text == "7")
    assert sorted(distinct.draw(lambda rng: str(rng.randrange(10))) for _ in range(9)) == list("012345689")


def test_where_strings_run_out_the_spare_ones_come_and_then_an_error():
    distinct = Distinct(Random(0))
    drawn = [distinct.draw(lambda rng: rng.choice("ab"), lambda rng: rng.choice("cd")) for _ in range(4)]
    assert sorted(drawn) == list("abcd")
    assert set(drawn[2:]) == set("cd")
    with pytest.raises(TaskError, match="shorter length"):
        distinct.draw(lambda rng: rng.choice("ab"))
