r"""Problems with short answers that take long reasoning: AIME, HMMT, MATH-500, GPQA, and a small set that comes along.

    read_reasoning("small")                          # offline: a few dozen problems written for kvkeep
    read_reasoning("aime25")                         # from the hub
    read_reasoning("aime25", path="aime25.jsonl")    # the same from a file
    pass_at_k([[1, 0, 1, 1], [0, 0, 0, 1]], k=1)     # 0.5: two problems, four rollouts each

Here the text that is generated is what fills the cache: each sample's context is the problem, its one turn asks for the
answer, boxed or as a letter.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike

from kvkeep.errors import TaskError, near_names
from kvkeep.tasks.boxed import grade, grader, last_boxed, same_answer
from kvkeep.tasks.protocols import Sample, Tokenizer, Turn
from kvkeep.tasks.tables import Row, read_rows

__all__ = [
    "SETS",
    "ReasoningSet",
    "ReasoningTask",
    "grade",
    "grader",
    "last_boxed",
    "pass_at_k",
    "read_reasoning",
    "same_answer",
]

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
"""What Qwen3's model card advises for mathematics."""

LETTER = 'Please reason step by step, and end with the sentence "The correct answer is (X)", where X is the letter.'

_PROBLEM = ("problem", "Problem", "question", "Question")
_ANSWER = ("answer", "Answer")
_RIGHT, _WRONG = "Correct Answer", ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@dataclass(frozen=True)
class ReasoningSet:
    """A set of problems.

    Attributes:
        name: what users write.
        source: on the hub, for `tables.read_rows`; empty for the set that comes along.
        metric: `"boxed"`, or `"choice"` for rows with one right and three wrong answers.
        max_new_tokens: for a whole chain of thought.
        licence: of the problems, as far as the hub states it.
    """

    name: str
    source: str
    metric: str
    max_new_tokens: int
    licence: str = ""


# 32,000 tokens are what kvpress gives AIME25 (benchmarks/aime25/evaluate_kvzap.py).
SETS: Mapping[str, ReasoningSet] = {
    entry.name: entry
    for entry in (
        ReasoningSet("small", "", "boxed", 2_048, "Apache-2.0"),
        ReasoningSet("aime24", "hub:Maxwell-Jia/AIME_2024::train", "boxed", 32_000),
        ReasoningSet("aime25", "hub:math-ai/aime25", "boxed", 32_000),
        ReasoningSet("hmmt_feb25", "hub:MathArena/hmmt_feb_2025::train", "boxed", 32_000, "CC BY-NC-SA 4.0"),
        ReasoningSet("hmmt_nov25", "hub:MathArena/hmmt_nov_2025::train", "boxed", 32_000, "CC BY-NC-SA 4.0"),
        ReasoningSet("math500", "hub:HuggingFaceH4/MATH-500", "boxed", 16_000),
        # Gated: accept its terms on the hub and log in. Its authors ask not to post items in plain text.
        ReasoningSet("gpqa_diamond", "hub:Idavidrein/gpqa:gpqa_diamond:train", "choice", 32_000, "CC BY 4.0"),
    )
}


def read_reasoning(
    name: str, *, path: str | PathLike[str] | None = None, max_new_tokens: int | None = None, seed: int = 0
) -> tuple[Sample, ...]:
    """The problems of a set, one sample with one turn each.

    Args:
        name: a name in `SETS`.
        path: a file, or a data set of the hub, that is read instead; in the columns of that set: `problem` or
            `question`, and `answer`, in any case; for choices `Question`, `Correct Answer` and `Incorrect Answer 1` to
            `3`.
        max_new_tokens: instead of the set's own.
        seed: of the order in which choices are lettered; each problem has an order of its own.

    Raises:
        TaskError: an unknown name; a file or data set that cannot be read; a row without problem or answer.
    """
    if name not in SETS:
        raise TaskError(expected="the name of a set of problems", received=repr(name), remedy=near_names(name, SETS))
    entry = SETS[name]
    if max_new_tokens is not None and max_new_tokens < 1:
        raise TaskError(expected="at least 1 new token", received=str(max_new_tokens), remedy="leave it out")
    if path is None and not entry.source:
        provider, rows = "kvkeep", _small()
    else:
        table = read_rows(path if path is not None else entry.source)
        provider, rows = table.provider, table.rows
    limit = max_new_tokens or entry.max_new_tokens
    samples = []
    for index, row in enumerate(rows):
        problem, question, reference = _lettered(row, index, seed) if entry.metric == "choice" else _boxed(row)
        turn = Turn(question, (reference,), entry.metric, max_new_tokens=limit, reasoned=True)
        samples.append(
            Sample(
                task=f"reasoning/{name}",
                index=index,
                context=problem,
                turns=(turn,),
                seed=seed if entry.metric == "choice" else 0,
                provider=provider,
            )
        )
    return tuple(samples)


