"""Generation modes: each one either right or refused by name, from greedy search to beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, set_seed

from kvkeep import CacheStateError, KeepCache, UnsupportedError

from ..hf.tiny import tiny_model
from .common import SHAPES, LockStep, feed, generate, held, left_padded, text, without_evicted

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "beams and sequences": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
}


def run(model: PreTrainedModel, ids: Tensor, cache: Any, options: dict[str, Any]) -> Any:
    set_seed(0)
    options = {"return_dict_in_generate": True, "output_scores": True} | options
    return generate(model, ids, cache, 10, **options)


@pytest.mark.parametrize(
    ("architecture", "mode"), [*(("llama", mode) for mode in MODES), ("gemma3", "greedy"), ("gemma3", "sampled beams")]
)
def test_p92_without_eviction_every_mode_gives_transformers_tokens(architecture: str, mode: str) -> None:
    """Elsewhere: sink and static caches break in other generation modes. Right: the tokens of a DynamicCache."""
    model = tiny_model(architecture)
    ids, mask = left_padded([text(1, 30), text(1, 21, seed=1)])
    options = MODES[mode] | {"attention_mask": mask}
    expected = run(model, ids, None, options)
    cache = KeepCache(model, "snapkv[window=6]", compression_ratio=0.0)
    ours = run(model, ids, cache, options)
    assert torch.equal(ours.sequences, expected.sequences)
    if "beam_indices" in expected:
        torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        *(("snapkv[window=6]+ada", mode) for mode in MODES),
        *((policy, "beams") for policy in SHAPES if "ada" not in policy),
    ],
)
def test_p92_with_eviction_every_mode_equals_dense_attention_without_the_evicted(
    llama: PreTrainedModel, policy: str, mode: str
) -> None:
    """Elsewhere: beams mix up what their rows hold. Right: dense attention with -inf on what each row has evicted."""
    prompt = text(1, 40)
    cache = KeepCache(llama, policy, compression_ratio=0.6)
    ours = run(llama, prompt, cache, MODES[mode])
    assert cache.get_seq_length() == 49
    with without_evicted(llama, cache, columns=40):  # all rows come from one prompt, and hold the same of it
        dense = run(llama, prompt, DynamicCache(config=llama.config), MODES[mode])
    assert torch.equal(ours.sequences, dense.sequences)
    if "beam_indices" in dense:
        torch.testing.assert_close(ours.sequences_scores, dense.sequences_scores, rtol=0, atol=1e-10)
    untouched = run(llama, prompt, None, MODES[mode])
    assert not torch.equal(ours.sequences, untouched.sequences), "eviction changed nothing; the test shows nothing"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_p92_reordered_rows_go_on_as_what_they_were(architecture: str) -> None:
    """Elsewhere: reordering moves keys and forgets positions, lengths or windows. Right: row i goes on as row rows[i],
    whatever each row holds, padded rows too."""
    model = tiny_model(architecture)
    ids, mask = left_padded([text(1, 50), text(1, 31, seed=1), text(1, 12, seed=2)])
    cache = KeepCache(model, "snapkv[window=6]+ada", compression_ratio=0.6)
    feed(model, cache, ids, attention_mask=mask)
    feed(model, cache, text(3, 2, seed=3), attention_mask=(mask := torch.cat([mask, mask.new_ones(3, 2)], 1)))
    unchanged = cache.fork()
    before = [held(cache, 0, row) for row in range(3)]
    rows = torch.tensor([2, 0, 2, 1])
    cache.reorder_cache(rows)
    assert [held(cache, 0, row) for row in range(4)] == [before[row] for row in rows]
    more = text(3, 4, seed=4)
    mask = torch.cat([mask, mask.new_ones(3, 4)], 1)
    expected = feed(model, unchanged, more, attention_mask=mask)
    ours = feed(model, cache, more[rows], attention_mask=mask[rows])
    torch.testing.assert_close(ours, expected[rows], rtol=0, atol=1e-10)
    cache.batch_select_indices(torch.tensor([3, 1]))
    cache.batch_repeat_interleave(2)
    assert [held(cache, 0, row)[0][:5] for row in range(4)] == [before[row][0][:5] for row in (1, 1, 0, 0)]
    assert cache.batch_size == 4
    ledger = cache.ledger.to_dict()
    assert ledger["logical_length"] == [37, 37, 56, 56]
    assert ledger["held_bytes"] == sum(layer.store.bytes().total for layer in cache.keep_layers)


@pytest.mark.parametrize("call", ["batch_repeat_interleave", "batch_select_indices", "reorder_cache"])
def test_p92_an_empty_cache_that_was_reordered_still_cuts_its_first_text(llama: PreTrainedModel, call: str) -> None:
    """Elsewhere: a call before the first token counts as use. Right: the first text is the prompt and is cut."""
    cache = KeepCache(llama, "knorm", compression_ratio=0.5)
    getattr(cache, call)(2 if call == "batch_repeat_interleave" else torch.tensor([], dtype=torch.long))
    feed(llama, cache, text(1, 40))
    assert cache.ledger.entries == 3 * 2 * 20


@pytest.mark.parametrize("removed", [1, 9])
@pytest.mark.parametrize("policy", SHAPES)
def test_p43_cropping_what_came_after_the_cut_is_exact(llama: PreTrainedModel, policy: str, removed: int) -> None:
    """Elsewhere: a rollback crops by logical length, so rejected tokens stay in a shortened cache. Right: exactly the
    newest tokens go, and the next ones stand where those stood."""
    cache, fresh = (KeepCache(llama, policy, compression_ratio=0.5) for _ in range(2))
    for either in (cache, fresh):
        feed(llama, either, text(1, 40))
    feed(llama, cache, text(1, 9, seed=1))
    cache.crop(-removed)
    if removed < 9:
        feed(llama, fresh, text(1, 9, seed=1)[:, :-removed])
    assert cache.get_seq_length() == fresh.get_seq_length() == 49 - removed
    assert held(cache) == held(fresh)
    more = text(1, 4, seed=2)
    torch.testing.assert_close(feed(llama, cache, more), feed(llama, fresh, more), rtol=0, atol=1e-10)
    assert held(cache) == held(fresh)
    assert cache.ledger.to_dict()["logical_length"] == 53 - removed


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_p43_a_rollback_into_what_was_cut_is_refused(architecture: str) -> None:
    """The same where it cannot be exact: refused with the number, and nothing changes."""
    model = tiny_model(architecture)
    pair = LockStep(model, KeepCache(model, "knorm", compression_ratio=0.5))
    pair.feed(text(1, 40))
    pair.feed(text(1, 3))
    most = 3 if architecture == "llama" else 0  # a full sliding window does not hold what lies before it
    with pytest.raises(CacheStateError, match=f"expected at most {most} tokens to remove"):
        pair.cache.crop(-4)
    pair.feed(text(1, 2))


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": True}], ids=str)
def test_p43_p92_assisted_decoding_is_refused_before_the_first_forward(options: dict[str, Any]) -> None:
    """Elsewhere: rejected tokens stay in the cache. Right: refused by name; the same cache then generates as ever."""
    model = tiny_model("llama")
    if "assistant_model" in options:
        options = {"assistant_model": tiny_model("llama", seed=1)}
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    with pytest.raises(UnsupportedError, match="assisted or speculative decoding"):
        generate(model, text(1, 30), cache, **options)
    assert cache.ledger.held_bytes == 0
    expected = generate(model, text(1, 30), KeepCache(model, "knorm", compression_ratio=0.5))
    assert torch.equal(generate(model, text(1, 30), cache), expected)
    plain = generate(model, text(1, 30), **options)
    assert torch.equal(plain, generate(model, text(1, 30))), "without our cache, assisted decoding works as before"


class Widths(nn.Module):
    """An output head that takes note of how many positions it was asked for."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head, self.seen = head, []

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden.shape[1])
        return self.head(hidden)


