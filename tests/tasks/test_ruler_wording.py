"""Own words, one's own, and the original ones, which a stand-in for lm-eval has where lm-eval 0.4.13 has them."""

import dataclasses
import itertools
import random
import re
import sys
from types import ModuleType

import numpy as np
import pytest
from tasks.toys import needle_texts, toy_samples

from kvkeep.errors import TaskError
from kvkeep.tasks.registry import expand
from kvkeep.tasks.ruler import OWN
from kvkeep.tasks.ruler.compat import read
from kvkeep.tasks.ruler.wording import wording


def generate_chains(num_chains, num_hops, is_icl=False):
    """Draws from the global generators, as the original does."""
    names = ["".join(random.choices("ABCDEFGH", k=5)) for _ in range(num_hops + 1)]
    lines = [f"let {names[0]} be {np.random.randint(10000, 99999)}"]  # noqa: NPY002
    lines += [f"let {later} be as {earlier} " for earlier, later in itertools.pairwise(names)]
    return [names] * num_chains, [lines] * num_chains


def modules():
    return {
        "niah_utils": {
            "TEMPLATE": "Some odd {type_needle_v} are in this text. It has answers on the {type_needle_v}.\n{context}\n"
            "What are all the odd {type_needle_v} for {query} in this text?"
        },
        "prepare_niah": {
            "NEEDLE": "One odd {type_needle_v} for {key} is: {value}.",
            "get_haystack": lambda type_haystack: {"repeat": "Hum hum. Ho ho."}[type_haystack],
        },
        "vt_utils": {
            "CONFIG": {
                "variable_tracking": {
                    "template": "Track them.\n\n{context}\nQuestion: Which variables are {query}?",
                    "answer_prefix": " Answer: The {num_v} variables that are {query} are: ",
                }
            },
            "generate_chains": generate_chains,
        },
        "cwe_utils": {
            "CONFIG": {"template": "A list.\n{context}\nQuestion: Top 10?", "answer_prefix": " Answer: They are:"}
        },
        "fwe_utils": {
            "CONFIG": {"template": "A code. {context}\nQuestion: Top three?", "answer_prefix": " Answer: These:"}
        },
        "qa_utils": {
            "CONFIG": {
                "template": "Reply.\n\nSome documents.\n\n{context}\n\nReply.\n\nQuestion: {query}",
                "answer_prefix": "Answer:",
            },
            "DOCUMENT_PROMPT": "Document {i}:\n{document}",
        },
    }


def install(monkeypatch, contents):
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ruler"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"lm_eval.tasks.ruler.{name}", module)


@pytest.fixture
def lm_eval(monkeypatch):
    install(monkeypatch, modules())


def test_strings_are_read_where_lm_eval_keeps_them(lm_eval):
    words = read()
    assert words.one.intro == "A odd {kind} is in this text. It has answer on the {kind}.\n"
    assert words.one.question == "What is the odd {kind} for {query} in this text?"
    assert words.one.prefix == "The odd {kind} for {query} in this text is"
    assert words.many.intro == "Some odd {kinds} are in this text. It has answers on the {kinds}.\n"
    assert words.many.question == "What are all the odd {kinds} for {query} in this text?"
    assert words.many.prefix == "The odd {kinds} for {query} in this text are"
    assert words.needle == "One odd {kinds} for {key} is: {value}."
    assert words.noise == "Hum hum. Ho ho."
    assert (words.assign, words.copy) == ("let {name} be {value}", "let {name} be as {source} ")
    assert words.variables.question == "Question: Which variables are {value}?"
    assert words.variables.prefix == "Answer: The {count} variables that are {value} are:"
    assert (words.frequent.intro, words.frequent.gap) == ("A code. ", "\n")
    assert (words.documents.gap, words.documents.question) == ("\n\n", "Reply.\n\nQuestion: {query}")
    assert words.document == "Document {number}:\n{document}"


def test_reading_leaves_the_global_generators_as_they_were(lm_eval):
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    read()
    drawn = random.random(), np.random.random()  # noqa: NPY002
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert drawn == (random.random(), np.random.random())  # noqa: NPY002


@pytest.mark.parametrize("name", expand(["ruler"]))
def test_every_task_speaks_in_the_original_words(lm_eval, name):
    (own,), (compat,) = toy_samples(name, 2048), toy_samples(name, 2048, wording="compat")
    assert compat.key != own.key
    assert compat.options == (("wording", "compat"),)
    assert compat.turns[0].references == own.turns[0].references  # only the words differ
    said = compat.context + compat.turns[0].question + compat.turns[0].answer_prefix
    assert not re.search(r"[{}]", said)
    if "niah" in name:
        assert all(needle.strip().startswith("One odd ") for needle in needle_texts(compat))
    if name == "ruler/vt":
        assert needle_texts(compat)[1].startswith(f"let {compat.turns[0].references[1]} be as ")


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "lm_eval":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(TaskError, match=r'pip install "lm-eval\[ruler\]"'):
        toy_samples("ruler/vt", wording="compat")


@pytest.mark.parametrize(
    "change",
    [
        ("niah_utils", {"TEMPLATE": "What {context} now?"}),
        ("niah_utils", {"TEMPLATE": "No place for it. What are all the {query}?"}),
        ("vt_utils", {"CONFIG": {}}),
        ("vt_utils", {"generate_chains": lambda chains, hops: ([["A"]], [["A"]])}),
        ("vt_utils", {"generate_chains": lambda chains, hops: ([["AB", "CD"]], [["AB is it", "CD is it"]])}),
    ],
)
def test_an_lm_eval_that_has_changed_is_refused(monkeypatch, change):
    contents = modules()
    contents[change[0]].update(change[1])
    install(monkeypatch, contents)
    with pytest.raises(TaskError, match=r"lm-eval\[ruler\]==0.4.13"):
        read()


def test_a_wording_of_ones_own():
    words = dataclasses.replace(OWN, name="mine", noise="Nothing to see.")
    sample = toy_samples("ruler/niah_single_1", 600, wording=words)[0]
    assert "Nothing to see.\nNothing to see." in sample.context
    assert sample.options == (("wording", "mine"),)


def test_an_unknown_wording_is_refused():
    assert wording("own") is OWN
    with pytest.raises(TaskError, match="'own' or 'compat'"):
        toy_samples("ruler/vt", wording="original")