@dataclass(frozen=True)
class ReasoningTask:
    """A set of problems as a task: in the set's order, each as long as it is.

    Attributes:
        set_name: a name in `SETS`.
        path: see `read_reasoning`.
    """

    set_name: str
    path: str | PathLike[str] | None = None

    @property
    def name(self) -> str:
        """Such as `"reasoning/aime25"`."""
        return f"reasoning/{self.set_name}"

    def samples(
        self, tokenizer: Tokenizer, *, length: int, count: int, seed: int = 0, first: int = 0
    ) -> Iterator[Sample]:
        """See `Task.samples`; no length is asked for, since the answer is what takes the room.

        Raises:
            TaskError: as `read_reasoning`; the set has not so many problems.
        """
        problems = read_reasoning(self.set_name, path=self.path, seed=seed)
        if first < 0 or count < 0 or first + count > len(problems):
            raise TaskError(
                expected=f"problems 0 to {len(problems) - 1} of {self.name}",
                received=f"{first} to {first + count - 1}",
                remedy=f"ask for at most {len(problems)}",
            )
        yield from problems[first : first + count]


def _small() -> tuple[Row, ...]:
    content = json.loads((files("kvkeep.tasks") / "data" / "problems.json").read_text(encoding="utf-8"))
    return tuple(Row(row, "problems.json", f"row {number}") for number, row in enumerate(content["problems"], 1))


def _column(row: Row, names: Sequence[str]) -> str:
    return next((name for name in names if name in row.values), names[0])


def _boxed(row: Row) -> tuple[str, str, str]:
    problem = row.text(_column(row, _PROBLEM)).strip()
    column = _column(row, _ANSWER)
    value = row.values.get(column)
    if isinstance(value, float) and value == value // 1:
        value = int(value)  # a table with one missing answer turns integers into decimals
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise row.error(column, expected="an answer", remedy="correct the row, or remove it")
    return problem, f"\n\n{BOXED}", str(value).strip()


def _lettered(row: Row, index: int, seed: int) -> tuple[str, str, str]:
    problem = row.text(_column(row, _PROBLEM[::-1])).strip()
    right = row.text(_RIGHT).strip()
    options = [right, *(row.text(column).strip() for column in _WRONG)]
    order = list(range(4))
    random.Random(f"kvkeep/{seed}/{index}").shuffle(order)
    lines = [f"({letter}) {options[place]}" for letter, place in zip("ABCD", order, strict=True)]
    return problem, "\n\n" + "\n".join(lines) + f"\n\n{LETTER}", "ABCD"[order.index(0)]


def pass_at_k(outcomes: Sequence[Sequence[float | bool]], k: int = 1) -> float:
    """The chance that at least one of k rollouts solves a problem, the mean over problems.

    For each problem with c of its n rollouts right, `1 - C(n - c, k) / C(n, k)`, which has no bias; with k = 1 it is
    the share of right rollouts.

    Args:
        outcomes: for each problem the scores of its rollouts: 1 or true for right, 0 or false for wrong.
        k: at least 1, at most the number of rollouts of each problem.

    Raises:
        TaskError: no problems; fewer rollouts than k; a score between 0 and 1.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    if not outcomes:
        raise TaskError(expected="outcomes of at least one problem", received="none", remedy="run the problems first")
    total = 0.0
    for index, rollouts in enumerate(outcomes):
        if wrong := [outcome for outcome in rollouts if outcome not in (0, 1)]:
            raise TaskError(
                expected=f"scores of 0 or 1 for problem {index}", received=repr(wrong[0]), remedy="round them first"
            )
        n, c = len(rollouts), sum(map(int, rollouts))
        if not 1 <= k <= n:
            raise TaskError(
                expected=f"k from 1 to {n}, the rollouts of problem {index}",
                received=str(k),
                remedy="run more rollouts",
            )
        total += 1 - math.comb(n - c, k) / math.comb(n, k)
    return total / len(outcomes)