@pytest.mark.parametrize("chunk", [None, 16])
def test_p05_only_the_last_position_gets_logits(chunk: int | None) -> None:
    """Elsewhere: logits of the whole text are built (2,000 tokens x vocabulary). Right: one position at a time."""
    model = tiny_model("llama")
    model.lm_head = Widths(model.lm_head)
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    cache = KeepCache(model, "snapkv[window=6]", compression_ratio=0.5, prompt_tokens=chunk and 60)
    generate(model, text(1, 60), cache, **options)
    assert set(model.lm_head.seen) == {1}
    assert cache.ledger.entries == 3 * 2 * (30 + 7)


def test_p41_chunks_that_do_not_end_where_the_prompt_ends_are_refused(llama: PreTrainedModel) -> None:
    """Elsewhere: only the first chunk looks like a prompt, the rest is never cut. Right: the end is stated, and a
    forward that reaches beyond it is refused and may be repeated with the right length."""
    pair = LockStep(llama, KeepCache(llama, "snapkv[window=20]", compression_ratio=0.5, prompt_tokens=30))
    pair.feed(text(1, 16))
    assert pair.cache.ledger.entries == pair.cache.ledger.entries_full
    with pytest.raises(CacheStateError, match="ends at prompt_tokens=30; received a forward that reaches token 32"):
        feed(llama, pair.cache, text(1, 16, seed=1))
    pair.feed(text(1, 14, seed=1))
    assert pair.cache.ledger.entries == 3 * 2 * 15
    pair.feed(text(1, 3))
