"""A language model's answer read as a program, however much stands around it; or the reason why it is none."""

from __future__ import annotations

import re
import textwrap

from kvkeep.evolve.guard import PolicyRefused, check_source
from kvkeep.evolve.mutators.definitions import SCORING, SELECTING, complete, definitions, parse
from kvkeep.evolve.mutators.tidying import tidy
from kvkeep.evolve.program import END, START, Program, ProgramError

_THINKING = re.compile(r"<(think|thinking|thought|reasoning|reflection)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_LATE_END = re.compile(r".*</(?:think|thinking|thought|reasoning|reflection)>", re.DOTALL | re.IGNORECASE)
_UNENDED = re.compile(r"<(?:think|thinking|thought|reasoning|reflection)>.*", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[^\n`]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_CHANGE = re.compile(
    r"^[ \t]*<{5,9} ?SEARCH[ \t]*\n(.*?)^[ \t]*={5,9}[ \t]*\n(.*?)^[ \t]*>{5,9} ?REPLACE", re.DOTALL | re.MULTILINE
)
_BEGINNING = re.compile(r"^(?:def |import numpy|from __future__|[A-Z][A-Z0-9_]* *=)", re.MULTILINE)

# Lines that are tried in vain at the end of code which prose follows without a fence.
_MOST_CUTS = 50


class AnswerRejected(Exception):
    """An answer that gives no valid program.

    Args:
        reason: a short word: empty, no_code, syntax, search_not_found, search_twice, program, or one of the guard's
            `REASONS`.
        note: what was wrong, in words.
    """

    def __init__(self, reason: str, note: str) -> None:
        self.reason, self.note = reason, note
        super().__init__(f"{reason}: {note}")


def child_of(parent: Program, answer: str) -> Program:
    """The program that an answer makes of its parent.

    Understood are whole functions and SEARCH/REPLACE changes, in fences or not, with prose or thinking around; of
    several fences the last that holds a function. A function that is not in the answer, and what it needs, is the
    parent's. Nothing of the answer is executed; what does not pass `guard.check_source` is rejected.

    Raises:
        AnswerRejected: with the reason.
    """
    text = _without_thinking(answer)
    if not text.strip():
        raise AnswerRejected("empty", "an answer without text")
    changes = _CHANGE.findall(text)
    try:
        block = _changed(parent.block, changes) if changes else complete(tidy(_code(text)), parent.block)
        program = parent.with_block(block)
        check_source(program.source)
    except (RecursionError, MemoryError) as error:
        raise AnswerRejected("size", f"expressions that are nested too deeply: {error}") from None
    except ProgramError as error:
        raise AnswerRejected("program", str(error)) from None
    except PolicyRefused as error:
        raise AnswerRejected(error.reason, str(error)) from None
    return program


def _without_thinking(answer: str) -> str:
    text = _THINKING.sub("", answer.replace("\r\n", "\n"))
    text = _LATE_END.sub("", text)  # some servers leave out the tag that begins it
    return _UNENDED.sub("", text)


def _code(text: str) -> str:
    """The code of an answer that holds at least one of the two functions.

    Raises:
        AnswerRejected: no code, or code that is no Python.
    """
    fenced = [textwrap.dedent(match.group(2)) for match in _FENCE.finditer(text)]
    start = _BEGINNING.search(text)
    candidates = fenced or ([text[start.start() :]] if start else [])
    candidates = [
        _inside_markers(code) for code in candidates if f"def {SCORING}" in code or f"def {SELECTING}" in code
    ]
    if not candidates:
        raise AnswerRejected("no_code", f"neither {SCORING} nor {SELECTING} is defined in it")
    for code in reversed(candidates):
        if _defines(code):
            return code
    for code in reversed(candidates):
        cut = _without_tail(code)
        if cut is not None:
            return cut
    raise AnswerRejected("syntax", _complaint(candidates[-1]))


def _inside_markers(code: str) -> str:
    """What stands between the markers of a block, where there are any."""
    lines = code.splitlines()
    marks = [line.strip() for line in lines]
    if START in marks:
        lines = lines[marks.index(START) + 1 :]
        marks = [line.strip() for line in lines]
    if END in marks:
        lines = lines[: marks.index(END)]
    return "\n".join(lines) + "\n"


def _without_tail(code: str) -> str | None:
    """The code up to where Python stops to understand it, if a function is left: prose may follow, or the end may be
    missing."""
    lines = code.splitlines()
    for _ in range(_MOST_CUTS):
        error = _error(code)
        if error is None:
            return code if _defines(code) else None
        lines = lines[: min(len(lines) - 1, max(0, (error.lineno or len(lines)) - 1))]
        code = "\n".join(lines) + "\n"
        if not lines:
            return None
    return None


def _defines(code: str) -> bool:
    """Whether it is Python that defines one of the two functions."""
    return _error(code) is None and not {SCORING, SELECTING}.isdisjoint(definitions(parse(code)))


def _error(code: str) -> SyntaxError | None:
    try:
        parse(code)
    except SyntaxError as error:
        return error
    return None


def _complaint(code: str) -> str:
    error = _error(code)
    return "no function" if error is None else f"{error.msg} in line {error.lineno}: {(error.text or '').strip()!r}"


def _changed(block: str, changes: list[tuple[str, str]]) -> str:
    """The block with each change made, in turn.

    Raises:
        AnswerRejected: lines that are not in it, or more than once.
    """
    lines = block.splitlines()
    for search, replacement in changes:
        wanted = [line.rstrip() for line in search.strip("\n").splitlines()]
        if not any(wanted):
            raise AnswerRejected("search_not_found", "no lines to search for")
        here = [line.rstrip() for line in lines]
        found = [i for i in range(len(here) - len(wanted) + 1) if here[i : i + len(wanted)] == wanted]
        if len(found) != 1:
            reason = "search_twice" if found else "search_not_found"
            raise AnswerRejected(reason, f"{len(found)} places for lines that begin with {wanted[0].strip()!r}")
        lines[found[0] : found[0] + len(wanted)] = replacement.strip("\n").splitlines()
    return "\n".join(lines) + "\n"
