"""Budgets: what is kept is what was asked for, in entries and in bytes, measured on the tensors themselves."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from kvkeep import BudgetError, KeepCache, Session
from kvkeep.attention import joint
from kvkeep.observation import attention
from kvkeep.policies import Ada, Policy, Threshold, TopK, Uniform, parse_policy
from kvkeep.testing import fake_model

from ..hf.tiny import tiny_model
from .common import EVICTING, SHAPES, Indifferent, LockStep, feed, generate, held, text

ENTRY = 2 * 16 * 8  # bytes of one key and one value of the tiny models in float64


def storages(cache: KeepCache) -> int:
    """Bytes of all storages that the evictable layers own."""
    owned = [tensor for layer in cache.keep_layers for tensor in layer.store.tensors().values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in owned}.values())


@pytest.mark.parametrize("policy", EVICTING)
def test_p02_something_stays_of_the_shortest_text(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: the count rounds to 0 and nothing is kept. Right: at least one entry in every cell or layer, and a
    cache that goes on."""
    for length, ratio in ((1, 0.6), (2, 0.6), (3, 0.99)):
        pair = LockStep(llama, KeepCache(llama, policy, compression_ratio=ratio))
        pair.feed(text(2, length))
        counts = pair.cache.ledger.entries_per_cell
        assert all(sum(row) >= 1 for layer in counts for row in layer)
        assert [sum(sum(layer[row]) for layer in counts) for row in range(2)] == [3 * 2, 3 * 2]
        if parse_policy(policy).scope == "layer":
            assert {n for layer in counts for row in layer for n in row} == {1}
        pair.feed(text(2, 1, seed=1))


