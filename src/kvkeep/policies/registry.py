"""What is known by name: policies, their parts, and prefixes of texts; `grammar` reads the texts that name them.

Other packages add policies through the entry point group `kvkeep.policies` (name = module:factory, a factory without
arguments that returns a policy or an `Entry`), or at run time with `register`.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

from kvkeep.errors import PolicyError
from kvkeep.policies.online import OnlinePolicy
from kvkeep.policies.protocols import Allocator, Policy, PromptPolicy, Scorer, Selector, parts

ENTRY_POINTS = "kvkeep.policies"

AnyPolicy = PromptPolicy | OnlinePolicy
Kind = Literal["prompt", "online"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


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
    policy: AnyPolicy
    summary: str
    paper: str

    @property
    def kind(self) -> Kind:
        """Whether it cuts where a text ends (`prompt`), or holds a cap at every step (`online`)."""
        return "online" if isinstance(self.policy, OnlinePolicy) else "prompt"

    def options(self) -> dict[str, Any]:
        """Every option with its default, as they may be written in brackets."""
        if not isinstance(self.policy, Policy):
            return options_of(self.policy)
        return {name: value for part in parts(self.policy) for name, value in options_of(part).items()}


@dataclass(frozen=True)
class Prefix:
    """What the texts `name:...` lead to.

    Attributes:
        name: what stands before the colon.
        factory: `module:function`, imported when a text has the prefix; the function makes a policy of what stands
            behind the colon.
        placeholder: what stands there, for lists of policies: `PATH`.
        summary: one line on what it does.
        alone: whether the name without a colon is a policy, too; the function is then called with an empty text.
    """

    name: str
    factory: str
    placeholder: str
    summary: str
    alone: bool = False

    def policy(self, rest: str) -> AnyPolicy:
        """The policy that `name:rest` names."""
        module, _, function = self.factory.partition(":")
        return checked_policy(getattr(import_module(module), function)(rest))


_policies: dict[str, Entry] = {}
_parts: dict[str, type[Allocator] | type[Selector]] = {}
_prefixes: dict[str, Prefix] = {}
_plugins_are_in = False


def register(name: str, policy: AnyPolicy, *, summary: str, paper: str = "") -> None:
    """Make a policy known under a name.

    Raises:
        PolicyError: the name is taken, or cannot be written in the grammar; or the object is no policy.
    """
    _check_name(name)
    _policies[name] = Entry(name, checked_policy(policy), summary, paper)


def register_part(part: type[Allocator] | type[Selector]) -> None:
    """Make an allocator or a selector known under its `name`.

    Raises:
        PolicyError: the name is taken, or cannot be written in the grammar.
    """
    _check_name(part.name)
    _parts[part.name] = part


def register_prefix(name: str, factory: str, *, placeholder: str, summary: str, alone: bool = False) -> None:
    """Let texts `name:...` name policies that are made of what stands behind the colon, such as a file.

    A policy that is made so, or its scorer, has an attribute `text` that reads back as the same policy: `policy_string`
    asks for it. For the arguments see `Prefix`. What makes the policies is imported when it is first needed.

    Raises:
        PolicyError: the name is taken, or cannot be written in the grammar.
    """
    _check_name(name)
    _prefixes[name] = Prefix(name, factory, placeholder, summary, alone)


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise PolicyError(
            expected="a name of lower-case letters, digits and dashes",
            received=f"{name!r}",
            remedy="choose another name",
        )
    taken = {**_prefixes, **_parts, **_policies}
    if name in taken:
        raise PolicyError(
            expected="a name that is not taken",
            received=f"{name!r}, which is {taken[name]}",
            remedy="choose another name",
        )


def checked_policy(policy: AnyPolicy) -> AnyPolicy:
    """The object, if it is a policy.

    Raises:
        PolicyError: it is none.
    """
    if isinstance(policy, AnyPolicy) and not isinstance(policy, type):  # a class has the methods too
        return policy
    remedy = "a policy has scope, needs, judge and choose, as Policy(scorer, allocator, selector) does, or is an "
    remedy += "OnlinePolicy"
    if isinstance(policy, Scorer) or (isinstance(policy, type) and issubclass(policy, Scorer)):
        remedy = "a scorer is one of three parts of a policy: Policy(scorer, Uniform(), TopK())"
    raise PolicyError(
        expected="a policy or its name", received=f"{policy!r} of type {type(policy).__name__}", remedy=remedy
    )


def available_policies(kind: Kind = "prompt") -> Mapping[str, Entry]:
    """All registered policies of a kind, those of installed entry points included.

    Args:
        kind: `prompt` for those that cut where a text ends, `online` for those that hold a cap at every step.
    """
    return {name: entry for name, entry in all_policies().items() if entry.kind == kind}


def all_policies() -> Mapping[str, Entry]:
    """All registered policies of both kinds."""
    _load_entry_points()
    return _policies


def _load_entry_points() -> None:
    """Once in a process: looking through everything that is installed takes milliseconds.

    A plugin that cannot be used costs a warning, not the other policies.
    """
    global _plugins_are_in
    if _plugins_are_in:
        return
    _plugins_are_in = True  # from now on, since a plugin may itself ask for policies
    for point in entry_points(group=ENTRY_POINTS):
        try:
            made = point.load()()
            entry = made if isinstance(made, Entry) else Entry(point.name, made, _first_line(made), paper="")
            register(entry.name, entry.policy, summary=entry.summary, paper=entry.paper)
        except Exception as error:
            warnings.warn(
                f"the policy {point.name!r} of another package ({point.value}) is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=3,
            )


def _first_line(policy: AnyPolicy) -> str:
    """What the scorer says of itself, or a policy of another shape."""
    return summary_of(type(policy.scorer) if type(policy) is Policy else type(policy))


def summary_of(kind: type) -> str:
    """The first line of what a class says of itself, without its full stop."""
    return (kind.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def part_types() -> Mapping[str, type[Allocator] | type[Selector]]:
    """All registered allocators and selectors."""
    return _parts


def prefixes() -> Mapping[str, Prefix]:
    """All registered prefixes."""
    return _prefixes


def options_of(part: Any) -> dict[str, Any]:
    """Every option of a part, or of a policy that has no parts, with its value."""
    if not dataclasses.is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.init}
