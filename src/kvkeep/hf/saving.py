"""A KeepCache as a file: safetensors for what it holds, JSON in the header for what it has seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.hf.models import weights_fingerprint
from kvkeep.hf.policy_table import PolicyLike, table_from_text, table_to_text
from kvkeep.hf.support import unwrap

if TYPE_CHECKING:
    from kvkeep.hf.cache import KeepCache

SCHEMA_VERSION = 1


def save(cache: KeepCache, path: Path, *, session: dict[str, Any] | None = None) -> None:
    """Write a cache. The file appears under its name when it is whole; a former one stays until then.

    Args:
        cache: what to write.
        path: the file.
        session: the conversation that the cache belongs to, as JSON holds it; `load` does not need it.
    """
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.keep_layers):
        used = layer.store.fork()
        used.trim()
        tensors |= {f"layer.{index}.{name}": tensor.contiguous() for name, tensor in used.tensors().items()}
    for index, sliding in enumerate(cache.sliding_layers):
        if sliding.keys is not None and sliding.values is not None:
            tensors[f"window.{index}.keys"] = sliding.keys.contiguous()
            tensors[f"window.{index}.values"] = sliding.values.contiguous()
    facts = {
        "schema_version": SCHEMA_VERSION,
        "model": weights_fingerprint(cache.model),
        "policy": table_to_text(cache.policy),
        "budget": cache.budget.describe(),
        "protect": cache.protect,
        "prompt_tokens": cache.prompt_tokens,
        "progress": cache.export_progress(),
        "peak_bytes": cache.ledger.peak_bytes,
        "batch": [layer.store.batch for layer in cache.keep_layers],
        "kv_heads": [layer.store.kv_heads for layer in cache.keep_layers],
        "seen": [sliding.cumulative_length for sliding in cache.sliding_layers],
        "session": session,
    }
    path = path.expanduser()
    temporary = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, temporary, metadata={"kvkeep": json.dumps(facts)})
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CacheStateError(
            expected="a path that can be written to", received=f"{path}: {error}", remedy="choose an existing folder"
        ) from None


def load(kind: type[KeepCache], path: Path, model: Any, policy: PolicyLike | None) -> KeepCache:
    """Read what `save` wrote into a new cache for `model`."""
    facts, tensors = _read(path)
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise CacheStateError(
            expected=f"a cache file of schema version {SCHEMA_VERSION}",
            received=f"{facts.get('schema_version')}",
            remedy="save the cache again with this version of kvkeep",
        )
    if facts["model"] != weights_fingerprint(unwrap(model)):
        raise CacheStateError(
            expected=f"the model that the cache was made with, {facts['model']}",
            received=weights_fingerprint(unwrap(model)),
            remedy="load the same weights in the same dtype",
        )
    cache = kind(
        model,
        policy if policy is not None else table_from_text(facts["policy"]),
        protect=[tuple(span) for span in facts["protect"]],
        prompt_tokens=facts["prompt_tokens"],
        **facts["budget"],
    )
    device = model.device
    for index, layer in enumerate(cache.keep_layers):
        start = f"layer.{index}."
        mine = {name[len(start) :]: t.to(device) for name, t in tensors.items() if name.startswith(start)}
        layer.store.load_tensors(mine, facts["batch"][index], facts["kv_heads"][index])
        layer.is_initialized = True
    for index, sliding in enumerate(cache.sliding_layers):
        pair = (tensors.get(f"window.{index}.keys"), tensors.get(f"window.{index}.values"))
        keys, values = (None if tensor is None else tensor.to(device) for tensor in pair)
        sliding.restore((keys, values, facts["seen"][index]))
    cache.import_progress(facts["progress"], facts["peak_bytes"])
    return cache


def read_session(path: Path) -> dict[str, Any]:
    """What `save` was told of the conversation."""
    session: dict[str, Any] | None = _read_facts(path).get("session")
    if session is None:
        raise CacheStateError(
            expected="a file that Session.save wrote",
            received=f"{path}, a cache without a conversation",
            remedy="load it with KeepCache.load",
        )
    return session


def _read_facts(path: Path) -> dict[str, Any]:
    with _opened(path) as file:
        facts: dict[str, Any] = json.loads((file.metadata() or {})["kvkeep"])
        return facts


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts = _read_facts(path)
    with _opened(path) as file:
        return facts, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CacheStateError(
            expected="a whole file that KeepCache.save wrote",
            received=f"{path}: {error}",
            remedy="save the cache again",
        ) from None
