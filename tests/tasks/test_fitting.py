"""Rows as long as they may be, whatever units cost."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tasks.toys import toy_tokenizer

from kvkeep.errors import TaskError
from kvkeep.tasks.fitting import Costs, Draft, TokenCounter, TooShort, fit, token_span
from kvkeep.tasks.protocols import Turn


class LetterTokenizer:
    """One token a letter."""

    def __init__(self):
        self.texts = 0

    def __call__(self, text, *, add_special_tokens=True, **kwargs):
        assert not add_special_tokens
        if isinstance(text, list):
            return {"input_ids": [list(one) for one in text]}
        self.texts += 1
        return {"input_ids": list(text), "offset_mapping": [(i, i + 1) for i in range(len(text))]}


@dataclass
class Letters:
    """A recipe of units that are so many letters long, and estimates that are off."""

    sizes: list[int]
    error: float = 1.0
    most: int | None = None
    least: int = 1
    built: list[int] = field(default_factory=list)

    def size(self, unit):
        return self.sizes[unit % len(self.sizes)]

    def cost(self, units):
        return int(sum(self.size(unit) for unit in range(units)) * self.error)

    def build(self, units):
        self.built.append(units)
        text = "".join("x" * self.size(unit) for unit in range(units))
        return Draft("head" + text, (Turn("ask", ("x",), "match_all", 5, answer_prefix="p"),), ((),))


FIXED = len("head") + len("ask") + len("\np") + 5


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    length=st.integers(60, 3000),
    error=st.sampled_from([1.0, 0.8, 1.3]),
)
def test_one_more_unit_would_be_too_long(sizes, length, error):
    recipe = Letters(sizes, error)
    row = fit(recipe, TokenCounter(LetterTokenizer()), length)
    assert row.total == FIXED + sum(recipe.size(unit) for unit in range(row.units)) <= length
    if error == 1.0:
        assert row.total + recipe.size(row.units) > length
        assert len(recipe.built) <= 3
    else:  # the next unit would not fit if it cost what is estimated
        assert row.total + recipe.size(row.units) * max(1.0, error) + 1 > length
    assert len(recipe.built) < 40


def test_estimates_that_contradict_themselves_end_at_a_row_that_fits():
    class Wild(Letters):
        def cost(self, units):
            return units * (2 if units % 2 else 30)

    recipe = Wild([10])
    row = fit(recipe, TokenCounter(LetterTokenizer()), 200)
    assert row.total <= 200
    assert len(recipe.built) < 40


def test_too_short_a_length_tells_what_is_needed():
    with pytest.raises(TooShort) as caught:
        fit(Letters([10]), TokenCounter(LetterTokenizer()), FIXED + 9)
    assert caught.value.needed == FIXED + 10
    assert fit(Letters([10]), TokenCounter(LetterTokenizer()), FIXED + 10).units == 1


def test_units_that_run_out_are_an_error_unless_they_fill_the_length():
    counter = TokenCounter(LetterTokenizer())
    assert fit(Letters([10], most=3), counter, FIXED + 30).units == 3
    with pytest.raises(TaskError, match=f"ask for at most {FIXED + 30} tokens"):
        fit(Letters([10], most=3), counter, FIXED + 31)


def test_turns_that_continue_add_up_and_others_do_not():
    counter = TokenCounter(LetterTokenizer())

    def turn(letters, continues=False):
        return Turn("q" * letters, ("a",), "match_all", 5, continues=continues)

    one = 10 + 1 + 5  # question, line break, answer
    assert counter.of_turns("text", (turn(10),)) == one
    assert counter.of_turns("text", (turn(10), turn(10), turn(10))) == one
    assert counter.of_turns("text", (turn(10), turn(10, True))) == one + 1 + one
    assert counter.of_turns("text", (turn(10), turn(10, True), turn(30))) == 36


def test_short_texts_are_tokenised_once():
    class Once(LetterTokenizer):
        def __call__(self, text, **kwargs):
            assert len(set(text)) == len(text)
            seen.extend(text)
            return super().__call__(text, **kwargs)

    seen = []
    counter = TokenCounter(Once())
    assert counter.counts(["a", "bb", "a"]) == [1, 2, 1]
    assert counter.counts(["bb", "ccc"]) == [2, 3]
    assert seen == ["a", "bb", "ccc"]


def test_costs_are_made_as_far_as_they_are_asked_for():
    asked = []

    def of(low, high):
        asked.append((low, high))
        return [2] * (min(high, 200) - low)

    costs = Costs(of)
    assert [costs.upto(units) for units in (0, 3, 150, 20)] == [0, 6, 300, 40]
    assert asked == [(0, 128), (128, 256)]


def test_a_span_of_letters_becomes_the_tokens_that_cover_it():
    offsets = [(0, 3), (3, 4), (4, 9), (9, 12)]
    assert token_span(offsets, (3, 9)) == (1, 3)
    assert token_span(offsets, (5, 6)) == (2, 3)
    assert token_span(offsets, (2, 10)) == (0, 4)
    for span in ((10, 15), (12, 13)):
        with pytest.raises(TaskError, match="another tokenizer"):
            token_span(offsets, span)


def test_letters_of_several_bytes_do_not_confuse_spans():
    text = "Ça coûte 20 €. The name is Zoë. Ω"
    offsets = TokenCounter(toy_tokenizer()).offsets(text)
    start = text.index("The name")
    low, high = token_span(offsets, (start, start + len("The name is Zoë.")))
    ids = toy_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert toy_tokenizer().decode(ids[low:high]).strip() == "The name is Zoë."


def test_a_tokenizer_without_offsets_is_refused():
    def slow(text, **kwargs):
        raise NotImplementedError("return_offset_mapping is not available")

    with pytest.raises(TaskError, match="use_fast"):
        TokenCounter(slow).offsets("text")
