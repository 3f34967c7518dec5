"""Problems, the grader of boxed answers, and pass@k."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
from fractions import Fraction
from importlib.resources import files
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import TaskError
from kvkeep.tasks import boxed
from kvkeep.tasks.boxed import as_number, normalise
from kvkeep.tasks.metrics import METRICS, score
from kvkeep.tasks.reasoning import (
    SETS,
    ReasoningTask,
    grade,
    grader,
    last_boxed,
    pass_at_k,
    read_reasoning,
    same_answer,
)

# the grader


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),  # an escaped brace without its fellow
        (r"boxed{7}", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", None),  # cut off: no answer
        (r"\boxed{{{}", None),
        ("\\boxed{1\\", None),
        ("no box", None),
        ("", None),
        ("boxed", None),
    ],
)
def test_the_last_box(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("042", "42"),
        ("42.", "42"),
        ("42.0", "42"),
        ("$42$", "42"),
        ("+42", "42"),
        ("-0", "0"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        (r"\frac{3}{4}", "0.75"),
        (r"\dfrac34", "3/4"),
        (r"-\tfrac{3}{4}", "-3/4"),
        (r"\frac{-3}{4}", "-0.75"),
        (r"\frac{6}{8}", r"\frac{3}{4}"),
        (r"2\frac{1}{2}", "5/2"),
        (r"-2\frac{1}{2}", "-2.5"),
        (".5", "0.5"),
        (r"x = 7", "7"),
        (r"a_{1}=7", "7"),
        (r"\text{ Evelyn }", "Evelyn"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"25\%", "25"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("{42}", "42"),
        (r"\frac{\pi}{2}", r"\dfrac{\pi}2"),
        ("−3", "-3"),
        (r"\$5", "5"),
    ],
)
def test_the_same_answer_in_other_words(one, other):
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("42", "43"),
        ("0.333", "1/3"),
        ("4/2", "1"),
        ("1/0", "1"),
        (r"\frac{1}{0}", "0"),
        ("1,23", "123"),  # no thousands
        ("(1,2)", "(2,1)"),
        ("x", "X"),
        ("", ""),  # nothing is no answer
        ("1e3", "1000"),  # exponents are not read
        ("²", "2"),
        ("٣", "3"),
        (r"\sqrt{2}", "1.41421"),
    ],
)
def test_other_answers(one, other, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # it may know better
    assert not same_answer(one, other)
    assert not same_answer(other, one)


@given(st.fractions(max_denominator=1000))
def test_fractions_keep_their_value(value):
    written = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert as_number(normalise(written)) == value
    assert same_answer(f"{value.numerator}/{value.denominator}", written)


@given(st.integers(0, 999))
def test_integers_of_aime_keep_their_value(value):
    assert grade(rf"\boxed{{{value:03d}}}", [str(value)]) == 1.0
    assert grade(rf"\boxed{{{value + 1}}}", [str(value)]) == 0.0


@given(st.text(alphabet="0123456789.,/\\{}$fractextboxed -", max_size=40), st.sampled_from(["42", r"\frac{1}{2}", "x"]))
def test_no_text_breaks_the_grader(text, reference):
    assert grade(text, [reference]) in (0.0, 1.0)
    assert grade(f"\\boxed{{{text}}}", [reference]) in (0.0, 1.0)


def test_any_of_several_references_will_do():
    assert score("boxed", r"\boxed{2}", ("1", r"The answer is \boxed{2}")) == 1.0
    assert score("boxed", r"\boxed{3}", ("1", "2")) == 0.0


def test_long_answers_are_compared_as_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    long = "1" * 5000
    assert same_answer(long, f" {long} ")
    assert not same_answer(long, f"{long}.0")


def test_math_verify_is_asked_where_it_is_installed(monkeypatch):
    asked = []

    def verify(gold, answer):
        asked.append((gold, answer))
        if "boom" in answer:
            raise ValueError("it cannot read this")
        return gold == "$x+1$"

    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(parse=str, verify=verify))
    assert same_answer("1+x", "x+1")
    assert asked == [("$x+1$", "$1+x$")]
    assert not same_answer("boom", "2")
    asked.clear()
    assert same_answer("2", "2.0")
    assert not same_answer("3", "2")
    assert asked == []  # the plain comparison has decided


def test_math_verify_is_left_alone_outside_the_main_thread(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(parse=str, verify=lambda *_: True))
    results = []
    thread = threading.Thread(target=lambda: results.extend([same_answer("1+x", "x+1"), grader()]))
    thread.start()
    thread.join()
    assert results == [False, "plain"]


def test_the_grader_names_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert grader() == "plain"
    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace())
    monkeypatch.setattr(boxed, "version", lambda _: "0.9.0")
    assert grader() == "plain, math-verify 0.9.0"


# pass@k


def test_pass_at_1_is_the_share_of_right_rollouts():
    assert pass_at_k([[1, 0, 1, 1], [0, 0, 0, 1]]) == 0.5
    assert pass_at_k([[True, False], [True]]) == 0.75


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 3), (4, 0, 2), (4, 4, 4), (6, 1, 6), (16, 3, 8)])
def test_pass_at_k_counts_all_draws(n, c, k):
    outcomes = [1] * c + [0] * (n - c)
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k([outcomes], k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("outcomes", "k", "said"),
    [
        ([], 1, "at least one problem"),
        ([[1, 0]], 3, "k from 1 to 2"),
        ([[1, 0]], 0, "k from 1 to 2"),
        ([[]], 1, "problem 0"),
        ([[1], [0.5]], 1, "scores of 0 or 1 for problem 1"),
    ],
)
def test_pass_at_k_refuses(outcomes, k, said):
    with pytest.raises(TaskError, match=said):
        pass_at_k(outcomes, k)


# the small set


def primes(limit):
    return [n for n in range(2, limit) if all(n % d for d in range(2, math.isqrt(n) + 1))]


def two_sixes():
    """Expected throws from nothing (a) and after one six (b): a = 1 + b/6 + 5a/6, b = 1 + 5a/6."""
    a = Fraction(7, 6) / (1 - Fraction(5, 6) - Fraction(5, 36))
    assert a == 1 + (1 + 5 * a / 6) / 6 + 5 * a / 6
    return a


def recurrence(count, first, second, step):
    values = [first, second]
    while len(values) < count:
        values.append(step(values[-2], values[-1]))
    return values[count - 1]


def paths(right, up, hole):
    ways = {(0, 0): 1}
    for x, y in itertools.product(range(right + 1), range(up + 1)):
        if (x, y) != (0, 0):
            ways[x, y] = 0 if (x, y) == hole else ways.get((x - 1, y), 0) + ways.get((x, y - 1), 0)
    return ways[right, up]


def heron(a, b, c):
    s = Fraction(a + b + c, 2)
    return math.isqrt(int(s * (s - a) * (s - b) * (s - c)))


def dice(sum_):
    throws = list(itertools.product(range(1, 7), repeat=3))
    return Fraction(sum(sum(throw) == sum_ for throw in throws), len(throws))


def shelves():
    """Orders of four books, and of two bars between the shelves, as distinct sequences."""
    return len(set(itertools.permutations("abcd||")))


def same_colour():
    draws = list(itertools.combinations("rrrrrbbbb", 3))
    return Fraction(sum(len(set(draw)) == 1 for draw in draws), len(draws))


RECOMPUTED = {
    "power-mod": lambda: pow(7, 2026, 1000),
    "divisors": lambda: sum(10_800 % d == 0 for d in range(1, 10_801)),
    "three-or-seven": lambda: sum((n % 3 == 0 or n % 7 == 0) and n % 21 != 0 for n in range(1, 1001)),
    "primes": lambda: sum(primes(60)),
    "shelves": shelves,
    "no-two-ones": lambda: sum("11" not in f"{n:08b}" for n in range(256)),
    "three-dice": lambda: dice(10),
    "two-heads": lambda: Fraction(sum(n.bit_count() == 2 for n in range(64)), 64),
    "factorial": lambda: next(n for n in itertools.count(1) if math.factorial(n) % 10**20 == 0),
    "zeros": lambda: sum(2026 // 5**p for p in range(1, 6)),
    "paths": lambda: paths(6, 4, (3, 2)),
    "digits": lambda: sum(map(int, str(2**50))),
    "recurrence": lambda: recurrence(8, 1, 2, lambda a, b: 3 * b - a),
    "unit-fractions": lambda: sum(
        x != 12 and 12 * x % (x - 12) == 0 and 12 * x // (x - 12) > 0 for x in range(13, 157)
    ),
    "hypotenuse": lambda: sum(a * a + b * b == 65 * 65 for a in range(1, 65) for b in range(a, 65)),
    "area": lambda: heron(13, 14, 15),
    "incircle": lambda: Fraction(2 * heron(8, 15, 17), 8 + 15 + 17),
    "even-sum": lambda: sum(sum(i + 1 for i in range(10) if n >> i & 1) % 2 == 0 for n in range(1024)),
    "derangements": lambda: sum(all(i != p for i, p in enumerate(q)) for q in itertools.permutations(range(6))),
    "dominoes": lambda: recurrence(12, 1, 2, lambda a, b: a + b),
    "remainders": lambda: next(n for n in itertools.count(1) if (n % 5, n % 7, n % 11) == (4, 3, 9)),
    "increasing": lambda: sum(str(n) == "".join(sorted(set(str(n)))) for n in range(100, 1000)),
    "distinct-sum": lambda: sum(sum(t) == 20 and len(set(t)) == 3 for t in itertools.product(range(1, 20), repeat=3)),
    "telescope": lambda: sum(Fraction(1, k * (k + 1)) for k in range(1, 100)),
    "roots": lambda: sum(x * x for x in range(100) if x * x - 17 * x + 60 == 0),
    "same-colour": same_colour,
    "squares-cubes": lambda: len({k**p for k in range(1, 23) for p in (2, 3) if k**p <= 500}),
    "gcd": lambda: math.gcd(2**30 - 1, 2**24 - 1),
    "base-seven": lambda: int("1234", 7),
    "handshakes": lambda: sum((b - a) % 10 not in (1, 9) for a, b in itertools.combinations(range(10), 2)),
    "two-sixes": two_sixes,
    "irrational": lambda: 99 + math.isqrt(2 * 70**2),  # (1 + sqrt 2)^6 = 99 + 70 sqrt 2
}
SMALL = json.loads((files("kvkeep.tasks") / "data" / "problems.json").read_text(encoding="utf-8"))["problems"]


def test_the_small_set_is_whole():
    assert len(SMALL) >= 20
    assert len({problem["id"] for problem in SMALL}) == len({problem["problem"] for problem in SMALL}) == len(SMALL)
    assert RECOMPUTED.keys() == {problem["id"] for problem in SMALL}
    values = [as_number(normalise(problem["answer"])) for problem in SMALL]
    assert all(value is not None and 0 <= value <= 999 for value in values)
    assert sum(value.denominator > 1 for value in values) >= 4
    assert all(problem["answer"] not in problem["problem"] or len(problem["answer"]) < 3 for problem in SMALL)


@pytest.mark.parametrize("problem", SMALL, ids=lambda problem: problem["id"])
def test_answers_are_recomputed(problem):
    assert as_number(normalise(problem["answer"])) == RECOMPUTED[problem["id"]]()


def test_the_small_set_needs_nothing_else():
    samples = read_reasoning("small")
    assert len(samples) == len(SMALL)
    sample = samples[3]
    assert (sample.task, sample.index, sample.provider, sample.seed) == ("reasoning/small", 3, "kvkeep", 0)
    assert sample.context == SMALL[3]["problem"]
    [turn] = sample.turns
    assert turn.question == "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert (turn.metric, turn.references, turn.max_new_tokens) == ("boxed", (SMALL[3]["answer"],), 2048)
    assert score(turn.metric, f"... \\boxed{{{SMALL[3]['answer']}}}", turn.references) == 1.0
    assert len({sample.key for sample in samples}) == len(samples)


# other sets


@pytest.mark.parametrize(
    "row",
    [
        {"Problem": "What is 1+1?", "Answer": 2, "ID": "2024-I-1"},  # Maxwell-Jia/AIME_2024
        {"problem": " What is 1+1? ", "answer": "2"},  # math-ai/aime25
        {"question": "What is 1+1?", "answer": 2.0},
    ],
)
def test_columns_of_the_published_sets(tmp_path, row):
    path = tmp_path / "aime.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    [sample] = read_reasoning("aime24", path=path, max_new_tokens=100)
    assert (sample.context, sample.provider) == ("What is 1+1?", str(path))
    assert (sample.turns[0].references, sample.turns[0].max_new_tokens) == (("2",), 100)
    assert sample.task == "reasoning/aime24"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "p"}, "an answer in .*aime.jsonl, line 1, column 'answer'; received no such column"),
        ({"problem": "p", "answer": None}, "column 'answer'; received NoneType None"),
        ({"problem": "p", "answer": ""}, "column 'answer'"),
        ({"problem": "p", "answer": True}, "column 'answer'"),
        ({"answer": 2}, "a text in .*column 'problem'"),
        ({"problem": 5, "answer": 2}, "column 'problem'; received int 5"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, said):
    path = tmp_path / "aime.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(TaskError, match=said):
        read_reasoning("aime25", path=path)


def gpqa_row(number):
    wrong = {f"Incorrect Answer {i}": f"wrong {number} {i}" for i in (1, 2, 3)}
    return {"Question": f"Which one, {number}?", "Correct Answer": f"right {number}", **wrong}


def test_choices_are_lettered_by_the_seed(tmp_path):
    path = tmp_path / "gpqa.json"
    path.write_text(json.dumps([gpqa_row(number) for number in range(40)]), encoding="utf-8")
    samples = read_reasoning("gpqa_diamond", path=path)
    for number, sample in enumerate(samples):
        [turn] = sample.turns
        [letter] = turn.references
        assert f"({letter}) right {number}\n" in turn.question
        assert [turn.question.count(f"({other}) ") for other in "ABCD"] == [1, 1, 1, 1]
        assert score(turn.metric, f"The correct answer is ({letter}).", turn.references) == 1.0
    letters = [sample.turns[0].references[0] for sample in samples]
    assert min(letters.count(letter) for letter in "ABCD") >= 4
    assert samples == read_reasoning("gpqa_diamond", path=path)
    other = read_reasoning("gpqa_diamond", path=path, seed=1)
    assert letters != [sample.turns[0].references[0] for sample in other]
    assert {sample.key for sample in samples}.isdisjoint(sample.key for sample in other)


def test_unknown_sets_get_near_names():
    with pytest.raises(TaskError, match="did you mean 'aime24'"):
        read_reasoning("aime2024")
    with pytest.raises(TaskError, match="at least 1 new token"):
        read_reasoning("small", max_new_tokens=0)


def test_the_sets_name_metrics_and_sources():
    for name, entry in SETS.items():
        assert entry.name == name
        assert entry.metric in METRICS
        assert entry.max_new_tokens > 0
        assert entry.source.startswith("hub:") or name == "small"


def test_a_set_is_a_task_in_its_own_order(tmp_path):
    known = read_reasoning("small")
    made = ReasoningTask("small")
    assert made.name == "reasoning/small"
    taken = list(made.samples(None, length=7, count=3, first=2))
    assert taken == list(known[2:5])
    assert all(turn.reasoned for sample in taken for turn in sample.turns)
    assert list(made.samples(None, length=0, count=0)) == []
    for first, count in ((0, len(known) + 1), (-1, 2), (len(known), 1)):
        with pytest.raises(TaskError, match=f"ask for at most {len(known)}"):
            list(made.samples(None, length=7, count=count, first=first))
    path = tmp_path / "mine.jsonl"
    path.write_text('{"problem": "1 + 1?", "answer": 2}\n')
    (only,) = ReasoningTask("aime25", path).samples(None, length=7, count=1)
    assert (only.task, only.turns[0].references, only.length) == ("reasoning/aime25", ("2",), 0)
