"""Which policy governs which layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.errors import PolicyError
from kvkeep.policies import (
    AnyPolicy,
    OnlinePolicy,
    PromptPolicy,
    parse_policy,
    parse_prompt_policy,
    policy_string,
)

PolicyLike = str | AnyPolicy | Mapping[int | str, str | AnyPolicy]


def online_policy(policy: PolicyLike) -> OnlinePolicy | None:
    """The online policy that governs all evictable layers; None where texts are cut at their end.

    Raises:
        PolicyError: an online policy for some layers only.
    """
    if not isinstance(policy, Mapping):
        parsed = parse_policy(policy)
        return parsed if isinstance(parsed, OnlinePolicy) else None
    for key, value in policy.items():
        parsed = parse_policy(value)
        if isinstance(parsed, OnlinePolicy):
            raise PolicyError(
                expected="one policy for all layers where it holds a cap at every step",
                received=f"{policy_string(parsed)} for layer {key!r} of a table",
                remedy="give it alone, as policy=...",
            )
    return None


def policy_table(policy: PolicyLike, indices: Sequence[int], layers: int) -> list[PromptPolicy]:
    """The policy of each evictable layer.

    Args:
        policy: a policy or its name, or a table by layer index with "*" for the others.
        indices: the model's indices of the evictable layers.
        layers: number of layers of the model.

    Raises:
        PolicyError: an index that the model does not have or does not evict, or layers without a policy.
    """
    if not isinstance(policy, Mapping):
        same = parse_prompt_policy(policy)
        return [same] * len(indices)
    parsed = {key: parse_prompt_policy(value) for key, value in policy.items()}
    unknown = [key for key in parsed if key != "*" and key not in indices]
    missing = [index for index in indices if index not in parsed and "*" not in parsed]
    if unknown or missing:
        raise PolicyError(
            expected=f"a policy for each evictable layer of {layers}: {list(indices)}, or '*' for the others",
            received=f"none for {missing}" if missing else f"{unknown}",
            remedy="add '*', and leave out sliding-window layers, which keep their window",
        )
    return [parsed[index] if index in parsed else parsed["*"] for index in indices]


def table_to_text(policy: PolicyLike) -> Any:
    """A policy or a table as JSON holds it: a string, or a dictionary with string keys."""
    if isinstance(policy, Mapping):
        return {str(key): policy_string(parse_policy(value)) for key, value in policy.items()}
    return policy_string(parse_policy(policy))


def table_from_text(text: Any) -> PolicyLike:
    """What `table_to_text` wrote."""
    if isinstance(text, dict):
        return {key if key == "*" else int(key): value for key, value in text.items()}
    return str(text)
