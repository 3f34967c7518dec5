"""Eviction equals dense attention with `-inf` on the evicted entries: prompts, questions, single steps, padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.hf.support import CACHE_ARGUMENT

from .dense_reference import dense_logits, kept_logits
from .tiny import ARCHITECTURES, tiny_model

POLICIES = [
    "snapkv[window=8]",
    "snapkv[window=8]+ada",
    "chunkkv[window=8,length=4]",
    "snapkv[window=4]+threshold[floor=4]",
]


def pieces(batch: int, *lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (batch, length), generator=generator) for length in lengths]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_question_and_steps_equal_dense_attention(architecture: str, policy: str) -> None:
    model = tiny_model(architecture)
    text = pieces(2, 61, 7, 1, 1, 1)
    cache = KeepCache(model, policy, compression_ratio=0.6)
    kept = kept_logits(model, cache, text)
    dense = dense_logits(model, cache, text)
    untouched = dense_logits(model, None, text)
    for ours, reference in zip(kept, dense, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)
    assert (dense[1] - untouched[1]).abs().max() > 1e-4, "nothing was evicted that mattered; the test shows nothing"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_left_padded_rows_equal_single_rows(architecture: str) -> None:
    model = tiny_model(architecture)
    lengths = (41, 17, 29)
    rows = [pieces(1, length, seed=length)[0] for length in lengths]
    question = pieces(1, 5)[0]
    single, counts = [], []
    for row in rows:
        cache = KeepCache(model, "snapkv[window=8]+ada", compression_ratio=0.5)
        single.append(torch.cat([x[:, -1] for x in kept_logits(model, cache, [row, question, question[:, :1]])]))
        counts.append([layer[0] for layer in cache.ledger.entries_per_cell])
    longest = max(lengths)
    padded = torch.cat([torch.cat([torch.zeros(1, longest - r.shape[1], dtype=torch.long), r], 1) for r in rows])
    mask = (padded > 0).long()
    more = [question.expand(3, -1), question[:, :1].expand(3, -1)]
    masks: list[Tensor | None] = [mask]
    for piece in more:
        masks.append(torch.cat([masks[-1], torch.ones(3, piece.shape[1], dtype=torch.long)], 1))  # type: ignore[list-item]
    cache = KeepCache(model, "snapkv[window=8]+ada", compression_ratio=0.5)
    batch = kept_logits(model, cache, [padded, *more], masks)
    for row in range(3):
        ours = torch.stack([x[row, -1] for x in batch])
        torch.testing.assert_close(ours, single[row], rtol=0, atol=1e-10)
        assert [layer[row] for layer in cache.ledger.entries_per_cell] == counts[row]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ratio_zero_generates_the_same_tokens(architecture: str, implementation: str) -> None:
    model = tiny_model(architecture, torch.float32)
    model.set_attn_implementation(implementation)
    prompt = pieces(2, 33)[0]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **options)
    cache = KeepCache(model, "snapkv", compression_ratio=0.0)
    assert torch.equal(model.generate(prompt, **options, **{CACHE_ARGUMENT: cache}), expected)
    assert cache.ledger.entries == cache.ledger.entries_full


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunked_prefill_equals_one_forward(architecture: str) -> None:
    model = tiny_model(architecture)
    prompt = pieces(2, 47)[0]
    question = pieces(2, 6)[0]
    for policy in ("snapkv[window=20]", "h2o", "expected-attention", "snapkv[window=8]+threshold[floor=8]"):
        whole = KeepCache(model, policy, compression_ratio=0.5)
        expected = kept_logits(model, whole, [prompt, question])
        chunked = KeepCache(model, policy, compression_ratio=0.5, prompt_tokens=47)
        ours = kept_logits(model, chunked, [*prompt.split(10, dim=1), question])
        torch.testing.assert_close(torch.cat(ours[:-1], 1), expected[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(ours[-1], expected[1], rtol=0, atol=1e-10)
        assert chunked.ledger.entries_per_cell == whole.ledger.entries_per_cell


def test_generate_with_prefill_chunk_size() -> None:
    model = tiny_model("llama", torch.float32)
    prompt = pieces(1, 47)[0]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    whole = KeepCache(model, "snapkv[window=8]", compression_ratio=0.5)
    expected = model.generate(prompt, **options, **{CACHE_ARGUMENT: whole})
    chunked = KeepCache(model, "snapkv[window=8]", compression_ratio=0.5, prompt_tokens=47)
    ours = model.generate(prompt, **options, prefill_chunk_size=10, **{CACHE_ARGUMENT: chunked})
    assert torch.equal(ours, expected)
    assert chunked.ledger.entries == whole.ledger.entries
