"""Tasks by name.

task("ruler/niah_single_2")                       # with its defaults
task("ruler/vt", wording="compat")                # with options: the fields of its class
task("niah", depths=(0, 50, 100), haystack="essays/")
expand(["ruler", "key_value"])                    # 'ruler/niah_single_1', ..., 'ruler/qa_2', 'key_value'
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from kvkeep.errors import TaskError, near_names
from kvkeep.tasks.continuation import Continuation
from kvkeep.tasks.key_value import KeyValue
from kvkeep.tasks.multi_turn import MultiTurn
from kvkeep.tasks.niah import Niah
from kvkeep.tasks.protocols import Task
from kvkeep.tasks.ruler import VARIANTS, RulerCwe, RulerFwe, RulerNiah, RulerQa, RulerVt

__all__ = ["Entry", "available_tasks", "expand", "register", "task"]

ALL = "all"  # of a family, as in ruler/all, or of everything that is registered

_NAME = re.compile(r"[a-z0-9_-]+(/[a-z0-9_-]+)?")


@dataclass(frozen=True)
class Entry:
    """A registered task.

    Attributes:
        name: such as `ruler/vt`; what stands before the slash is its family.
        factory: makes the task from its options.
        summary: one line on what it asks for.
    """

    name: str
    factory: Callable[..., Task]
    summary: str

    def options(self) -> tuple[str, ...]:
        """The names of what can be passed to `task` besides the name."""
        bound = set(self.factory.keywords) if isinstance(self.factory, partial) else set()
        return tuple(key for key in inspect.signature(self.factory).parameters if key not in bound)


_tasks: dict[str, Entry] = {}


def register(name: str, factory: Callable[..., Task], *, summary: str) -> None:
    """Make a task known under a name.

    Args:
        name: lower-case words, of which one slash may separate the family.
        factory: makes the task from its options, which are keyword arguments.
        summary: one line on what it asks for.

    Raises:
        TaskError: the name is taken, is that of a family, or cannot be written so.
    """
    taken = name in _tasks or name in _families() or ALL in name.split("/")
    if taken or _NAME.fullmatch(name) is None:
        raise TaskError(
            expected="a free name of lower-case letters, digits, dashes and underscores, with one slash at most",
            received=repr(name),
            remedy="choose another name",
        )
    _tasks[name] = Entry(name, factory, summary)


def available_tasks() -> Mapping[str, Entry]:
    """All registered tasks, in the order in which they were registered."""
    return MappingProxyType(_tasks)


def task(name: str, **options: Any) -> Task:
    """The task of that name.

    Args:
        name: of one task; `expand` tells which ones a family has.
        options: as the task's class describes them.

    Raises:
        TaskError: an unknown name or option (near ones are suggested), or the name of a family.
    """
    key = name.lower()
    if key in _families():
        raise TaskError(
            expected="the name of one task",
            received=f"{name!r}, a family of several",
            remedy=f"expand([{key!r}]) names them: {', '.join(expand([key]))}",
        )
    if key not in _tasks:
        raise TaskError(expected="the name of a task", received=repr(name), remedy=near_names(key, _tasks))
    entry = _tasks[key]
    known = entry.options()
    for option in options:
        if option not in known:
            raise TaskError(
                expected=f"an option of {key}",
                received=repr(option),
                remedy=near_names(option, known) if known else f"{key} has no options",
            )
    return entry.factory(**options)


def expand(names: Iterable[str]) -> tuple[str, ...]:
    """The names of single tasks that names of tasks and families stand for, each once, in their order.

    Args:
        names: of tasks (`ruler/vt`), of families (`ruler`, or `ruler/all`), or `all`.

    Raises:
        TaskError: an unknown name; near ones are suggested.
    """
    found: dict[str, None] = {}
    for name in [names] if isinstance(names, str) else names:
        key = name.lower()
        members = _families().get(key.removesuffix(f"/{ALL}"), [])
        if key == ALL:
            members = list(_tasks)
        elif not members and key in _tasks:
            members = [key]
        if not members:
            known = [*_tasks, *_families()]
            raise TaskError(
                expected="the name of a task or a family", received=repr(name), remedy=near_names(key, known)
            )
        found.update(dict.fromkeys(members))
    return tuple(found)


def _families() -> dict[str, list[str]]:
    families: dict[str, list[str]] = {}
    for name in _tasks:
        family, slash, _ = name.partition("/")
        if slash:
            families.setdefault(family, []).append(name)
    return families


def _register_own() -> None:
    asked = {"noise": "a repeated passage", "prose": "prose", "needles": "others of the same form"}
    for variant, row in VARIANTS.items():
        what = (
            f"{row.query_count * row.value_count} of {row.key_count * row.value_count} facts among {asked[row.among]}"
        )
        register(f"ruler/{variant}", partial(RulerNiah, variant=variant), summary=what)
    register("ruler/vt", RulerVt, summary="the five variables of a chain of assignments in noise")
    register("ruler/cwe", RulerCwe, summary="the ten common words of a numbered list")
    register("ruler/fwe", RulerFwe, summary="the three most frequent words of a coded text")
    register("ruler/qa_1", partial(RulerQa, variant="qa_1"), summary="a question about one document among many")
    register("ruler/qa_2", partial(RulerQa, variant="qa_2"), summary="a question about two documents among many")
    register("niah", Niah, summary="one fact at a given depth of prose")
    register("continuation", Continuation, summary="what follows in real text, against the full cache's predictions")
    register("key_value", KeyValue, summary="several values of a JSON object of random ids")
    register("multi_turn", MultiTurn, summary="questions and follow-ups on facts in prose, and on the prose itself")


_register_own()
