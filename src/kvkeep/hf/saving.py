"""A KeepCache as a file: safetensors for what it holds, JSON in the header for what it has seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.hf.models import weights_fingerprint
from kvkeep.hf.policy_table import PolicyLike, table_from_text, table_to_text
from kvkeep.hf.support import unwrap
from kvkeep.store.sealed import read_sealed, write_sealed

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
    cache.refuse_unusable()
    path = path.expanduser()
    if path.exists() and not path.is_file():
        raise CacheStateError(
            expected="the path of a file",
            received=f"{path}, which is none",
            remedy="name a file in a folder that exists",
        )
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.evictable_layers):
        tensors |= {f"layer.{index}.{name}": tensor for name, tensor in layer.export().items()}
    for index, sliding in enumerate(cache.sliding_layers):
        if sliding.keys is not None and sliding.values is not None:
            tensors[f"window.{index}.keys"] = sliding.keys
            tensors[f"window.{index}.values"] = sliding.values
    for index, (keys, values) in enumerate(cache.last_windows()):
        # What `rewind` goes back to, where tokens have come since.
        if keys is not None and values is not None and keys is not cache.sliding_layers[index].keys:
            tensors[f"cut.{index}.keys"], tensors[f"cut.{index}.values"] = keys, values
    facts = {
        "schema_version": SCHEMA_VERSION,
        "model": weights_fingerprint(cache.model),
        "policy": table_to_text(cache.policy),
        "budget": cache.budget.describe(),
        "protect": cache.protect,
        "prompt_tokens": cache.prompt_tokens,
        "rerotate_keys": cache.rerotate_keys,
        "progress": cache.export_progress(),
        "peak_bytes": cache.ledger.peak_bytes,
        "batch": [layer.store.batch for layer in cache.evictable_layers],
        "kv_heads": [layer.store.kv_heads for layer in cache.evictable_layers],
        "seen": [sliding.cumulative_length for sliding in cache.sliding_layers],
        "session": session,
    }
    try:
        write_sealed(path, facts, tensors)
    except OSError as error:
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
        rerotate_keys=facts.get("rerotate_keys", False),
        **facts["budget"],
    )
    device = model.device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    for index, layer in enumerate(cache.evictable_layers):
        start = f"layer.{index}."
        mine = {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}
        layer.load(mine, facts["batch"][index], facts["kv_heads"][index])
        layer.is_initialized = True
    windows = []
    for index, sliding in enumerate(cache.sliding_layers):
        keys, values = (tensors.get(f"window.{index}.{name}") for name in ("keys", "values"))
        sliding.restore((keys, values, facts["seen"][index]))
        windows.append((tensors.get(f"cut.{index}.keys", keys), tensors.get(f"cut.{index}.values", values)))
    cache.import_progress(facts["progress"], facts["peak_bytes"], windows)
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
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        return read_sealed(path.expanduser())
    except ValueError as error:
        raise CacheStateError(
            expected="a whole file that KeepCache.save wrote",
            received=f"{path}: {error}",
            remedy="save the cache again",
        ) from None
