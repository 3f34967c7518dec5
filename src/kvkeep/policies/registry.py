"""Policies by name: one grammar for Python, the command line and results.

    snapkv                                     a registered policy
    snapkv[window=64,kernel=7]                 with options of any of its parts
    snapkv[window=64]+ada+chunks[length=20]    with its allocator and its selector exchanged

Other packages add policies through the entry point group `kvkeep.policies` (name = module:factory, a factory without
arguments), or at run time with `register`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kvkeep.errors import PolicyError, near_names
from kvkeep.policies.protocols import Allocator, Policy, PromptPolicy, Selector, parts, with_part

ENTRY_POINTS = "kvkeep.policies"

_PIECE = re.compile(r"([a-z0-9][a-z0-9_-]*)(?:\[(.*)\])?", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A registered policy.

    Attributes:
        name: what users write.
        policy: the policy with its default options.
        summary: one line on what it does.
        paper: where it comes from.
    """

    name: str
    policy: PromptPolicy
    summary: str
    paper: str

    def options(self) -> dict[str, Any]:
        """Every option with its default, as they may be written in brackets."""
        if not isinstance(self.policy, Policy):
            return _fields(self.policy)
        return {name: value for part in parts(self.policy) for name, value in _fields(part).items()}


_policies: dict[str, Entry] = {}
_parts: dict[str, type[Allocator] | type[Selector]] = {}


def register(name: str, policy: PromptPolicy, *, summary: str, paper: str = "") -> None:
    """Make a policy known under a name.

    Raises:
        PolicyError: the name is taken, or cannot be written in the grammar.
    """
    if _PIECE.fullmatch(name) is None or "[" in name:
        raise PolicyError(
            expected="a name of lower-case letters, digits and dashes",
            received=f"{name!r}",
            remedy="rename the policy",
        )
    if name in _policies or name in _parts:
        raise PolicyError(
            expected="a name that is not taken",
            received=f"{name!r}, which is {_policies.get(name, _parts.get(name))}",
            remedy="choose another name",
        )
    _policies[name] = Entry(name, policy, summary, paper)


def register_part(part: type[Allocator] | type[Selector]) -> None:
    """Make an allocator or a selector known under its `name`."""
    if part.name in _parts or part.name in _policies:
        raise PolicyError(
            expected="a name that is not taken", received=f"{part.name!r}", remedy="choose another name for the part"
        )
    _parts[part.name] = part


def available_policies() -> Mapping[str, Entry]:
    """All registered policies, those of installed entry points included."""
    _load_entry_points()
    return _policies


@cache
def _load_entry_points() -> None:
    """Once in a process: looking through everything that is installed takes milliseconds."""
    for point in entry_points(group=ENTRY_POINTS):
        policy = point.load()()
        register(point.name, policy, summary=(type(policy).__doc__ or "").split("\n")[0], paper=point.value)


def part_types() -> Mapping[str, type[Allocator] | type[Selector]]:
    """All registered allocators and selectors."""
    return _parts


def parse_policy(text: str | PromptPolicy) -> PromptPolicy:
    """The policy that a text such as `snapkv[window=64]+ada` names; a policy is returned as it is.

    Raises:
        PolicyError: an unknown policy, part or option (near names are suggested), or a text that cannot be read.
    """
    if not isinstance(text, str):
        if isinstance(text, type) or not isinstance(text, PromptPolicy):  # a class has the methods too
            raise PolicyError(
                expected="a policy or its name",
                received=f"{text!r} of type {type(text).__name__}",
                remedy="a policy has scope, needs, judge and choose, as Policy(scorer, allocator, selector) does",
            )
        return text
    first, *rest = _split(text, "+")
    name, options = _read_piece(first)
    known = available_policies()
    if name not in known:
        raise PolicyError(expected="a known policy", received=f"{name!r}", remedy=near_names(name, known))
    policy = _with_options(known[name].policy, options, name)
    given: dict[str, str] = {}
    for piece in rest:
        part_name, part_options = _read_piece(piece)
        if part_name not in _parts:
            raise PolicyError(
                expected="an allocator or a selector after '+'",
                received=f"{part_name!r}",
                remedy=near_names(part_name, _parts),
            )
        if not isinstance(policy, Policy):
            raise PolicyError(
                expected=f"{name!r} alone", received=f"{text!r}", remedy=f"{name} is not made of exchangeable parts"
            )
        part = _parts[part_name]
        kind = "allocator" if issubclass(part, Allocator) else "selector"
        if kind in given:
            raise PolicyError(
                expected=f"at most one {kind}",
                received=f"{given[kind]!r} and {part_name!r} in {text!r}",
                remedy="leave one of them out",
            )
        given[kind] = part_name
        policy = with_part(policy, _replace(part(), part_options, part_name))
    return policy


