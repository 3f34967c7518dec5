"""Evicted keys and values are gone: what a process holds is what the ledger says."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import DynamicCache

from kvkeep import KeepCache, available_policies, parse_policy
from kvkeep.hf.support import CACHE_ARGUMENT

from .tiny import tiny_model

# Policies that want a calibration of the model have tests of their own.
EVICTING = [name for name in available_policies() if name != "full" and not parse_policy(name).needs().statistics]

# Runs in a fresh process: weighs every tensor storage that the garbage collector can reach.
WEIGH = """
    import gc, json, sys
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from kvkeep import KeepCache
    from kvkeep.hf.support import CACHE_ARGUMENT

    def storages(but=()):
        gc.collect()
        found = {}
        for item in gc.get_objects():
            if torch.is_tensor(item):
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return sum(size for pointer, size in found.items() if pointer not in but)

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=4,
                         num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096)
    model = LlamaForCausalLM(config).eval()
    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    ids = torch.randint(3, 64, (1, 1024))
    before = storages(weights)
    report = {}
    for policy in json.loads(sys.argv[1]):
        cache = KeepCache(model, policy, compression_ratio=0.75)
        with torch.no_grad():
            model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
            cut = storages(weights) - before, cache.ledger.held_bytes, cache.ledger.full_bytes
            for _ in range(3):
                model(ids[:, :1], logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        report[policy] = [*cut, storages(weights) - before, cache.ledger.held_bytes]
        del cache
        report[policy].append(storages(weights) - before)
    print(json.dumps(report))
"""


def test_live_storages_are_what_the_ledger_holds() -> None:
    names = [*EVICTING, "snapkv+threshold", "knorm+ada", "frc+topk"]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WEIGH), json.dumps(names)], capture_output=True, text=True, check=True
    )
    report = json.loads(run.stdout.splitlines()[-1])
    assert set(report) == set(names)
    for name, (alive, held, full, alive_later, held_later, after) in report.items():
        assert held <= alive < held + 2**20, name
        assert held_later <= alive_later < held_later + 2**20, name
        assert held < 0.26 * full, name
        assert after < 2**20, f"{name}: {after} bytes outlive the cache"


@pytest.mark.parametrize("policy", [*EVICTING, "snapkv+threshold", "knorm+ada"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_payload_is_the_kept_entries(policy: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    prompt = torch.randint(3, 128, (2, 150))
    cache = KeepCache(model, policy, compression_ratio=0.75)
    with torch.no_grad():
        model(prompt, **{CACHE_ARGUMENT: cache})
    entries = sum(sum(map(sum, layer)) for layer in cache.ledger.entries_per_cell)
    assert cache.ledger.payload_bytes == entries * 2 * 16 * dtype.itemsize
    assert entries <= 37 * 3 * 2 * 2  # floor(150 / 4) for 3 layers, 2 rows, 2 KV heads
    assert cache.ledger.slack_bytes == 0
    storages = {
        t.untyped_storage().data_ptr(): t for layer in cache.keep_layers for t in layer.store.tensors().values()
    }
    assert sum(t.untyped_storage().nbytes() for t in storages.values()) == cache.ledger.held_bytes


def test_layer_local_policies_hold_one_dense_layer_at_a_time() -> None:
    model = tiny_model("llama", torch.float32)
    prompt = torch.randint(3, 128, (1, 200))
    local, both = (KeepCache(model, policy, compression_ratio=0.75) for policy in ("knorm", "knorm+threshold"))
    with torch.no_grad():
        for cache in (local, both):
            model(prompt, **{CACHE_ARGUMENT: cache})
    ledger = local.ledger
    layer_kept = ledger.held_bytes // 3
    dense = 200 * 2 * 2 * 16 * 4 + 200 * 4  # keys, values and positions of one layer
    assert ledger.peak_bytes == 3 * layer_kept + dense
    # A global policy needs all layers' scores first: the whole cache, and the first cut layer beside it.
    assert both.ledger.peak_bytes > both.ledger.full_bytes


@pytest.mark.parametrize("policy", ["snapkv", "snapkv+ada", "snapkv+threshold", "frc", "pyramidkv"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_byte_budget_bounds_what_is_held(policy: str, architecture: str) -> None:
    model = tiny_model(architecture, torch.float32)
    prompt = torch.randint(3, 128, (2, 200))
    full = KeepCache(model, "full")
    with torch.no_grad():
        model(prompt, **{CACHE_ARGUMENT: full})
    for limit in (16_500, 30_000, 77_777):
        cache = KeepCache(model, policy, bytes=limit)
        with torch.no_grad():
            model(prompt, **{CACHE_ARGUMENT: cache})
        held = cache.ledger.held_bytes + cache.ledger.window_bytes
        assert held <= limit
        if not policy.startswith("frc") and limit < full.ledger.held_bytes:  # chunks may leave some unspent
            evictable = sum(layer.store.batch * layer.store.kv_heads for layer in cache.keep_layers)
            assert held > limit - evictable * (2 * 16 * 4 + 4), "one more entry per cell would have fitted"


@pytest.mark.parametrize("policy", ["snapkv+ada", "h2o", "expected-attention"])
@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_dense_keys_and_values_are_gone_before_the_next_layer(architecture: str, policy: str) -> None:
    model = tiny_model(architecture, torch.float32)
    prompt = torch.randint(3, 128, (1, 201))
    dense = 201 * 2 * 16 * 4  # bytes of a layer's keys; no other tensor of this model has that size
    alive: list[int] = []

    def count(*_: object) -> None:
        gc.collect()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage()
            for t in gc.get_objects()
            if issubclass(type(t), torch.Tensor)
        }
        alive.append(sum(storage.nbytes() == dense for storage in storages.values()))

    hooks = [layer.register_forward_pre_hook(count) for layer in model.get_decoder().layers]
    hooks.append(model.get_decoder().norm.register_forward_pre_hook(count))
    cache = KeepCache(model, policy, compression_ratio=0.75)
    with torch.no_grad():
        model(prompt, **{CACHE_ARGUMENT: cache})
        assert alive == [0, 0, 0, 0]
        alive.clear()
        model(prompt, **{CACHE_ARGUMENT: DynamicCache(config=model.config)})
        assert alive == [0, 2, 4, 6] or architecture == "phi3", "the test does not see dense keys and values"
    for hook in hooks:
        hook.remove()
