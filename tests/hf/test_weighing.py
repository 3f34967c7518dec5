"""A cache weighs what its storages weigh, each once: checked against arithmetic and against KeepCache's own ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from kvkeep import KeepCache, measure_bytes
from kvkeep.errors import UnsupportedError
from kvkeep.hf.support import CACHE_ARGUMENT

from .tiny import tiny_model

IDS = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(0)).tolist()
KV_HEADS, SIZE, DOUBLE = 2, 16, 8
VECTORS = 2 * KV_HEADS * SIZE * DOUBLE  # keys and values of one token in one layer
COUNTER = 8  # transformers keeps the size of a sliding window as a tensor


def feed(model: Any, cache: Any, ids: list[int]) -> None:
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=True, **{CACHE_ARGUMENT: cache})


def pair(count: int = 10) -> tuple[Tensor, Tensor]:
    return torch.ones(1, KV_HEADS, count, SIZE).double(), torch.ones(1, KV_HEADS, count, SIZE).double()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["knorm", "snapkv[window=6]+ada", "snapkv[window=6]+threshold", "full"])
def test_a_keep_cache_weighs_what_its_ledger_says(architecture: str, policy: str) -> None:
    model = tiny_model(architecture)
    cache = KeepCache(model, policy, compression_ratio=0.0 if policy == "full" else 0.5)
    for ids in (IDS, [5], [6, 7]):  # the cut, then a tail with slack
        feed(model, cache, ids)
        ledger, weighed = cache.ledger, measure_bytes(cache)
        counters = COUNTER * len(cache.sliding_layers)
        assert weighed.total == ledger.held_bytes + ledger.window_bytes + counters
        assert weighed.devices == {"cpu": weighed.total}
        assert [layer.name for layer in weighed.layers] == [f"layers[{i}]" for i in range(3)]
        assert weighed.outside.total == 0
        for layer in cache.keep_layers:
            parts = layer.store.bytes()
            assert weighed.layers[layer.index].keys_values == parts.payload + parts.slack
            assert weighed.layers[layer.index].other == parts.metadata
    assert ledger.slack_bytes > 0


def test_a_prompt_in_chunks_weighs_its_queries_too() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "snapkv[window=6]", compression_ratio=0.5, prompt_tokens=60, cut_chunks=True)
    feed(model, cache, IDS[:30])
    assert cache.ledger.state_bytes > 0
    assert measure_bytes(cache).total == cache.ledger.held_bytes
    assert measure_bytes(cache).other == cache.ledger.state_bytes + cache.ledger.metadata_bytes


def test_rows_of_a_fork_share_what_they_kept() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    feed(model, cache, IDS)
    assert measure_bytes([cache, cache.fork()]).total == measure_bytes(cache).total
    fork = cache.fork()
    feed(model, fork, [5])
    both = measure_bytes([cache, fork])
    assert both.total == measure_bytes(cache).total + sum(layer.store.tail.nbytes for layer in fork.keep_layers)
    assert [layer.name for layer in both.layers[:2]] == ["[0].layers[0]", "[0].layers[1]"]


def test_a_dynamic_cache_weighs_its_tokens() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    assert measure_bytes(cache).total == 0
    feed(model, cache, IDS)
    weighed = measure_bytes(cache)
    assert weighed.total == weighed.keys_values == 3 * 60 * VECTORS
    assert [layer.total for layer in weighed.layers] == [60 * VECTORS] * 3


def test_a_view_weighs_the_storage_that_it_keeps_alive() -> None:
    cache = DynamicCache()
    cache.update(*pair(100), 0)
    layer = cache.layers[0]
    layer.keys, layer.values = layer.keys[:, :, :3], layer.values[:, :, :3].clone()
    assert measure_bytes(cache).total == 100 * VECTORS // 2 + 3 * VECTORS // 2


def test_transformers_windows_keep_the_whole_text_alive() -> None:
    model = tiny_model("gemma3")
    cache = DynamicCache(config=model.config)
    feed(model, cache, IDS)
    window = cache.layers[0]
    assert window.keys.shape[2] == 15
    assert measure_bytes(cache).layers[0].keys_values == 60 * VECTORS


def test_storages_that_layers_share_are_counted_once() -> None:
    cache = DynamicCache()
    cache.update(*pair(), 0)
    cache.update(*pair(), 1)
    cache.layers[1].keys = cache.layers[0].keys[:, :, 2:]
    weighed = measure_bytes(cache)
    assert [layer.total for layer in weighed.layers] == [10 * VECTORS, 10 * VECTORS // 2]
    assert weighed.total == 15 * VECTORS


def test_a_static_cache_weighs_what_it_reserved() -> None:
    model = tiny_model("llama")
    cache = StaticCache(config=model.config, max_cache_len=32)
    for layer in range(3):
        cache.update(*pair(), layer)
    weighed = measure_bytes(cache)
    assert weighed.keys_values == 3 * 32 * VECTORS
    assert weighed.other == 3 * COUNTER


def test_both_halves_of_an_encoder_decoder_cache_count() -> None:
    own, cross = DynamicCache(), DynamicCache()
    own.update(*pair(4), 0)
    cross.update(*pair(9), 0)
    weighed = measure_bytes(EncoderDecoderCache(own, cross))
    assert {layer.name: layer.total for layer in weighed.layers} == {
        "self_attention_cache.layers[0]": 4 * VECTORS,
        "cross_attention_cache.layers[0]": 9 * VECTORS,
    }


def test_tuples_and_lists_of_older_libraries() -> None:
    @dataclass
    class Old:
        key_cache: list[Tensor]
        value_cache: list[Tensor]
        seen: Tensor

    tensors = [pair(), pair()]
    legacy = measure_bytes(tuple(tensors))
    assert [(layer.name, layer.keys_values) for layer in legacy.layers] == [
        ("layers[0]", 10 * VECTORS),
        ("layers[1]", 10 * VECTORS),
    ]
    old = measure_bytes(Old([k for k, _ in tensors], [v for _, v in tensors], torch.zeros(4, dtype=torch.int64)))
    assert [layer.keys_values for layer in old.layers] == [10 * VECTORS] * 2
    assert (old.outside.keys_values, old.outside.other) == (0, 32)


class Slots:
    __slots__ = ("held", "never_set")

    def __init__(self, held: object) -> None:
        self.held = held


def test_whatever_holds_a_cache_is_looked_into_and_models_are_not() -> None:
    model = tiny_model("llama")
    cache = DynamicCache()
    cache.update(*pair(), 0)
    cache.me = cache  # a cycle
    cache.model = model
    cache.bias = nn.Parameter(torch.zeros(1000))
    cache.call = lambda: model
    assert measure_bytes(cache).total == 10 * VECTORS
    assert measure_bytes({"past": [Slots({"deep": cache})]}).total == 10 * VECTORS
    deep: list[Any] = [cache]
    for _ in range(5000):
        deep = [deep]
    assert measure_bytes(deep).total == 10 * VECTORS


def test_the_weights_of_a_policy_are_not_the_caches() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    feed(model, cache, IDS)

    class Trained:
        scope = "layer"
        weights = None

        def needs(self) -> None: ...
        def judge(self, observation: object) -> None: ...
        def choose(self, judgements: object) -> None: ...

    before = measure_bytes(cache).total
    cache.policy = Trained()
    cache.policy.weights = torch.zeros(1000)
    assert measure_bytes(cache).total == before


def test_quantised_keys_count_with_their_scales() -> None:
    cache = DynamicCache()
    cache.update(*pair(), 0)
    cache.layers[0]._quantized_keys = (torch.zeros(40, dtype=torch.uint8), {"scale": torch.zeros(5), "shape": (1, 2)})
    cache.layers[0].positions = torch.zeros(10, dtype=torch.int32)
    [layer] = measure_bytes(cache).layers
    assert (layer.keys_values, layer.other) == (10 * VECTORS + 60, 40)


class Packed(torch.Tensor):
    """A tensor that is made of another, as those of quantisation libraries are."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Packed:
        packed = torch.Tensor._make_wrapper_subclass(cls, (data.numel() * 2,), dtype=torch.float32)
        packed.data_inside = data
        return packed

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_inside"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def test_tensors_made_of_tensors_weigh_what_is_inside() -> None:
    weighed = measure_bytes({"keys": Packed(torch.zeros(48, dtype=torch.uint8))})
    assert (weighed.keys_values, weighed.other) == (48, 0)


def test_what_has_no_memory_weighs_nothing() -> None:
    assert measure_bytes({"keys": torch.zeros(10, device="meta"), "values": torch.zeros(0)}).total == 0


@pytest.mark.parametrize("what", [None, "cache", 3, {}, (), object(), {"a": [1, 2]}, tiny_model("llama")])
def test_what_holds_no_cache_is_refused(what: object) -> None:
    with pytest.raises(UnsupportedError, match="a key-value cache, or something that holds one"):
        measure_bytes(what)


def test_a_sparse_tensor_is_refused_by_its_place() -> None:
    with pytest.raises(UnsupportedError, match=r"sparse_coo at .*'keys'"):
        measure_bytes({"keys": torch.eye(3).to_sparse()})


def test_the_record_is_plain() -> None:
    cache = DynamicCache()
    cache.update(*pair(), 0)
    record = measure_bytes(cache).to_dict()
    assert record["total"] == record["keys_values"] == 10 * VECTORS
    assert record["layers"][0] == {"name": "layers[0]", "keys_values": 10 * VECTORS, "other": 0}