def policy_string(policy: PromptPolicy) -> str:
    """A text that `parse_policy` reads back as the same policy, with every option that is not a default."""
    known = available_policies()
    for entry in known.values():
        if entry.policy == policy:
            return entry.name
    if not isinstance(policy, Policy):
        name = getattr(policy, "name", type(policy).__name__)
        return _written(name, policy, known[name].policy if name in known else None)
    scorer, allocator, selector = parts(policy)
    base = known.get(scorer.name)
    pieces = [_written(scorer.name, scorer, base.policy.scorer if base and isinstance(base.policy, Policy) else None)]
    for part, default in ((allocator, "allocator"), (selector, "selector")):
        if base is None or part != getattr(base.policy, default, None):
            pieces.append(_written(part.name, part, _default(type(part))))
    return "+".join(pieces)


def _default(part: type[Any]) -> Any:
    return part()


def _written(name: str, value: Any, default: Any) -> str:
    usual = _fields(default) if default is not None else {}
    changed = {k: v for k, v in _fields(value).items() if k not in usual or usual[k] != v}
    return name + (f"[{','.join(f'{k}={v}' for k, v in changed.items())}]" if changed else "")


def _fields(part: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.init}


def _with_options(policy: PromptPolicy, options: dict[str, str], name: str) -> PromptPolicy:
    """Each option goes to the part of the policy that has it."""
    if not isinstance(policy, Policy):
        changed: PromptPolicy = _replace(policy, options, name)
        return changed
    known = {key for part in parts(policy) for key in _fields(part)}
    _check_options(options, known, name)
    new = [_replace(part, {k: v for k, v in options.items() if k in _fields(part)}, name) for part in parts(policy)]
    return Policy(*new)


def _replace(part: Any, options: dict[str, str], name: str) -> Any:
    fields = _fields(part)
    _check_options(options, fields, name)
    values = {key: _read_value(key, text, fields[key], name) for key, text in options.items()}
    return dataclasses.replace(part, **values) if values else part


def _check_options(options: dict[str, str], known: Any, name: str) -> None:
    for key in options:
        if key not in known:
            raise PolicyError(
                expected=f"an option of {name}",
                received=f"{key!r}",
                remedy=near_names(key, known) if known else f"{name} has no options",
            )


def _read_value(key: str, text: str, default: Any, name: str) -> Any:
    readers: dict[type, Callable[[str], Any]] = {bool: _read_bool, int: int, float: float, str: str}
    reader = readers.get(type(default), ast.literal_eval)
    try:
        return reader(text)
    except (ValueError, SyntaxError):
        raise PolicyError(
            expected=f"a value of type {type(default).__name__} for {name}[{key}=...]",
            received=f"{text!r}",
            remedy=f"the default is {key}={default}",
        ) from None


def _read_bool(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _read_piece(text: str) -> tuple[str, dict[str, str]]:
    match = _PIECE.fullmatch(text.strip())
    if match is None:
        raise PolicyError(
            expected="name[option=value,...], pieces joined by '+'",
            received=f"{text!r}",
            remedy="for example snapkv[window=64]+ada",
        )
    options: dict[str, str] = {}
    for item in _split(match[2] or "", ","):
        key, equals, value = item.partition("=")
        if not item.strip():
            continue
        if not equals or not value.strip() or key.strip() in options:
            raise PolicyError(
                expected=f"option=value, each once, in the brackets of {match[1]!r}",
                received=f"{item!r}",
                remedy="for example snapkv[window=64,kernel=5]",
            )
        options[key.strip()] = value.strip()
    return match[1], options


def _split(text: str, separator: str) -> list[str]:
    """Split at the separator outside brackets and parentheses."""
    pieces, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == separator and depth == 0:
            pieces.append(text[start:index])
            start = index + 1
    return [*pieces, text[start:]]
