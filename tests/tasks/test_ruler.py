"""The form of RULER's thirteen tasks, their uniform places, and that distractors never collide with targets."""

import itertools
import re
from collections import Counter

import pytest
from tasks.toys import needle_texts, toy_haystack, toy_questions, toy_samples, toy_tokenizer

from kvkeep.errors import TaskError
from kvkeep.tasks import draws
from kvkeep.tasks.draws import Draws
from kvkeep.tasks.fitting import TokenCounter
from kvkeep.tasks.ruler import VARIANTS, RulerQa
from kvkeep.tasks.ruler.counting import _FrequentRow
from kvkeep.tasks.ruler.wording import OWN

NUMBER, PAIR = r"[1-9]\d{6}", r"[a-z]+-[a-z]+"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
KEYS = {"words": PAIR, "uuids": UUID}
VALUES = {"numbers": ("number", NUMBER), "uuids": ("code", UUID)}
INTRO = "Secret {kind}s are hidden in the text below. Remember them, for you will be asked about them.\n"


def needles_in(sample, variant):
    """Key and value of every needle of the context, in order."""
    kind, value = VALUES[variant.values]
    return re.findall(rf"A secret {kind} of ({KEYS[variant.keys]}) is ({value})\.", sample.context)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_form_of_needle_tasks(name):
    variant = VARIANTS[name]
    kind, _ = VALUES[variant.values]
    for sample in toy_samples(f"ruler/{name}", 1024, 4):
        (turn,) = sample.turns
        assert turn.max_new_tokens == 128
        assert turn.metric == "match_all"
        assert sample.context.startswith(INTRO.format(kind=kind))
        assert sample.context.endswith("\n")
        assert "\n\n" not in sample.context
        found = needles_in(sample, variant)
        many = len(turn.references) > 1
        verb, plural = ("are all", "s") if many else ("is", "")
        asked = re.fullmatch(
            rf"What {verb} the secret {kind}{plural} of (.*) according to the text above\?", turn.question
        )
        keys = re.split(", and |, ", asked[1])
        assert turn.answer_prefix == f"The secret {kind}{plural} of {asked[1]} {'are' if many else 'is'}"
        assert len(keys) == variant.query_count
        assert len(turn.references) == variant.query_count * variant.value_count
        if variant.among != "needles":
            assert len(found) == variant.key_count * variant.value_count
        # References and needles come in the order of the keys that are asked for.
        expected = [f"A secret {kind} of {key} is {value}." for key, value in _pairs(keys, turn.references)]
        assert [text.strip() for text in needle_texts(sample)] == expected
        assert all((key, value) in found for key, value in _pairs(keys, turn.references))


