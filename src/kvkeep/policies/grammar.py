"""Policies by name: one grammar for Python, the command line and results.

    snapkv                                     a registered policy
    snapkv[window=64,kernel=7]                 with options of any of its parts
    snapkv[window=64]+ada+chunks[length=20]    with its allocator and its selector exchanged
    program:path/to/file.py                    made of what stands behind a registered prefix

Names may be written in upper case.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvkeep.errors import KvkeepError, PolicyError, near_names
from kvkeep.policies.online import OnlinePolicy
from kvkeep.policies.protocols import Allocator, Policy, PromptPolicy, parts, with_part
from kvkeep.policies.registry import AnyPolicy, all_policies, checked_policy, options_of, part_types, prefixes

_PIECE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)(?:\[(.*)\])?", re.DOTALL)
_CUSTOM = "custom:"  # begins the description of a policy that no text names; the colon is not in the grammar


def parse_policy(text: str | AnyPolicy) -> AnyPolicy:
    """The policy that a text such as `snapkv[window=64]+ada` names; a policy is returned as it is.

    Raises:
        PolicyError: an unknown policy, part or option (near names are suggested), or a text that cannot be read.
    """
    if not isinstance(text, str):
        return checked_policy(text)
    if text.strip().startswith(_CUSTOM):
        raise PolicyError(
            expected="the name of a policy",
            received=f"{text!r}, which describes a policy that no name leads to",
            remedy="a policy of one's own must be given as an object, for example KeepCache.load(policy=...)",
        )
    policy, name, rest = _read_prefixed(text) or _read_registered(text)
    given: dict[str, str] = {}
    for piece in rest:
        part_name, part_options = _read_piece(piece, part_types(), "an allocator or a selector after '+'")
        if not isinstance(policy, Policy):
            raise PolicyError(
                expected=f"{name!r} alone", received=f"{text!r}", remedy=f"{name} is not made of exchangeable parts"
            )
        part = part_types()[part_name]
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


def parse_prompt_policy(text: str | AnyPolicy) -> PromptPolicy:
    """`parse_policy`, for what cuts a text where it ends.

    Raises:
        PolicyError: as for `parse_policy`; or the policy is an online one.
    """
    policy = parse_policy(text)
    if isinstance(policy, OnlinePolicy):
        raise PolicyError(
            expected="a policy that cuts where a text ends",
            received=f"{policy_string(policy)}, which holds a cap at every step",
            remedy="use it with KeepCache, Session or `kvkeep run`; `kvkeep policies` tells the kinds apart",
        )
    return policy


def _read_registered(text: str) -> tuple[AnyPolicy, str, list[str]]:
    """The registered policy that a text begins with, its name, and the pieces behind it."""
    first, *rest = _split(text, "+")
    known = all_policies()
    name, options = _read_piece(first, known, "a known policy")
    return _with_options(known[name].policy, options, name), name, rest


def _read_prefixed(text: str) -> tuple[AnyPolicy, str, list[str]] | None:
    """The same for a text with a prefix; None where it has none. A path may have a plus sign, so only parts count."""
    name, colon, rest = text.strip().partition(":")
    prefix = prefixes().get(name.strip().lower())
    if prefix is None or not (colon or prefix.alone):
        return None
    pieces = _split(rest, "+")
    first = len(pieces)
    while first > 1 and pieces[first - 1].partition("[")[0].strip().lower() in part_types():
        first -= 1
    return prefix.policy("+".join(pieces[:first]).strip()), prefix.name, pieces[first:]


def policy_string(policy: AnyPolicy) -> str:
    """A text that `parse_policy` reads back as the same policy, with every option that is not a default.

    A policy that no text names, as one of parts that are not registered, is described: `custom:module.Class(...)`.
    `parse_policy` refuses such a text.
    """
    for text in _possible_texts(policy):
        if _reads_back(text, policy):
            return text
    described = parts(policy) if type(policy) is Policy else (policy,)
    return _CUSTOM + "+".join(_description(part) for part in described)


def _possible_texts(policy: AnyPolicy) -> Iterator[str]:
    """Texts that may name the policy, the shortest first. Whoever asks reads them back: options may be ambiguous."""
    known = all_policies()
    yield from known
    alike = [(entry.name, entry.policy) for entry in known.values() if type(entry.policy) is type(policy)]
    alike += [(text, made) for text, made in _prefixed(policy) if type(made) is type(policy)]
    if not isinstance(policy, Policy):
        for name, usual in alike:
            yield name + _options(policy, usual)
        return
    bases = [(name, p) for name, p in alike if isinstance(p, Policy) and type(p.scorer) is type(policy.scorer)]
    for name, base in sorted(bases, key=lambda pair: pair[0] != policy.scorer.name):
        pieces = [name + _options(policy.scorer, base.scorer)]
        for part, usual_part in zip(parts(policy)[1:], parts(base)[1:], strict=True):
            if type(part) is not type(usual_part) or _options(part, usual_part):
                pieces += [key + _options(part, kind()) for key, kind in part_types().items() if kind is type(part)]
        yield "+".join(pieces)


def _prefixed(policy: AnyPolicy) -> Iterator[tuple[str, AnyPolicy]]:
    """The text with a prefix that a policy or its scorer says it was made of, and what it leads to now."""
    text = getattr(policy.scorer if isinstance(policy, Policy) else policy, "text", None)
    if not isinstance(text, str):
        return
    try:
        yield text, parse_policy(text)
    except KvkeepError:  # the file is gone, or another one by now
        return


def _reads_back(text: str, policy: AnyPolicy) -> bool:
    try:
        return bool(parse_policy(text) == policy)
    except Exception:  # options of other people's classes may refuse in their own ways to be read, or to be compared
        return False


def _options(part: Any, usual: Any) -> str:
    """The options that differ from the usual ones, in brackets."""
    defaults = {key: str(value) for key, value in options_of(usual).items()}
    changed = [f"{key}={value}" for key, value in options_of(part).items() if str(value) != defaults[key]]
    return f"[{','.join(changed)}]" if changed else ""


def _description(part: object) -> str:
    kind = type(part)
    # Python's own repr has an address, which is another one in each process.
    text = f"{kind.__qualname__}(...)" if kind.__repr__ is object.__repr__ else repr(part)
    return f"{kind.__module__}.{text}"


def _with_options(policy: AnyPolicy, options: dict[str, str], name: str) -> AnyPolicy:
    """Each option goes to the part of the policy that has it."""
    if not isinstance(policy, Policy):
        changed: AnyPolicy = _replace(policy, options, name)
        return changed
    known = {key for part in parts(policy) for key in options_of(part)}
    _check_options(options, known, name)
    new = [_replace(part, {k: v for k, v in options.items() if k in options_of(part)}, name) for part in parts(policy)]
    return dataclasses.replace(policy, scorer=new[0], allocator=new[1], selector=new[2])  # a subclass stays one


def _replace(part: Any, options: dict[str, str], name: str) -> Any:
    fields = options_of(part)
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


def _read_piece(text: str, known: Mapping[str, Any], expected: str) -> tuple[str, dict[str, str]]:
    """One of the known names, and the options in its brackets."""
    match = _PIECE.fullmatch(text.strip())
    if match is None:
        raise PolicyError(
            expected="name[option=value,...], pieces joined by '+'",
            received=f"{text!r}",
            remedy="for example snapkv[window=64]+ada",
        )
    name = match[1].lower()
    if name not in known:  # kvpress says SnapKVPress
        remedy = near_names(name.removesuffix("press") or name, known)
        raise PolicyError(expected=expected, received=f"{match[1]!r}", remedy=remedy)
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
    return name, options


def _split(text: str, separator: str) -> list[str]:
    """Split at the separator outside brackets and parentheses."""
    pieces, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == separator and depth == 0:
            pieces.append(text[start:index])
            start = index + 1
    return [*pieces, text[start:]]