@pytest.mark.parametrize("allocator", [Ada(safeguard=0), Threshold(floor=0)], ids=str)
def test_p02_heads_may_lose_all_but_no_layer_does(llama: PreTrainedModel, allocator: Any) -> None:
    """Elsewhere: a safeguard of 0 masks a whole head or layer: NaN. Right: finite and exact, and a layer keeps one."""
    pair = LockStep(llama, KeepCache(llama, Policy(Indifferent(), allocator, TopK()), entries=1))
    pair.feed(text(2, 30))
    counts = pair.cache.ledger.entries_per_cell
    assert all(sum(row) >= 1 for layer in counts for row in layer)
    assert any(0 in row for layer in counts for row in layer), "no head lost all; the test shows nothing"
    pair.feed(text(2, 1, seed=1))
    pair.feed(text(2, 4, seed=2))


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.75])
@pytest.mark.parametrize("policy", SHAPES)
def test_p13_p31_p67_the_fraction_is_measured_on_the_storages(
    llama: PreTrainedModel, policy: str, ratio: float
) -> None:
    """Elsewhere: the requested ratio is reported while masked, zeroed or repeated entries stay in memory. Right: bytes
    of KV heads, not query heads (4:2 here), counted on storages: ratio x full, and 4 bytes for a position."""
    cache = KeepCache(llama, policy, compression_ratio=ratio)
    feed(llama, cache, text(2, 80))
    ledger = cache.ledger
    assert ledger.full_bytes == 3 * 2 * 2 * 80 * ENTRY
    kept = 3 * 2 * 2 * int(80 * (1 - ratio) + 1e-9)
    assert ledger.entries <= kept
    if "chunk" not in policy and policy != "frc":
        assert ledger.entries == kept
    assert ledger.payload_bytes == ledger.entries * ENTRY
    assert ledger.metadata_bytes == ledger.entries * 4 + 3 * (2 * 2 + 1) * 4
    assert ledger.slack_bytes == 0
    assert ledger.held_bytes == storages(cache)
    assert ledger.fraction == ledger.held_bytes / ledger.full_bytes
    assert ledger.entries == sum(
        len(cell) for layer in range(3) for row in range(2) for cell in held(cache, layer, row)
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_p67_bytes_are_those_of_kv_heads(kv_heads: int) -> None:
    """Elsewhere: keys are repeated to the query heads before they are cached, so that grouped attention saves nothing.
    Right: with 4 query heads to 1 KV head a quarter of the bytes, before the cut and after it."""
    model, _ = fake_model(heads=4, kv_heads=kv_heads)
    cache = KeepCache(model, "snapkv[window=6]+ada", compression_ratio=0.5, prompt_tokens=60)
    feed(model, cache, text(1, 59))
    assert cache.ledger.payload_bytes == 59 * kv_heads * 2 * 2 * 16 * 4
    feed(model, cache, text(1, 1))
    assert cache.ledger.payload_bytes == 30 * kv_heads * 2 * 2 * 16 * 4 == cache.ledger.full_bytes // 2
    assert storages(cache) == cache.ledger.held_bytes


def test_p13_cutting_twice_is_reported_as_what_is_left(llama: PreTrainedModel) -> None:
    """Elsewhere: two cuts of .5 are reported as .5. Right: the fraction is that of what is held, whatever was asked."""
    cache = KeepCache(llama, "knorm", compression_ratio=0.5)
    feed(llama, cache, text(1, 80))
    once = cache.ledger.payload_bytes / cache.ledger.full_bytes
    cache.cut_next()
    feed(llama, cache, text(1, 1))
    twice = cache.ledger.payload_bytes / cache.ledger.full_bytes
    assert once == 0.5
    assert twice == 40 / 81, "the ratio refers to the tokens seen: 40 of 81 stay, the new one competes"
    tighter = KeepCache(llama, "knorm", entries=20)
    feed(llama, tighter, text(1, 80))
    assert tighter.ledger.payload_bytes / tighter.ledger.full_bytes == 0.25


@pytest.mark.parametrize("length", [50, 500])
def test_p19_a_budget_is_a_ratio_or_a_number_or_bytes(llama: PreTrainedModel, length: int) -> None:
    """Elsewhere: only a ratio can be given. Right: all three; a number keeps the same of 50 and of 500 tokens."""
    kept = {}
    held_bytes = 3 * (2 * 20 * (ENTRY + 4) + 12)
    for budget in ({"compression_ratio": 0.6}, {"entries": 128}, {"entries": 20}, {"bytes": held_bytes}):
        cache = KeepCache(llama, "knorm", **budget)
        feed(llama, cache, text(1, length))
        kept[str(cache.budget)] = {len(cell) for cell in held(cache)}
        if "bytes" in budget:
            assert cache.ledger.held_bytes == held_bytes
    assert list(kept.values()) == [{int(0.4 * length)}, {min(128, length)}, {20}, {20}]


@pytest.mark.parametrize("short_of", [1, 255])
@pytest.mark.parametrize("policy", SHAPES)
def test_p19_a_byte_budget_is_never_exceeded(policy: str, short_of: int) -> None:
    """Elsewhere: metadata, windows or rounding go beyond the stated size. Right: held bytes and windows stay below."""
    model = tiny_model("gemma3")
    cache = KeepCache(model, policy, compression_ratio=0.5)
    feed(model, cache, text(2, 60))
    limit = cache.ledger.held_bytes + cache.ledger.window_bytes - short_of
    tight = KeepCache(model, policy, bytes=limit)
    feed(model, tight, text(2, 60))
    assert tight.ledger.held_bytes + tight.ledger.window_bytes <= limit
    assert tight.ledger.held_bytes < cache.ledger.held_bytes


@pytest.mark.parametrize(("architecture", "policy"), [("phi3", "snapkv+ada"), ("gemma3", "snapkv+threshold")])
def test_p31_evicted_memory_is_freed(architecture: str, policy: str) -> None:
    """Elsewhere: channels are zeroed or entries masked, and no memory is saved. Right: no tensor of the full text is
    alive after the cut, and what the cut left behind weighs what the ledger says."""
    model = tiny_model(architecture)
    KeepCache(model, policy, compression_ratio=0.9)  # attach, so that hooks are there before

    def alive() -> dict[int, int]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}

    before = alive()
    cache = KeepCache(model, policy, compression_ratio=0.9)
    feed(model, cache, text(2, 200))
    new = {pointer: size for pointer, size in alive().items() if pointer not in before}
    bookkeeping = 1024  # logical lengths and the like
    assert sum(new.values()) <= cache.ledger.held_bytes + cache.ledger.window_bytes + bookkeeping
    assert cache.ledger.held_bytes < 0.12 * cache.ledger.full_bytes


@pytest.mark.parametrize("allocator", [Uniform(), Ada(), Threshold(floor=0)], ids=lambda a: a.name)
def test_p10_protected_entries_stay_when_all_scores_are_equal(llama: PreTrainedModel, allocator: Any) -> None:
    """Elsewhere: sinks and window get the highest score and lose on ties. Right: they are kept by structure."""
    policy = Policy(Indifferent(sinks=4, window=5), allocator, TopK())
    cache = KeepCache(llama, policy, compression_ratio=0.5, protect=[(20, 24), (-8, -6)])
    feed(llama, cache, text(2, 60))
    for layer in range(3):
        for row in range(2):
            for cell in held(cache, layer, row):
                assert {0, 1, 2, 3, 20, 21, 22, 23, 52, 53, 55, 56, 57, 58, 59} <= set(cell)


