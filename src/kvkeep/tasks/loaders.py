"""Published sets as samples, from rows `context, question, answer_prefix, answer, task, max_new_tokens`.

    load_samples("hub:simonjegou/ruler:4096:test")        # every task of the set
    load_samples("my_rows.jsonl", metric="f1")            # rows of one's own; the metric scores all of them
    published_tasks("hub:Xnhyacinth/LongBench:qasper")    # as tasks, which cut contexts to a length

That is the form in which kvpress has them on the hub. Rows of one context become one sample with a turn for each row,
as in kvpress's runner; each turn is asked of the context alone. The metric follows from the task's name, by the table
in `published.py`.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from kvkeep.errors import TaskError, near_names
from kvkeep.tasks.fitting import token_offsets
from kvkeep.tasks.metrics import METRICS
from kvkeep.tasks.protocols import Sample, Tokenizer, Turn
from kvkeep.tasks.published import Family, bare, family_named, family_of_repo, family_of_task, metric_of
from kvkeep.tasks.tables import Row, Table, read_rows

__all__ = ["PublishedTask", "load_samples", "published_tasks", "truncate_middle"]

PREFIX = "published/"
"""Begins the names of these tasks, so that a published sample and a generated one of RULER never share a key."""

TRUNCATED = "truncated_from"
"""The option that says how many tokens a context had before its middle was cut out."""

_OPTIONS_OF_QUESTION = re.compile(r"\nA\. (.*)\nB\. (.*)\nC\. (.*)\nD\. (.*)\Z")


def load_samples(
    source: str | PathLike[str],
    *,
    family: str | None = None,
    task: str | None = None,
    metric: str | None = None,
    only: Collection[str] | None = None,
) -> tuple[Sample, ...]:
    """The samples of a file or of a data set on the hub, each context whole.

    Args:
        source: a .jsonl, .json, .csv or .parquet file, or `hub:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]`.
        family: the published set, a name in `published.FAMILIES`; None takes it from the hub's name, else from the
            names of the tasks.
        task: stands for a missing column `task`.
        metric: scores every row, whatever its task.
        only: the tasks to take; None takes all.

    Returns:
        samples in the order of the first row of each context, counted from 0 within each task.

    Raises:
        TaskError: the source cannot be read; a row is not as it should be, which is named by file, line and column; no
            metric is known for a task; an unknown name.
    """
    if metric is not None and metric not in METRICS:
        raise TaskError(expected="the name of a metric", received=repr(metric), remedy=near_names(metric, METRICS))
    table = read_rows(source)
    chosen = family_named(family) if family is not None else family_of_repo(table.repo)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in table.rows:
        name = _task_of(row, task or (chosen.task if chosen else ""))
        if only is None or name in only or bare(name) in only:
            groups.setdefault((name, _context_of(row)), []).append(row)
    if not groups:
        present = {row.values.get("task") for row in table.rows}
        raise TaskError(
            expected=f"rows of the tasks {', '.join(sorted(only or ()))} in {table.source}",
            received=f"tasks {', '.join(sorted(map(str, present)))}",
            remedy="name tasks that are there",
        )
    return tuple(_samples(table, groups, chosen, metric))


def _samples(
    table: Table, groups: dict[tuple[str, str], list[Row]], chosen: Family | None, metric: str | None
) -> Iterator[Sample]:
    seen: dict[str, int] = {}
    for (task, context), rows in groups.items():
        family = chosen or family_of_task(task)
        if metric is not None:
            used = metric
        elif family is not None:
            used = metric_of(family, task)
        else:
            raise rows[0].error(
                "task",
                expected="a task of a published set",
                remedy="name the metric yourself, with metric=..., or the set, with family=...",
            )
        way = "references" if family is None or metric is not None else family.answers.get(bare(task), "references")
        index = seen.setdefault(task, 0)
        seen[task] += 1
        yield Sample(
            task=f"{PREFIX}{family.name}/{task}" if family is not None else f"{PREFIX}{task}",
            index=index,
            context=context,
            turns=tuple(_turn(row, used, way) for row in rows),
            provider=table.provider,
            options=_options(rows, family.options if family is not None else ()),
        )


def _task_of(row: Row, default: str) -> str:
    if not row.has("task") and not default:
        raise row.error(
            "task", expected="the name of a task", remedy="name it for all rows, with task=..., or add the column"
        )
    name = row.text("task", default or None).strip()
    if not name:
        raise row.error("task", expected="the name of a task", remedy="correct the row, or remove it")
    return name


def _context_of(row: Row) -> str:
    context = row.text("context")
    if not context.strip():
        raise row.error("context", expected="a text that is not empty", remedy="correct the row, or remove it")
    return context


def _turn(row: Row, metric: str, way: str) -> Turn:
    question = row.text("question", default="")  # empty where kvpress was told to put it into the context
    references = answers_of(row)
    if way == "classes":
        references = (*references, *_list_in(row, "all_classes"))
    elif way == "option" and references:
        references = (*references, *_right_option(row, references[0], question))
    return Turn(
        question=question,
        references=references,
        metric=metric,
        max_new_tokens=row.positive("max_new_tokens"),
        answer_prefix=row.text("answer_prefix", default=""),
    )


def answers_of(row: Row) -> tuple[str, ...]:
    """The answers of a row: the column `answer`, or `answers` as in LongBench.

    A list, a text, a number, or a list written as JSON or as a Python literal, as tables write one. An empty text or
    list means that the answer is not public: no references. A mapping is kept as JSON.

    Raises:
        TaskError: there is neither column, or something else in it.
    """
    column = "answer" if "answer" in row.values or "answers" not in row.values else "answers"
    return _list_in(row, column)


def _list_in(row: Row, column: str) -> tuple[str, ...]:
    value = row.values.get(column)
    if isinstance(value, str):
        value = _written_list(value)
    if not row.has(column):
        raise row.error(column, expected="an answer, or a list of answers", remedy="correct the row, or remove it")
    values = value if isinstance(value, (list, tuple)) else [value]
    texts = [_as_text(item) for item in values]
    if None in texts:
        raise row.error(
            column, expected="an answer, or a list of answers", remedy="answers are texts, numbers or mappings"
        )
    return tuple(text for text in texts if text)


def _written_list(text: str) -> str | list[Any]:
    stripped = text.strip()
    if not (stripped.startswith("[") and stripped.endswith("]")):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(stripped)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value):
            return value
    return text


def _as_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    return str(int(value)) if value == value // 1 else str(value)


def _right_option(row: Row, letter: str, question: str) -> tuple[str, ...]:
    # The options end the question; where the question is in the context, they end that.
    found = _OPTIONS_OF_QUESTION.search(question or _context_of(row))
    if found is None or letter not in ("A", "B", "C", "D"):
        raise row.error(
            "question" if found is None else "answer",
            expected="options A. to D. at the end" if found is None else "a letter of A to D",
            remedy="correct the row, or name another metric, with metric=...",
        )
    return (found.group("ABCD".index(letter) + 1),)


def _options(rows: Sequence[Row], columns: Iterable[str]) -> tuple[tuple[str, str | int | float], ...]:
    """What tells samples apart in the report; where the rows of one context differ, their values joined by a plus."""
    options: list[tuple[str, str | int | float]] = []
    for column in columns:
        values = {row.values[column] for row in rows if row.has(column) and isinstance(row.values[column], (str, int))}
        if len(values) == 1:
            options.append((column, values.pop()))
        elif values:
            options.append((column, "+".join(sorted(map(str, values)))))
    return tuple(options)


def truncate_middle(text: str, tokenizer: Tokenizer, length: int) -> tuple[str, int]:
    """A text cut to at most so many tokens by taking out its middle: the first half and the last half stay.

    Args:
        text: of any length.
        tokenizer: counts tokens; special tokens are not counted.
        length: in tokens, at least 2.

    Returns:
        the text, and its number of tokens before.

    Raises:
        TaskError: fewer than 2 tokens, or a tokenizer that cannot say where its tokens stand.

    Source: `get_pred` of LongBench's pred.py. Deviation: the halves are cut out of the text at the borders of tokens,
    not decoded from ids, so that what stays is the text itself; and where the joint makes more tokens than were
    counted, both halves give way.
    """
    if length < 2:
        raise TaskError(
            expected="at least 2 tokens for a context", received=str(length), remedy="ask for a greater length"
        )
    offsets = token_offsets(tokenizer, text)
    count = len(offsets)
    half, cut = length // 2, text
    size = count
    while size > length:
        if half < 1:
            return "", count
        cut = text[: offsets[half - 1][1]] + text[offsets[len(offsets) - half][0] :]
        size = len(tokenizer(cut, add_special_tokens=False)["input_ids"])
        half -= max(1, (size - length) // 2)
    return cut, count


@dataclass(frozen=True)
class PublishedTask:
    """One task of a published set.

    Attributes:
        name: such as `"published/ruler/vt"`.
        all_samples: in the order of the set, contexts whole.
    """

    name: str
    all_samples: tuple[Sample, ...]

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """`count` samples from index `first` on, contexts cut in the middle where they are too long.

        Args:
            tokenizer: counts tokens.
            length: of context, question, answer prefix and answer together, in tokens; 0 leaves contexts whole.
            count: of samples.
            seed: 0 takes them in the order of the set, another in an order of its own.
            first: index of the first one.

        Raises:
            TaskError: the set has not so many samples, or the length has no room for question and answer.
        """
        order = list(range(len(self.all_samples)))
        if seed:
            random.Random(seed).shuffle(order)
        if first < 0 or count < 0 or first + count > len(order):
            raise TaskError(
                expected=f"samples 0 to {len(order) - 1} of {self.name}",
                received=f"{first} to {first + count - 1}",
                remedy=f"ask for at most {len(order)}",
            )
        for index in range(first, first + count):
            whole = replace(self.all_samples[order[index]], index=index, length=length, seed=seed)
            yield _fitted(whole, tokenizer, length) if length else whole


def _fitted(sample: Sample, tokenizer: Tokenizer, length: int) -> Sample:
    # Each turn is asked of the context alone: the longest one decides.
    reserve = max(
        sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (turn.question, turn.answer_prefix))
        + turn.max_new_tokens
        for turn in sample.turns
    )
    if length - reserve < 2:
        raise TaskError(
            expected=f"a length of more than {reserve + 1} tokens for {sample.key}",
            received=str(length),
            remedy="question and answer alone take so much; ask for a greater length",
        )
    context, before = truncate_middle(sample.context, tokenizer, length - reserve)
    if context == sample.context:
        return sample
    return replace(sample, context=context, options=(*sample.options, (TRUNCATED, before)))


def published_tasks(
    source: str | PathLike[str],
    *,
    family: str | None = None,
    task: str | None = None,
    metric: str | None = None,
    only: Collection[str] | None = None,
) -> tuple[PublishedTask, ...]:
    """The tasks of a file or of a data set on the hub, in the order of their first rows.

    Args and errors as of `load_samples`.
    """
    tasks: dict[str, list[Sample]] = {}
    for sample in load_samples(source, family=family, task=task, metric=metric, only=only):
        tasks.setdefault(sample.task, []).append(sample)
    return tuple(PublishedTask(name, tuple(samples)) for name, samples in tasks.items())
