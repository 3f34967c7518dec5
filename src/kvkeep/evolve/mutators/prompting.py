"""What a language model is told: the interface, a program with its score, and what to do with it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from string import Template
from typing import Literal

import numpy as np

from kvkeep.evolve.context import FEATURES, SCALARS, PrefillContext
from kvkeep.evolve.mutators.protocol import Parent
from kvkeep.evolve.program import BUILTINS
from kvkeep.evolve.vocabulary import NUMPY

Style = Literal["rewrite", "diff"]

# Characters of feedback that a model is shown: a program may have made it print any amount.
_MOST_FEEDBACK = 2000
# Other programs that are shown as examples.
_MOST_EXAMPLES = 2


@dataclass(frozen=True)
class Prompt:
    """Two messages.

    Attributes:
        system: the interface and its rules, the same for all programs.
        user: the program, its score, what its evaluation reported, and the task.
    """

    system: str
    user: str


def build(parents: Sequence[Parent], style: Style, random: np.random.Generator) -> Prompt:
    """The prompt that asks for a child of the first parent; the next two are examples.

    What programs and evaluations wrote is put in by one pass, in which a `$name` in it means nothing.

    Args:
        parents: at least one.
        style: whether whole functions or changes are asked for.
        random: draws what kind of change is asked for, so that the same parent gives different children.
    """
    first, *others = shown(parents)
    directions = _text("directions").splitlines()
    user = Template(_text("user")).substitute(
        code=first.program.block.strip("\n"),
        score=_score(first),
        feedback=_feedback(first),
        examples="".join(map(_example, others)),
        direction=directions[int(random.integers(len(directions)))],
        format=_text(style).strip(),
    )
    return Prompt(interface(), user.strip())


def shown(parents: Sequence[Parent]) -> Sequence[Parent]:
    """Those whose programs stand in the prompt."""
    return parents[: 1 + _MOST_EXAMPLES]


@cache
def interface() -> str:
    """What a program is and may do, from the context's own description and the guard's own lists."""
    described = inspect.getdoc(PrefillContext) or ", ".join((*FEATURES, *SCALARS))  # python -OO has no docstrings
    return (
        Template(_text("system"))
        .substitute(
            context="\n".join(f"    {line}".rstrip() for line in described.splitlines()),
            numpy=", ".join(sorted(NUMPY)),
            builtins=", ".join(BUILTINS),
        )
        .strip()
    )


@cache
def _text(name: str) -> str:
    return resources.files("kvkeep.evolve.mutators").joinpath("prompts", f"{name}.txt").read_text(encoding="utf-8")


def _score(parent: Parent) -> str:
    return "not fully evaluated" if parent.score is None else f"score {parent.score:.4g}, higher is better"


def _feedback(parent: Parent) -> str:
    text = parent.feedback.strip()
    if not text:
        return ""
    if len(text) > _MOST_FEEDBACK:
        text = text[:_MOST_FEEDBACK] + " [...]"
    quoted = "\n".join(f"    {line}" for line in text.splitlines())
    return f"\nIts evaluation reported:\n\n{quoted}\n"


def _example(parent: Parent) -> str:
    return f"\nAnother program, for comparison ({_score(parent)}):\n\n```python\n{parent.program.block.strip()}\n```\n"