def _pairs(keys, references):
    each = len(references) // len(keys)
    return [(keys[index // each], reference) for index, reference in enumerate(references)]


def test_what_needles_are_hidden_in():
    noise = toy_samples("ruler/niah_single_1")[0]
    assert noise.provider == "generated"
    lines = noise.context.split("\n")[1:-1]
    assert Counter(lines).most_common(1)[0] == (OWN.noise, len(lines) - 1)
    needles = toy_samples("ruler/niah_multikey_2")[0]
    assert len(needles_in(needles, VARIANTS["niah_multikey_2"])) == len(needles.context.split("\n")) - 2 > 20
    prose = toy_samples("ruler/niah_single_2")[0]
    assert prose.provider == "toy"
    words = re.sub(rf"A secret number of {PAIR} is {NUMBER}\. ?", "", prose.context.split("\n")[1]).split()
    assert " ".join(words) in " ".join([*toy_haystack().words, *toy_haystack().words])


def test_needles_in_prose_stand_between_sentences():
    for sample in toy_samples("ruler/niah_multikey_1", 1024, 20):
        body = sample.context.removeprefix(INTRO.format(kind="number")).removesuffix("\n")
        parts = re.split(rf"(?:^| )A secret number of {PAIR} is {NUMBER}\.(?: |$)", body)
        # Only a needle at the very end may stand behind half a sentence, where the haystack was cut off.
        assert all(part.endswith(".") for part in parts[:-1] if part) or (not parts[-1] and parts[-2])
        assert all(part[0].isupper() for part in parts if part)


@pytest.mark.parametrize("name", VARIANTS)
def test_keys_and_values_are_all_different_even_where_words_are_few(name, monkeypatch):
    """With six pairs of words there are far more keys than words can name."""
    monkeypatch.setattr(draws, "adjectives", lambda: ("big", "old"))
    monkeypatch.setattr(draws, "nouns", lambda: ("bell", "cart", "door"))
    variant = VARIANTS[name]
    for sample in toy_samples(f"ruler/{name}", 1500, 3):
        found = needles_in(sample, variant)
        values = [value for _, value in found]
        keys = {key for key, _ in found}
        assert len(set(values)) == len(values)
        assert len(keys) == len(found) // variant.value_count
        assert not keys & set(values)
        assert all(sample.context.count(reference) == 1 for reference in sample.turns[0].references)


def test_a_value_that_stands_in_the_haystack_is_not_drawn(monkeypatch):
    stack = toy_haystack()
    taken, free = stack.words[0], "1234567"
    offered = iter([taken, taken, free])
    monkeypatch.setattr("kvkeep.tasks.ruler.niah.number", lambda rng: next(offered))
    assert toy_samples("ruler/niah_single_2")[0].turns[0].references == (free,)


def chi_square(fractions, bins=5):
    counts = Counter(min(bins - 1, int(fraction * bins)) for fraction in fractions)
    expected = len(fractions) / bins
    return sum((counts[index] - expected) ** 2 / expected for index in range(bins))


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "qa_1"])
def test_the_place_of_the_gold_needle_is_uniform(name):
    """Over 200 rows, at p = .001 (18.5 with four degrees of freedom)."""
    fractions = []
    length = 900 if name == "qa_1" else 500
    for seed in range(5):
        for sample in toy_samples(f"ruler/{name}", length, 40, seed=seed):
            start, end = sample.turns[0].needles[0]
            tokens = len(toy_tokenizer()(sample.context, add_special_tokens=False)["input_ids"])
            intro = sample.context.index("Document 1:") if name == "qa_1" else sample.context.index("\n")
            skip = len(toy_tokenizer()(sample.context[:intro], add_special_tokens=False)["input_ids"])
            room = tokens - skip - (end - start)
            fractions.append(min(1.0, max(0.0, (start - skip) / room)))
    assert chi_square(fractions) < 18.5


def test_the_form_of_variable_tracking():
    for sample in toy_samples("ruler/vt", 1200, 4):
        (turn,) = sample.turns
        assert turn.max_new_tokens == 30
        value = re.fullmatch(
            r"Which variables of the text above are set to (\d{5}), be it directly or through others\?", turn.question
        )[1]
        assert turn.answer_prefix == f"These 5 variables are set to {value}:"
        names = turn.references
        assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
        chain = [f"SET {names[0]} TO {value}"]
        chain += [f"SET {name} TO {earlier}" for earlier, name in itertools.pairwise(names)]
        assert needle_texts(sample) == chain
        intro = OWN.variables.intro
        example, task = sample.context.split(intro)[1:]
        lines = task.rstrip("\n").split("\n")
        assert [line for line in lines if line != OWN.noise] == chain
        # The example is solved, and has names and a number of its own.
        solved = re.search(
            r"be it directly or through others\? These 5 variables are set to (\d{5}): (.*)\n\n$", example
        )
        assert solved[1] != value
        assert not set(solved[2].split()) & set(names)
        assert re.findall(r"SET ([A-Z]{3}) TO", example) == solved[2].split()
        assert f"SET {solved[2].split()[0]} TO {solved[1]}\n" in example


def test_the_example_of_a_long_row_is_as_long_as_rulers():
    def lines(length):
        sample = toy_samples("ruler/vt", length)[0]
        return sample.context.split(OWN.variables.intro)[1].count(OWN.noise)

    assert (lines(1200), lines(4096)) == (6, 14)


@pytest.mark.parametrize(
    ("length", "often", "seldom", "example"), [(1500, 6, 1, (20, 3, 1)), (6000, 30, 3, (40, 10, 3))]
)
def test_the_form_of_common_words(length, often, seldom, example):
    for sample in toy_samples("ruler/cwe", length, 2):
        (turn,) = sample.turns
        assert turn.max_new_tokens == 120
        assert turn.question == "Which 10 words come most often in the list above?"
        assert turn.answer_prefix == "The 10 words that come most often are:"
        shown, listed = sample.context.split(OWN.common.intro)[1:]
        items = re.findall(r"(\d+)\. ([a-z]+)", listed)
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
        counts = Counter(word for _, word in items)
        assert {word for word, count in counts.items() if count == often} == set(turn.references)
        assert {count for word, count in counts.items() if word not in turn.references} == {seldom}
        assert len(turn.references) == 10
        for word in turn.references:
            assert not any(word in other or other in word for other in counts if other != word)
        words, often_here, seldom_here = example
        before, answer = shown.split(f"\n{turn.question} {turn.answer_prefix} ")
        solved = Counter(word for _, word in re.findall(r"(\d+)\. ([a-z]+)", before))
        assert sorted(set(solved.values())) == [seldom_here, often_here]
        assert len(solved) == words
        top = [word for _, word in re.findall(r"(\d+)\. ([a-z]+)", answer)]
        assert set(top) == {word for word, count in solved.items() if count == often_here}
        assert not any(word in other or other in word for word in turn.references for other in solved)


def test_common_words_go_on_with_made_up_ones(monkeypatch):
    monkeypatch.setattr("kvkeep.tasks.ruler.counting.adjectives", lambda: ("big", "old"))
    monkeypatch.setattr(
        "kvkeep.tasks.ruler.counting.nouns", lambda: tuple(f"{a}{b}{a}{b}" for a in "abcdef" for b in "ghijk")
    )
    sample = toy_samples("ruler/cwe", 1500)[0]
    counts = Counter(word for _, word in re.findall(r"(\d+)\. ([a-z]+)", sample.context.split(OWN.common.intro)[2]))
    assert len(counts) > 40
    assert set(counts.values()) == {1, 6}


def test_the_form_of_frequent_words():
    for sample in toy_samples("ruler/fwe", 1200, 4):
        (turn,) = sample.turns
        assert turn.max_new_tokens == 50
        assert turn.question == OWN.frequent.question
        assert sample.context.startswith(OWN.frequent.intro)
        words = sample.context[len(OWN.frequent.intro) :].split()
        assert all(re.fullmatch(r"[a-z]{6}|\.\.\.", word) for word in words)
        ranked = Counter(words).most_common()
        assert [word for word, _ in ranked[:4]] == ["...", *turn.references]
        # How often each rank comes follows from the scale, up to the occurrences of the last step.
        scale = ranked[0][1] * 1.6449
        for rank, (_, count) in enumerate(ranked[:6], 1):
            assert scale / (1.6449 * rank**2) - 1 <= count <= (scale + 1.6449) / (1.6449 * rank**2) + 1


def test_ranks_never_tie_at_the_top():
    row = _FrequentRow(TokenCounter(toy_tokenizer()), Draws("ruler/fwe", 1024, 0, 0), OWN.frequent)
    for units in range(row.least, row.least + 300):
        counts = Counter(row.build(units).context.removeprefix(OWN.frequent.intro).split())
        first, second, third, fourth, fifth = (count for _, count in counts.most_common(5))
        assert first > second > third > fourth > fifth


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_the_form_of_questions_on_documents(name):
    samples = toy_samples(f"ruler/{name}", 1200, 4)
    for index, sample in enumerate(samples):
        question = toy_questions(int(name[-1]))[index]
        (turn,) = sample.turns
        assert (turn.metric, turn.max_new_tokens) == ("match_any", 32)
        assert turn.question.endswith(f"\n\nQuestion: {question.question}")
        assert turn.answer_prefix == "Answer:"
        assert turn.references == question.references
        assert sample.provider == "toy questions"
        body = sample.context.removeprefix(OWN.documents.intro).removesuffix("\n\n")
        documents = [re.fullmatch(r"Document (\d+):\n(.*)", part, re.S) for part in body.split("\n\n")]
        assert [int(found[1]) for found in documents] == list(range(1, len(documents) + 1))
        texts = [found[2] for found in documents]
        assert len(set(texts)) == len(texts)
        assert set(question.gold) <= set(texts)
        # Those of the same article come first, in any order.
        assert set(question.others) <= set(texts) or set(texts) <= {*question.gold, *question.others}
        assert [text.strip() for text in needle_texts(sample)] == list(question.gold)


def test_questions_and_documents_that_run_out_are_named():
    with pytest.raises(
        TaskError, match="at most 40 samples of ruler/qa_1, which has as many questions; received 2 from 39"
    ):
        toy_samples("ruler/qa_1", 1200, 2, first=39)
    with pytest.raises(TaskError, match=r"ask for at most \d+ tokens, or pass more text"):
        toy_samples("ruler/qa_1", 100_000)
    assert toy_samples("ruler/qa_1", 100_000, 0, questions=()) == []


def test_without_questions_the_set_that_comes_along_is_read(monkeypatch):
    asked = []
    monkeypatch.setattr("kvkeep.tasks.qa.read_squad", lambda path: asked.append(("squad", path)) or toy_questions())
    monkeypatch.setattr("kvkeep.tasks.qa.read_hotpot", lambda path: asked.append(("hotpot", path)) or toy_questions())
    for variant, path in (("qa_1", None), ("qa_2", "file.json")):
        assert len(list(RulerQa(variant, path=path).samples(toy_tokenizer(), length=1024, count=1))) == 1
    assert asked == [("squad", None), ("hotpot", "file.json")]


GOLDEN = {
    "niah_single_1": "7480507",
    "niah_single_2": "2890867",
    "niah_multikey_2": "8632206",
    "niah_multikey_3": "56c2bee7-23fb-44a0-96e3-b49f48a87c43",
    "niah_multiquery": "6573735",
    "vt": "NOTAO",
    "cwe": "monk",
    "fwe": "hcxpfz",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_drawn_is_golden(name):
    """Rows of one seed stay what they are: results name the seed, not the row."""
    assert toy_samples(f"ruler/{name}", 2048)[0].turns[0].references[0] == GOLDEN[name]