@pytest.mark.parametrize("policy", EVICTING)
def test_p10_what_the_caller_protects_stays_for_every_policy(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: a system prompt cannot be kept. Right: it stays whatever the policy thinks, at the smallest budget."""
    cache = KeepCache(llama, policy, entries=7, protect=[(11, 18)])
    feed(llama, cache, text(1, 60))
    assert [held(cache, layer) for layer in range(3)] == [[list(range(11, 18))] * 2] * 3


@pytest.mark.parametrize("policy", ["knorm", "snapkv[window=6]+threshold", "chunkkv[window=6,length=4]"])
def test_p49_rows_choose_for_themselves(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: row 0's chunks are used for all rows. Right: each row of a batch as if it were alone."""
    rows = text(3, 60)
    cache = KeepCache(llama, policy, compression_ratio=0.5)
    feed(llama, cache, rows)
    for row in range(3):
        single = KeepCache(llama, policy, compression_ratio=0.5)
        feed(llama, single, rows[row : row + 1])
        for layer in range(3):
            assert held(cache, layer, row) == held(single, layer)
    assert held(cache, 0, 0) != held(cache, 0, 1), "the rows want the same; the test shows nothing"


class LargestTensor(TorchDispatchMode):
    """Takes note of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("policy", EVICTING)
def test_p74_no_square_of_the_text_is_ever_made(
    llama: PreTrainedModel, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere: scoring a long prompt needs an L x L matrix and dies. Right: attention and scores go in blocks, with
    the same result."""
    length = 400
    expected = KeepCache(llama, policy, compression_ratio=0.5)
    feed(llama, expected, text(1, length))
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", 4 * length * 8)
    monkeypatch.setattr(joint, "_BLOCK_ELEMENTS", 4 * length * 8)  # attention behind a text, as a second pass needs it
    cache = KeepCache(llama, policy, compression_ratio=0.5)
    with LargestTensor() as largest:
        feed(llama, cache, text(1, length), logits_to_keep=1)
    assert largest.elements < length * length // 2
    for layer in range(3):
        assert held(cache, layer) == held(expected, layer)


def test_p74_the_ledger_shows_what_generation_adds_and_the_next_cut_takes_it(llama: PreTrainedModel) -> None:
    """Elsewhere: the cache grows without a bound, unseen, while generating. Right: what came after the cut is shown
    as uncut, entry by entry, and `Session(entries=N)` is back at N after the next piece."""
    cache = KeepCache(llama, "snapkv[window=6]", entries=16)
    generate(llama, text(1, 60), cache, 50)
    assert cache.ledger.uncut_entries == 49 * 2 * 3
    assert cache.ledger.entries == (16 + 49) * 2 * 3
    session = Session(*fake_model(), "snapkv[window=6]", entries=16)
    session.ingest("one two three four five " * 10)
    for _ in range(3):
        session.ask("and then?", max_new_tokens=20)
        session.ingest("six seven eight nine ten " * 5)
        assert {n for layer in session.cache.ledger.entries_per_cell for row in layer for n in row} == {16}


def test_p98_each_layer_may_have_its_own_policy(llama: PreTrainedModel) -> None:
    """Elsewhere: one configuration for all layers. Right: a table; full layers are paid from the same budget."""
    cache = KeepCache(llama, {0: "full", 2: "streaming-llm", "*": "knorm"}, compression_ratio=0.5)
    pair = LockStep(llama, cache)
    pair.feed(text(1, 60))
    assert cache.ledger.entries == 3 * 2 * 30
    assert held(cache, 0) == [list(range(60))] * 2
    assert held(cache, 2) == [[0, 1, 2, 3, *range(49, 60)]] * 2
    assert [len(cell) for cell in held(cache, 1)] == [15, 15]
    pair.feed(text(1, 3))


def test_p98_a_table_that_cannot_be_paid_is_refused(llama: PreTrainedModel) -> None:
    """The message says which budget is left for the other layers; nothing has been stored."""
    cache = KeepCache(llama, {0: "full", "*": "knorm"}, compression_ratio=0.8)
    with pytest.raises(BudgetError, match="beside 1 layers that are kept in full"):
        feed(llama, cache, text(1, 60))
    assert cache.ledger.held_bytes == 0
