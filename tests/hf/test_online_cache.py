"""A KeepCache under an online policy: the cap in entries and in bytes, marks, forks, files, rows, sessions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep import (
    BudgetError,
    CacheStateError,
    KeepCache,
    PolicyError,
    Session,
    UnsupportedError,
    decode_batch,
    measure_bytes,
)
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import OnlinePolicy
from kvkeep.testing import fake_model

from ..test_testing_online import Sound
from .online_reference import CAP, LENGTH, NAMES, held_at_most, read, text
from .tiny import tiny_model


class Learnable(Sound):
    """Its priorities come from a parameter."""

    def rated(self, memory: Tensor, keys: Tensor) -> Tensor:
        return super().rated(memory, keys) * torch.nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("policy", [*NAMES, Sound()], ids=str)
def test_the_cap_and_the_bytes_hold_at_every_step(policy: Any) -> None:
    """From the first token on the cache weighs the same; the ledger agrees with the storages."""
    model, ids = tiny_model("gemma3", torch.float32), text(2, 30)
    cache = KeepCache(model, policy, entries=CAP)
    read(model, cache, ids[:, :3])
    first = cache.ledger.held_bytes
    for at in range(3, 30):
        read(model, cache, ids[:, at : at + 1])
        assert cache.ledger.held_bytes == first
        weighed = {layer.name: layer.total for layer in measure_bytes(cache).layers}
        assert weighed["layers[1]"] == cache.ledger.held_bytes
        # A token's own keys and values lie beside the store while they are taken in.
        assert cache.ledger.peak_bytes <= first + cache.ledger.window_bytes + 3 * 2 * 2 * 2 * 16 * 4
    facts = cache.ledger.to_dict()
    assert facts["uncut_entries"] == 0
    assert facts["held_bytes"] == sum(facts[f"{part}_bytes"] for part in ("payload", "slack", "metadata", "state"))
    assert facts["entries"] == 2 * 2 * (CAP - isinstance(policy, Sound))
    assert (facts["state_bytes"] > 0) == isinstance(policy, Sound)
    assert facts["logical_length"] == 30


@pytest.mark.parametrize("policy", ["online-streaming-llm", "online-h2o", Sound()], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cap_in_bytes_holds_with_as_many_rows_as_come(policy: Any, rows: int) -> None:
    model, ids = tiny_model("gemma3", torch.float32), text(rows, 60)
    limit = 60_000
    cache = KeepCache(model, policy, bytes=limit)
    with torch.no_grad():
        for piece in ids.split(7, dim=1):
            model(piece, **{CACHE_ARGUMENT: cache})
            assert cache.ledger.held_bytes + cache.ledger.window_bytes <= limit
    one_more = rows * 2 * (cache.evictable_layers[0].store.entry_bytes + 8 + 32)
    assert cache.ledger.held_bytes + cache.ledger.window_bytes + one_more > limit
    more = torch.zeros(rows + 1, dtype=torch.long)
    with pytest.raises(BudgetError, match=f"at most {rows} rows"):
        cache.reorder_cache(more)
    cache.reset()
    with torch.no_grad(), pytest.raises(BudgetError, match="200 rows"):
        model(text(200, 4), **{CACHE_ARGUMENT: cache})
    with torch.no_grad():  # and nothing is broken
        model(ids, **{CACHE_ARGUMENT: cache})


@pytest.mark.parametrize(
    ("architecture", "policy"), [("llama", "online-random"), ("llama", "online-tova"), ("gemma3", Sound())]
)
def test_marks_forks_and_files_go_on_as_the_cache_did(architecture: str, policy: Any, tmp_path: Path) -> None:
    model, ids, more = tiny_model(architecture), text(2, 21), text(2, 15, seed=1)
    cache = KeepCache(model, policy, entries=CAP)
    read(model, cache, ids)
    alone = cache.ledger.held_bytes
    mark, twin, deep = cache.mark(), cache.fork(), copy.deepcopy(cache)
    cache.save(tmp_path / "cache.safetensors")
    expected = read(model, cache, more, [1] * 6 + [9])
    assert alone < cache.ledger.held_bytes <= 2 * alone  # what the mark goes back to is counted
    cache.rewind(mark)
    assert cache.lengths == [21, 21]
    named = None if isinstance(policy, str) else policy
    loaded = KeepCache.load(tmp_path / "cache.safetensors", model, policy=named)
    assert loaded.ledger.held_bytes == alone
    for other in (cache, twin, deep, loaded):
        torch.testing.assert_close(read(model, other, more, [15]), expected, rtol=0, atol=1e-10)
    del mark
    assert cache.ledger.held_bytes == alone


@pytest.mark.parametrize("budget", [{"entries": CAP}, {"bytes": 60_000}], ids=str)
def test_a_cache_without_a_text_is_saved_too(budget: dict[str, int], tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), text(3)
    cache = KeepCache(model, Sound(), **budget)
    cache.save(tmp_path / "empty.safetensors")
    loaded = KeepCache.load(tmp_path / "empty.safetensors", model, policy=Sound())
    assert loaded.lengths == []
    assert loaded.ledger.held_bytes == 0
    for each in (cache, loaded):
        with torch.no_grad():
            model(ids, **{CACHE_ARGUMENT: each})
    assert loaded.ledger.held_bytes == cache.ledger.held_bytes > 0
    assert torch.equal(loaded.kept_positions(1, 2, 1), cache.kept_positions(1, 2, 1))


@pytest.mark.filterwarnings("ignore:A KeepCache under autograd")
@pytest.mark.parametrize("policy", ["online-h2o", Learnable()], ids=str)
def test_no_graph_hangs_on_what_is_held(policy: Any) -> None:
    """It would grow with every step."""
    model = tiny_model("llama").requires_grad_(True)
    cache = KeepCache(model, policy, entries=CAP)
    for piece in text().split(8, dim=1):
        logits = model(piece, **{CACHE_ARGUMENT: cache}).logits
    assert logits.requires_grad
    for layer in cache.evictable_layers:
        assert not any(tensor.requires_grad for tensor in layer.store.tensors().values())


def test_a_cache_without_a_mark_says_how_to_take_one() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "online-streaming-llm", entries=CAP)
    read(model, cache, text())
    with pytest.raises(CacheStateError, match=r"no cut to go back to; take a new mark\(\)"):
        cache.rewind()
    with pytest.raises(CacheStateError, match=r"at most 0 tokens .* take a mark\(\)"):
        cache.crop(-1)


def test_half_a_forward_is_undone_by_a_mark() -> None:
    model, ids = tiny_model("llama"), text(2, 9, seed=3)
    cache = KeepCache(model, "online-tova", entries=CAP)
    read(model, cache, text(2))
    mark, expected = cache.mark(), read(model, cache.fork(), ids)

    def fail(*args: object) -> None:
        raise ValueError("in a layer")

    hook = model.get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in a layer"):
        read(model, cache, ids)
    hook.remove()
    with pytest.raises(CacheStateError, match=r"rewind\(mark\) will do"):
        read(model, cache, ids)
    cache.rewind(mark)
    torch.testing.assert_close(read(model, cache, ids), expected, rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["online-h2o", Sound()], ids=str)
def test_rows_are_reordered_repeated_and_picked(policy: Any) -> None:
    model, more = tiny_model("llama"), text(1, 9, seed=5)
    singles = []
    for row in range(3):
        cache = KeepCache(model, policy, entries=CAP)
        read(model, cache, text(3)[row : row + 1])
        singles.append(read(model, cache, more))
    changes = {
        "reorder_cache": (torch.tensor([2, 0, 0]), [2, 0, 0]),
        "batch_select_indices": (torch.tensor([1, 2]), [1, 2]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    }
    for name, (argument, rows) in changes.items():
        cache = KeepCache(model, policy, entries=CAP)
        read(model, cache, text(3))
        getattr(cache, name)(argument)
        ours = read(model, cache, more.expand(len(rows), -1))
        torch.testing.assert_close(ours, torch.cat([singles[row] for row in rows]), rtol=0, atol=1e-10)


def test_caches_under_one_cap_are_stacked() -> None:
    model = tiny_model("llama")
    prompts, questions = [text(1, 30, seed=1), text(1, 9, seed=2)], [[5, 6, 7], [9, 8, 7]]
    made = []
    for prompt in prompts:
        made.append(KeepCache(model, "online-h2o", entries=CAP))
        read(model, made[-1], prompt)
    alone = [
        decode_batch(model, cache.fork(), [question], max_new_tokens=10)[0]
        for cache, question in zip(made, questions, strict=True)
    ]
    both = KeepCache.stack(made)
    assert decode_batch(model, both, questions, max_new_tokens=10) == alone
    other = KeepCache(model, "online-h2o", entries=CAP + 2)
    with torch.no_grad():
        model(text(), **{CACHE_ARGUMENT: other})
    with pytest.raises(UnsupportedError, match="one cap"):
        KeepCache.stack([made[0], other])
    prompt_kind = KeepCache(model, "snapkv", entries=CAP)
    with torch.no_grad():
        model(text(), **{CACHE_ARGUMENT: prompt_kind})
    for mixed in ([made[0], prompt_kind], [prompt_kind, made[0]]):
        with pytest.raises(UnsupportedError, match="one cap"):
            KeepCache.stack(mixed)


@pytest.mark.parametrize("policy", NAMES)
def test_protected_ranges_stay(policy: str) -> None:
    model, ids = tiny_model("llama"), text()
    cache = KeepCache(model, policy, entries=CAP, protect=[(2, 5), (9, 11)])
    read(model, cache, ids, [13, 1, 1, LENGTH - 15])
    for head in range(2):
        assert {2, 3, 4, 9, 10} <= set(cache.kept_positions(2, 0, head).tolist())
    with pytest.raises(BudgetError, match="30 protected positions"):
        KeepCache(model, policy, entries=CAP, protect=[(10, 40)])
    with pytest.raises(BudgetError, match="999999990 protected positions"):  # counted, not listed
        KeepCache(model, policy, entries=CAP, protect=[(10, 10**9)])
    for span in ((-5, None), (3, None), (-9, -2)):
        with pytest.raises(BudgetError, match="from the start"):
            KeepCache(model, policy, entries=CAP, protect=[span])


@pytest.mark.parametrize("policy", ["online-streaming-llm", "online-tova"])
def test_generate_holds_the_cap(policy: str) -> None:
    """In one forward, in chunks, with beams, and for a padded batch: the same tokens as token by token."""
    model, ids = tiny_model("llama", torch.float64), text(2, 26)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    caches = [KeepCache(model, policy, entries=CAP) for _ in range(4)]
    expected = model.generate(ids, **options, **{CACHE_ARGUMENT: caches[0]})
    by_hand = ids
    read(model, caches[1], ids[:, :-1])
    for _ in range(8):
        logits = read(model, caches[1], by_hand[:, -1:])
        by_hand = torch.cat([by_hand, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(by_hand, expected)
    chunked = model.generate(ids, **options, prefill_chunk_size=7, **{CACHE_ARGUMENT: caches[2]})
    assert torch.equal(chunked, expected)
    beams = model.generate(ids, **options, num_beams=3, **{CACHE_ARGUMENT: caches[3]})
    assert beams.shape == expected.shape
    for cache in caches:
        assert held_at_most(cache, CAP)
        assert cache.lengths[0] == 33


def test_a_session_holds_the_cap_over_turns(tmp_path: Path) -> None:
    model, tokenizer = fake_model("llama")
    chat = Session(model, tokenizer, "online-streaming-llm", entries=48, chunk_tokens=16)
    chat.ingest("Mira parked the red bicycle behind the bakery on Elm Street. " * 3)
    for _ in range(2):
        first = chat.ask("Where is the bicycle?", max_new_tokens=8, keep=False)
        again = chat.ask("Where is the bicycle?", max_new_tokens=8)
        assert again.text == first.text
        assert held_at_most(chat.cache, 48)
        chat.rewind()
    chat.save(tmp_path / "chat.safetensors")
    other = Session.load(tmp_path / "chat.safetensors", model, tokenizer)
    assert other.ask("Where is the bicycle?", max_new_tokens=8).text == first.text
    chat.ingest("Later she rode it to the harbour. " * 3)
    assert held_at_most(chat.cache, 48)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"compression_ratio": 0.5}, BudgetError, "entries=... or bytes=..."),
        ({}, BudgetError, "exactly one"),
        ({"entries": 5}, BudgetError, "4 sinks, a window of 1"),
        ({"bytes": 200}, BudgetError, "at least one slot"),
        ({"entries": CAP, "question": (3, 5)}, CacheStateError, "question"),
        ({"entries": CAP, "cut_chunks": True}, CacheStateError, "no cut_chunks beside online-streaming-llm"),
        ({"entries": CAP, "rerotate_keys": True}, CacheStateError, "rerotate_keys"),
        ({"entries": CAP, "policy": {0: "full", "*": "online-tova"}}, PolicyError, "one policy for all layers"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(error, match=words):
        KeepCache(model, **({"policy": "online-streaming-llm"} | arguments))


def test_tools_for_cuts_refuse_a_cap() -> None:
    cache = KeepCache(tiny_model("llama"), "online-tova", entries=CAP)
    with pytest.raises(UnsupportedError, match="online-tova"):
        cache.keep_layers  # noqa: B018


class Strange(OnlinePolicy):
    def protects(self, entries: int) -> tuple[int, int]:
        return 0, 1


def test_a_policy_without_priorities_is_refused() -> None:
    with pytest.raises(PolicyError, match="StaticPolicy or a WatchingPolicy"):
        KeepCache(tiny_model("llama"), Strange(), entries=CAP)


def test_other_rows_are_refused_before_anything_is_stored() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "online-tova", entries=CAP)
    read(model, cache, text(2))
    with pytest.raises(UnsupportedError, match="2 rows"):
        read(model, cache, text(3, 4))
    assert not cache.is_broken
