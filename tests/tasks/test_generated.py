"""What holds for the rows of every generated task, whatever it asks for."""

import math

import pytest
from tasks.toys import needle_texts, total, toy_haystack, toy_questions, toy_samples, toy_task, toy_tokenizer

from kvkeep.errors import TaskError
from kvkeep.tasks.fitting import TokenCounter
from kvkeep.tasks.metrics import METRICS, score
from kvkeep.tasks.registry import available_tasks, expand

GENERATED = ("ruler", "niah", "key_value", "multi_turn")
TASKS = expand(GENERATED)
NEEDLELESS = ("ruler/cwe", "ruler/fwe")
LENGTHS = (512, 1024, 2048)


def unit_tokens(name, sample):
    """The tokens of the largest unit that a row of the task may be short of."""
    counter = TokenCounter(toy_tokenizer())
    if name in ("niah", "multi_turn") or sample.provider == "toy":
        units = [f" {word}" for word in set(toy_haystack().words)]
    elif name.startswith("ruler/qa"):
        units = [document for question in toy_questions() for document in (*question.gold, *question.others)]
    elif name == "ruler/cwe":
        units = [f" 1234. {word}" for word in sample.context.split()]
    elif name == "ruler/fwe":
        units = [f" {word}" for word in sample.context.split()]
    else:  # lines
        units = [f"\n{line}" for line in sample.context.split("\n")]
    return max(counter.counts(units)) * (1.25 if name == "ruler/niah_multikey_3" else 1) + 2


def least_of(error):
    return int(error.expected.split("at least ")[1].split()[0])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", TASKS)
def test_a_row_is_as_long_as_it_may_be(name, length, seed):
    """Or else the error names a length that is enough."""
    try:
        samples = toy_samples(name, length, 3, seed=seed)
    except TaskError as error:
        least = least_of(error)
        assert least > length
        samples, length = toy_samples(name, least, 3, seed=seed), least
    for sample in samples:
        assert sample.length == length
        assert length - unit_tokens(name, sample) <= total(sample) <= length


@pytest.mark.parametrize("name", TASKS)
def test_the_whole_prompt_fits_as_one_text_too(name):
    for sample in toy_samples(name, 1500, 3):
        said = sample.context
        for turn in sample.turns:
            said = (f"{said}\n" if turn.continues else sample.context) + f"{turn.question}\n{turn.answer_prefix}"
            tokens = toy_tokenizer()(said, add_special_tokens=False)["input_ids"]
            assert len(tokens) + turn.max_new_tokens <= 1500
            said += turn.references[0]


@pytest.mark.parametrize("name", TASKS)
def test_a_length_that_is_too_small_is_refused_with_the_least_one(name):
    with pytest.raises(TaskError, match=f"at least \\d+ tokens for {name}; received 40;") as caught:
        toy_samples(name, 40, 2)
    least = least_of(caught.value)
    assert all(total(sample) <= least for sample in toy_samples(name, least, 2))


@pytest.mark.parametrize("name", TASKS)
def test_rows_depend_on_task_length_seed_and_index_alone(name):
    rows = toy_samples(name, 1500, 4)
    assert toy_samples(name, 1500, 4) == rows
    assert len({sample.context for sample in rows}) == 4
    assert toy_samples(name, 1500, 2, first=2) == rows[2:]
    assert [sample.index for sample in rows] == [0, 1, 2, 3]
    other = toy_samples(name, 1500, 4, seed=1)
    assert not {sample.context for sample in rows} & {sample.context for sample in other}


def test_every_sample_of_a_run_has_a_key_of_its_own():
    keys = [
        sample.key
        for name in TASKS
        for length in (1500, 1600)
        for seed in (0, 1)
        for sample in toy_samples(name, length, 2, seed=seed)
    ]
    keys += [sample.key for sample in toy_samples("niah", 1500, 22)[2:]]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", TASKS)
def test_answers_stand_in_the_context_at_the_needles(name):
    for sample in toy_samples(name, 1500, 5):
        assert sample.task == name
        assert sample.provider
        for index, turn in enumerate(sample.turns):
            assert turn.question
            assert all(reference in sample.context for reference in turn.references)
            assert not any(reference in turn.question + turn.answer_prefix for reference in turn.references)
            needles = needle_texts(sample, index)
            assert bool(needles) == (name not in NEEDLELESS)
            assert name in NEEDLELESS or all(
                any(reference in needle for needle in needles) for reference in turn.references
            )


@pytest.mark.parametrize("name", TASKS)
def test_turns_can_be_scored(name):
    for turn in toy_samples(name, 1500)[0].turns:
        assert turn.metric in METRICS
        assert turn.max_new_tokens > 0
        assert score(turn.metric, "It is " + ", ".join(turn.references), turn.references) == 1.0
        assert score(turn.metric, "", turn.references) == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_contexts_end_where_a_question_can_follow(name):
    for sample in toy_samples(name, 1500, 2):
        assert sample.context.endswith("\n")
        assert not sample.turns[0].continues
        for turn in sample.turns:
            assert turn.question == turn.question.strip()
            assert turn.answer_prefix == turn.answer_prefix.strip()


@pytest.mark.parametrize("numbers", [{"length": 0}, {"length": 10.5}, {"count": -1}, {"first": -1}, {"length": True}])
def test_numbers_that_make_no_sense_are_refused_at_once(numbers):
    with pytest.raises(TaskError, match="whole number"):
        toy_task("ruler/vt").samples(toy_tokenizer(), **{"length": 1024, "count": 1, **numbers})


def test_no_samples_can_be_asked_for():
    assert toy_samples("ruler/vt", 10, 0) == []


def test_the_toys_are_what_the_tests_think():
    assert set(TASKS) == set(expand(GENERATED)) <= set(available_tasks())
    assert len(TASKS) == 16
    assert not toy_haystack().holds("-")
    assert math.isclose(len(toy_tokenizer()("1234567", add_special_tokens=False)["input_ids"]), 7)


def test_tasks_that_ask_for_a_list_say_so():
    """An answer to these may go on behind its first line."""
    lists = {name for name in expand(("ruler",)) if toy_samples(name, 1500, 1)[0].turns[0].wants_list}
    assert lists == {f"ruler/{name}" for name in ("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe")}
