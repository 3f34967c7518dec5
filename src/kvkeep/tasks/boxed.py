r"""The answer in the last \boxed{} of a solution, and whether it is the right one.

    last_boxed(r"so \boxed{\frac{3}{4}}.")     # '\frac{3}{4}'
    same_answer(r"\dfrac34", "0.75")           # True
    grade(r"... \boxed{042}", ["42"])          # 1.0

Answers are compared after a plain normalisation of LaTeX, as fractions if both are numbers and as text otherwise.
Where the package `math-verify` is installed and the plain comparison says no, it is asked as well; it knows sets,
intervals and algebra. `grader()` says which of the two was at work, since scores may depend on it.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from importlib.metadata import version
from types import ModuleType

LONGEST_ANSWER = 1_000
"""Characters; a longer answer is compared as text alone. No right answer is so long, and parsers may be slow."""

_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\[!,;: ()\[\]$]|[\s~$]")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree|°|\\?%")
_SHORT_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|([0-9a-z]))(?:\{([^{}]*)\}|([0-9a-z]))")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_ASSIGNMENT = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]\}?)?=")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_RATIO = re.compile(r"([+-]?[0-9]+)/([0-9]+)")
_FRACTION = re.compile(r"([+-]?)([0-9]*)\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\}")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` of a text holds, with braces inside balanced; None if there is none.

    The backslash may be missing. Escaped braces, as of a set, are not counted. A box that is never closed, as where the
    model was cut off, is no answer, whatever came before it; so it is in kvpress.
    """
    start = text.rfind("boxed{")
    if start < 0:
        return None
    start += len("boxed{")
    depth, index = 1, start
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:index]
        index += 1
    return None


def normalise(answer: str) -> str:
    r"""An answer without what does not change it.

    Removed: white space and LaTeX's spacing, dollar signs, `\left` and `\right`, the wrapping of `\text{}` and its
    like, signs of degree and per cent, thousands separators, an assignment such as `x=` in front, a full stop at the
    end.
    `\dfrac`, `\tfrac` and `\cfrac` become `\frac`, and `\frac12` becomes `\frac{1}{2}`.
    """
    if len(answer) > LONGEST_ANSWER:
        return answer.strip()
    text = _SPACING.sub("", answer.replace("{,}", ","))
    text = _DEGREES.sub("", _WORDS.sub(r"\1", text))
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\cfrac", r"\frac")
    text = text.replace("−", "-").rstrip(".,;")
    while len(text) > 2 and text[0] == "{" and _closes(text) == len(text) - 1:
        text = text[1:-1]
    text = _ASSIGNMENT.sub("", text, count=1) if _ASSIGNMENT.match(text) else text
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return _SHORT_FRACTION.sub(_whole_fraction, text)


def _closes(text: str) -> int:
    """Where the brace that opens a text closes; -1 if it does not."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return index
    return -1


def _whole_fraction(match: re.Match[str]) -> str:
    above, short_above, below, short_below = match.groups()
    return (
        rf"\frac{{{above if short_above is None else short_above}}}{{{below if short_below is None else short_below}}}"
    )


def as_number(answer: str) -> Fraction | None:
    r"""The value of a normalised integer, decimal, ratio `a/b`, `\frac{a}{b}` or mixed number; None if it is none.

    Exponents are not read: they let a short text ask for a huge number.
    """
    if len(answer) > LONGEST_ANSWER:
        return None
    if _DECIMAL.fullmatch(answer):
        return Fraction(answer)
    if found := _RATIO.fullmatch(answer):
        above, below = (int(part) for part in found.groups())
        return Fraction(above, below) if below else None
    if found := _FRACTION.fullmatch(answer):
        sign, whole, above_text, below_text = found.groups()
        above, below = int(above_text), int(below_text)
        if not below:
            return None
        value = int(whole or 0) + Fraction(above, below)
        return -value if sign == "-" else value
    return None


def same_answer(answer: str, reference: str) -> bool:
    """Whether two answers are the same: as fractions if both are numbers, as normalised text otherwise."""
    one, other = normalise(answer), normalise(reference)
    if one == other:
        return one != ""
    value, wanted = as_number(one), as_number(other)
    if value is not None and wanted is not None:
        return value == wanted
    return _math_verify_says_so(answer, reference)


def grade(prediction: str, references: Sequence[str]) -> float:
    r"""1 if the last `\boxed{}` holds any of the references, else 0. A reference may be boxed as well.

    Source: the scorers of kvpress for AIME25 and MATH-500, which compare the boxed text with the reference as it is.
    Deviation: the comparison of `same_answer`, so that 042, 42.0 and 42 are one answer.
    """
    answer = last_boxed(prediction)
    if answer is None:
        return 0.0
    return float(any(same_answer(answer, last_boxed(reference) or reference) for reference in references))


def grader() -> str:
    """What decides here: `"plain"`, or `"plain, math-verify VERSION"`."""
    return "plain" if _verifier() is None else f"plain, math-verify {version('math-verify')}"


def _verifier() -> ModuleType | None:
    # Its time limit is an alarm signal, which only the main thread can set; without a limit, a short answer can keep
    # sympy busy for ever.
    if threading.current_thread() is not threading.main_thread():
        return None
    try:
        return importlib.import_module("math_verify")
    except ImportError:
        return None


def _math_verify_says_so(answer: str, reference: str) -> bool:
    verifier = _verifier()
    if verifier is None or max(len(answer), len(reference)) > LONGEST_ANSWER:
        return False
    try:
        return bool(verifier.verify(verifier.parse(f"${reference}$"), verifier.parse(f"${answer}$")))
    except Exception:  # whatever its parser makes of a model's text: an answer that it cannot read is not right
        return False
