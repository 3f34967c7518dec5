"""Prompts that arrive in chunks, and the hard bound that chunks are cut to."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from kvkeep import KeepCache
from kvkeep.errors import CacheStateError, PolicyError
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import parse_policy

from ..hf.tiny import tiny_model
from .common import EVICTING, LockStep, feed, generate, held, spy, text

CHUNKED = [name for name in EVICTING if not parse_policy(name).needs().whole_text]
WHOLE = [name for name in EVICTING if parse_policy(name).needs().whole_text]
CELLS = 3 * 2  # layers and KV heads of the tiny Llama


def capped(model: PreTrainedModel, name: str, tokens: int, **budget: object) -> KeepCache:
    return KeepCache(model, name, prompt_tokens=tokens, cut_chunks=True, **budget)  # type: ignore[arg-type]


def test_both_kinds_are_there() -> None:
    assert {"snapkv", "knorm", "keydiff", "tova", "streaming-llm", "frc", "random", "adasnapkv"} <= set(CHUNKED)
    assert {"h2o", "finch", "expected-attention"} <= set(WHOLE)


@pytest.mark.parametrize("name", [*CHUNKED, "snapkv[window=6]+threshold"])
def test_p17_chunks_under_a_cap_never_exceed_it(llama: PreTrainedModel, name: str) -> None:
    """1,000 tokens in chunks of 128 under 256 entries, with the exact attention over what was held at each chunk."""
    cache = capped(llama, name, 1000, entries=256)
    pair = LockStep(llama, cache)
    ids, logits = text(1, 1000), []
    for chunk in ids.split(128, dim=1):
        logits.append(pair.feed(chunk))
        assert cache.ledger.entries <= 256 * CELLS
        assert cache.ledger.peak_bytes <= cache.ledger.held_bytes + 3 * 256 * (2 * 16 * 8 + 4) * 2 + _chunk_bytes(128)
    # The perplexity under eviction can be told; a random model's differs little from that with the whole cache.
    ours, full = (
        float(torch.nn.functional.cross_entropy(each[0, :-1], ids[0, 1:]))
        for each in (torch.cat(logits, dim=1), feed(llama, None, ids))
    )
    assert 0 < abs(ours - full) < 0.1 * full
    # Chunks share no edge with those of the chunk selector, which may stay below the budget.
    assert cache.ledger.entries > 0.9 * 256 * CELLS


def _chunk_bytes(tokens: int) -> int:
    """Keys, values and positions of the tokens in all layers: more than one layer of them is never there at once
    with a policy that cuts layer by layer, but a policy for the whole model waits."""
    return 3 * tokens * (2 * 2 * 16 * 8 + 4) * 2


def test_p17_the_peak_is_the_cap_and_one_chunk(llama: PreTrainedModel) -> None:
    """To the byte: what is held of the other layers, and one layer's cap and chunk beside its new prefix."""
    cache = capped(llama, "knorm", 1024, entries=256)
    for chunk in text(1, 1024).split(128, dim=1):
        feed(llama, cache, chunk)
    entry = 2 * 16 * 8 + 4  # key, value, position
    prefix = 2 * 256 * entry + 3 * 4  # two heads, and their offsets
    tail = 128 * (2 * 2 * 16 * 8 + 4)  # positions of a tail are the same for all heads
    rectangle = 2 * (256 + 128) * 2 * 16 * 8  # the copy of keys and values that the policy looks at
    assert cache.ledger.held_bytes == 3 * prefix
    assert cache.ledger.peak_bytes == 3 * prefix + tail + rectangle + prefix


@pytest.mark.parametrize("name", ["snapkv[window=6]", "snapkv[window=6]+ada", "frc", "knorm"])
def test_p16_what_stays_depends_on_the_past_only(llama: PreTrainedModel, name: str) -> None:
    """Elsewhere: a block is judged with hidden states of the blocks behind it."""
    first, others = text(1, 60), [text(1, 60, seed=seed) for seed in (1, 2)]
    kept = []
    for other in others:
        cache = capped(llama, name, 120, entries=24)
        feed(llama, cache, first)
        kept.append([held(cache, layer) for layer in range(3)])
        feed(llama, cache, other)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ["snapkv[window=6]", "frc", "streaming-llm"])
