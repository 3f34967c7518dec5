"""RULER's own strings, read at run time from an installed lm-eval, which carries them.

They are Apache-2.0, from NVIDIA's RULER, and not copied here. What lm-eval 0.4.13 keeps in the body of a function (the
prefix of needle tasks, the lines of variable tracking) is derived from what it does export. How rows are drawn and how
long they are stays kvkeep's own business: only the words are the original ones. With them comes lm-eval's typo in the
prefix of variable tracking, which older data sets have too and today's RULER has not.
"""

from __future__ import annotations

import random
import re
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from kvkeep.errors import TaskError
from kvkeep.tasks.ruler.wording import Frame, Wording


def read() -> Wording:
    """The original wording.

    Raises:
        TaskError: lm-eval with its RULER tasks is not installed, or has changed.
    """
    try:
        niah, prepare, tracking, common, frequent, documents = (
            import_module(f"lm_eval.tasks.ruler.{name}")
            for name in ("niah_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils")
        )
    except ImportError as error:
        raise TaskError(
            expected="an installed lm-eval with its RULER tasks, whose strings wording='compat' uses",
            received=f"{type(error).__name__}: {error}",
            remedy='pip install "lm-eval[ruler]", or use kvkeep\'s own wording',
        ) from error
    try:
        one, many = _niah_frames(niah.TEMPLATE)
        assign, copy = _assignments(tracking)
        return Wording(
            name="compat",
            noise=prepare.get_haystack(type_haystack="repeat").strip(),
            kinds={"numbers": ("number", "numbers"), "uuids": ("uuid", "uuids")},
            needle=prepare.NEEDLE.replace("{type_needle_v}", "{kinds}"),
            one=one,
            many=many,
            assign=assign,
            copy=copy,
            variables=_frame(tracking.CONFIG["variable_tracking"], {"{query}": "{value}", "{num_v}": "{count}"}),
            common=_frame(common.CONFIG),
            frequent=_frame(frequent.CONFIG),
            documents=_frame(documents.CONFIG),
            document=documents.DOCUMENT_PROMPT.replace("{i}", "{number}"),
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise TaskError(
            expected="an lm-eval whose RULER tasks keep their strings where version 0.4.13 does",
            received=f"{type(error).__name__}: {error}",
            remedy='pip install "lm-eval[ruler]==0.4.13", or use kvkeep\'s own wording',
        ) from error


def _frame(config: dict[str, Any], fields: dict[str, str] | None = None) -> Frame:
    return _split(config["template"], config["answer_prefix"], fields or {})


def _split(template: str, prefix: str, fields: dict[str, str]) -> Frame:
    for old, new in fields.items():
        template, prefix = template.replace(old, new), prefix.replace(old, new)
    intro, rest = template.split("{context}")
    question = rest.strip()
    # The prefix begins the model's own turn, where lm-eval puts no space either.
    return Frame(intro, gap=rest[: rest.index(question)], question=question, prefix=prefix.strip())


def _niah_frames(template: str) -> tuple[Frame, Frame]:
    """The frames for one value and for many; the first is made by the replacements that RULER makes."""
    one = template
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        one = one.replace(old, new)
    fields = {"{type_needle_v}": "{kind}"}, {"{type_needle_v}": "{kinds}"}
    verbs = (r"What is (the .*)\?", "is"), (r"What are all (the .*)\?", "are")
    frames = []
    for text, field, (pattern, verb) in zip((one, template), fields, verbs, strict=True):
        frame = _split(text, "", field)
        asked = re.fullmatch(pattern, frame.question)
        if asked is None:
            raise ValueError(f"the question {frame.question!r}, from which no prefix can be made")
        subject = asked[1]
        frames.append(_split(text, f"{subject[0].upper()}{subject[1:]} {verb}", field))
    return frames[0], frames[1]


@cache
def _example_chain(generate_chains: Any) -> tuple[str, str, list[str]]:
    """Two lines that lm-eval made, and the names in them. It draws from global generators, which are put back."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        names, lines = generate_chains(1, 1)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    return lines[0][0], lines[0][1], list(names[0])


def _assignments(tracking: Any) -> tuple[str, str]:
    first, second, (source, name) = _example_chain(tracking.generate_chains)
    assign = re.sub(r"\d+", "{value}", first.replace(source, "{name}"))
    copy = second.replace(source, "{source}").replace(name, "{name}")
    if "{value}" not in assign or "{name}" not in assign or "{source}" not in copy or "{name}" not in copy:
        raise ValueError(f"the lines {first!r} and {second!r}")
    return assign, copy