@pytest.mark.parametrize("budget", [{"compression_ratio": 0.5}, {"entries": 30}, {"bytes": 64000}], ids=str)
def test_p41_generate_with_chunks_respects_the_budget(
    llama: PreTrainedModel, name: str, budget: dict[str, float]
) -> None:
    """Elsewhere: only the first chunk looks like a prefill, and the others are never compressed."""
    ids = text(2, 60)
    whole = KeepCache(llama, name, **budget)  # type: ignore[arg-type]
    cache = capped(llama, name, 60, **budget)
    seen: list[int] = []
    record = cache.finish_forward

    def finish() -> None:
        record()
        seen.append(cache.ledger.entries - cache.ledger.uncut_entries)

    cache.finish_forward = finish  # type: ignore[method-assign]
    generate(llama, ids, whole)
    generate(llama, ids, cache, prefill_chunk_size=16)
    allowed = whole.ledger.entries - whole.ledger.uncut_entries
    if name == "frc":  # its chunks fill the budget to a different extent
        allowed = 2 * CELLS * 30
    assert max(seen) <= allowed
    assert len(seen) == 4 + 7
    assert seen[3:] == [seen[3]] * 8


@pytest.mark.parametrize("padded", [False, True])
def test_p41_rows_of_different_length_are_cut_to_their_own_budget(llama: PreTrainedModel, padded: bool) -> None:
    ids = text(2, 64)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :20] = 0
    cache = capped(llama, "knorm", 64, compression_ratio=0.75)
    pair = LockStep(llama, cache)
    for start in range(0, 64, 16):
        pair.feed(ids[:, start : start + 16], mask[:, : start + 16])
    pair.feed(text(2, 3, seed=1), torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1))
    expected = [44 // 4 if padded else 16, 16]
    assert [len(held(cache, 0, row)[0]) - 3 for row in range(2)] == expected


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_p88_chunks_and_one_forward_agree_where_they_can(architecture: str) -> None:
    """Cut at the end, chunks change nothing; cut one by one, they keep what the past alone would keep."""
    model = tiny_model(architecture)
    ids, question = text(1, 60), text(1, 5, seed=1)
    once = KeepCache(model, "snapkv[window=6]", compression_ratio=0.5)
    at_end = KeepCache(model, "snapkv[window=6]", compression_ratio=0.5, prompt_tokens=60)
    each = capped(model, "streaming-llm", 60, compression_ratio=0.5)
    same = KeepCache(model, "streaming-llm", compression_ratio=0.5)
    for chunk in ids.split(16, dim=1):
        feed(model, at_end, chunk)
        feed(model, each, chunk)
    for cache in (once, same):
        feed(model, cache, ids)
    torch.testing.assert_close(feed(model, at_end, question), feed(model, once, question), rtol=0, atol=1e-10)
    # Sinks and the newest tokens are the same either way.
    index = each.keep_layers[0].index
    assert torch.equal(each.kept_positions(index), same.kept_positions(index))


def test_a_short_last_chunk_is_judged_by_queries_of_the_one_before() -> None:
    """The window may be longer than a chunk: 61 tokens in chunks of 20 leave one for the last."""
    model = tiny_model("llama")
    policy, seen = spy(queries=12)
    cache = KeepCache(model, policy, entries=30, prompt_tokens=61, cut_chunks=True)
    for chunk in text(1, 61).split(20, dim=1):
        feed(model, cache, chunk)
    assert [o.query_positions[0].tolist() for o in seen[-3:]] == [list(range(49, 61))] * 3
    assert cache.ledger.state_bytes == 0
    assert [o.budget for o in seen[::3]] == [20, 30, 30, 30]


@pytest.mark.parametrize("policy", ["snapkv", "snapkv+ada", "frc"])
def test_chunks_that_are_shorter_than_the_window_are_judged(policy: str) -> None:
    """By queries of the chunks before, too, of which some see nothing that is left."""
    model = tiny_model("llama")
    for sizes in ([10, 10], [7, 7, 6], [1, 3, 2, 14]):
        cache = KeepCache(model, policy, entries=6, prompt_tokens=20, cut_chunks=True)
        for chunk in text(2, 20).split(sizes, dim=1):
            feed(model, cache, chunk)
        assert cache.ledger.entries <= 6 * CELLS * 2


def test_protected_spans_from_the_end_are_those_of_the_whole_prompt(llama: PreTrainedModel) -> None:
    cache = KeepCache(llama, "random", entries=12, protect=[(0, 2), (-4, None)], prompt_tokens=60, cut_chunks=True)
    for chunk in text(1, 60).split(16, dim=1):
        feed(llama, cache, chunk)
    for head in held(cache):
        assert {0, 1, 56, 57, 58, 59} <= set(head)
        assert len(head) == 12


@pytest.mark.parametrize("name", WHOLE)
def test_policies_that_must_see_the_whole_text_say_so(llama: PreTrainedModel, name: str) -> None:
    with pytest.raises(PolicyError, match=f"received {name}.*queries of the whole text"):
        capped(llama, name, 60, entries=10)
    feed(llama, KeepCache(llama, name, entries=10, prompt_tokens=60), text(1, 60))


def test_what_chunks_need_is_asked_for(llama: PreTrainedModel) -> None:
    with pytest.raises(CacheStateError, match="prompt_tokens, the length of the prompt"):
        KeepCache(llama, "knorm", entries=10, cut_chunks=True)
    with pytest.raises(CacheStateError, match="a question that every cut can see"):
        KeepCache(llama, "knorm", entries=10, prompt_tokens=60, cut_chunks=True, question=(-5, None))
    cache = capped(llama, "snapkv[window=6]", 60, entries=10)
    feed(llama, cache, text(1, 50))
    with pytest.raises(CacheStateError, match=r"a text of 60 tokens.*received the first 50"):
        cache.mark()
    with pytest.raises(CacheStateError, match="ends at prompt_tokens=60; received a forward that reaches token 70"):
        feed(llama, cache, text(1, 20))
    feed(llama, cache, text(1, 10))
    cache.rewind()
    assert cache.get_seq_length() == 60
    assert cache.ledger.entries == 10 * CELLS


def test_p79_a_long_conversation_never_exceeds_its_bound() -> None:
    """Text after text through a bounded cache, with the ledger checked against the storages at every layer."""
    model = tiny_model("llama", torch.float32)
    cache = KeepCache(model, "snapkv[window=8]", entries=64)
    cache.cut_on_request()
    entry = 2 * 16 * 4
    for turn in range(12):
        chunks = text(1, 150, seed=turn).split(50, dim=1)
        for index, chunk in enumerate(chunks):
            cache.cut_next(coming=50 * (len(chunks) - 1 - index))
            feed(model, cache, chunk)
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for layer in cache.keep_layers
                for t in layer.store.tensors().values()
            }
            assert sum(storages.values()) == cache.ledger.held_bytes - cache.ledger.state_bytes
            assert cache.ledger.entries == min(64, (turn * 3 + index + 1) * 50) * CELLS
        feed(model, cache, text(1, 4, seed=100 + turn))
        assert cache.ledger.entries == (64 + 4) * CELLS
    cap = CELLS * 64 * (entry + 4)
    assert cache.ledger.peak_bytes < cap + 4 * 2 * (64 + 4 + 50) * entry
    logits = model(text(1, 3), use_cache=True, **{CACHE_ARGUMENT: cache}).logits
    assert logits.isfinite().all()
