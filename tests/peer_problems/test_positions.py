"""Positions: they follow the tokens seen, not the entries held; kept entries stay in order; rows do not see padding."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from kvkeep import KeepCache, UnsupportedError

from ..hf.dense_reference import positions_of
from ..hf.tiny import tiny_model
from .common import EVICTING, SHAPES, LockStep, feed, generate, held, left_padded, text


@pytest.mark.parametrize("policy", EVICTING)
def test_p29_p82_the_next_token_stands_at_its_logical_position(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: the next position is the number of kept rows, so RoPE is wrong. Right: 100 seen, 50 kept -> 100."""
    cache = KeepCache(llama, policy, compression_ratio=0.5)
    pair = LockStep(llama, cache)
    pair.feed(text(1, 100))
    assert cache.get_seq_length() == 100
    assert cache.ledger.entries <= 50 * 2 * 3
    pair.feed(text(1, 1, seed=1))
    assert [cell[-1] for cell in held(cache)] == [100, 100]
    pair.feed(text(1, 5, seed=2))
    pair.feed(text(1, 1, seed=3), position_ids=torch.tensor([[106]]))
    assert [cell[-7:] for cell in held(cache)] == [list(range(100, 107))] * 2


def test_p29_positions_that_count_kept_rows_are_refused(llama: PreTrainedModel) -> None:
    """Elsewhere: the cache size given as position bends all answers. Right: refused, and nothing changes."""
    cache = KeepCache(llama, "knorm", compression_ratio=0.5)
    pair = LockStep(llama, cache)
    pair.feed(text(1, 100))
    with pytest.raises(UnsupportedError, match="positions that go on from the 100 tokens seen"):
        feed(llama, cache, text(1, 1), position_ids=torch.tensor([[50]]))
    pair.feed(text(1, 1))


@pytest.mark.parametrize("policy", SHAPES)
def test_p44_kept_entries_stay_in_order_over_several_cuts(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: kept entries lie in order of score, and the next policy takes slots for positions. Right: in order."""
    cache = KeepCache(llama, policy, entries=24)
    pair = LockStep(llama, cache)
    pair.feed(text(2, 60))
    cache.cut_next()
    pair.feed(text(2, 20, seed=1))
    for layer in range(3):
        for row in range(2):
            for cell in held(cache, layer, row):
                assert cell == sorted(set(cell))
    pair.feed(text(2, 3, seed=2))


@pytest.mark.parametrize("policy", EVICTING)
def test_p40_left_padded_rows_equal_single_runs(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: padding is scored as text, and the mask is read by slot. Right: each row as if it were alone."""
    rows = [text(1, length, seed=length) for length in (41, 12, 29)]
    padded, mask = left_padded(rows)
    batch = KeepCache(llama, policy, compression_ratio=0.6)
    pair = LockStep(llama, batch)
    pair.feed(padded, mask)
    singles = []
    for row, ids in enumerate(rows):
        single = KeepCache(llama, policy, compression_ratio=0.6)
        feed(llama, single, ids)
        singles.append(single)
        for layer in range(3):
            assert held(batch, layer, row) == held(single, layer)
    for step in range(2):
        more = text(3, 1 + step, seed=step)
        mask = torch.cat([mask, torch.ones_like(more)], 1)
        ours = pair.feed(more, mask)
        for row, single in enumerate(singles):
            alone = feed(llama, single, more[row : row + 1])
            torch.testing.assert_close(ours[row], alone[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("policy", SHAPES)
def test_p40_right_padded_rows_equal_single_runs(llama: PreTrainedModel, policy: str) -> None:
    """The same with padding on the right, where what follows stands behind a gap in the mask."""
    rows = [text(1, length, seed=length) for length in (41, 12, 29)]
    padded = torch.cat([torch.nn.functional.pad(row, (0, 41 - row.shape[1])) for row in rows])
    mask, more = (padded > 0).long(), text(3, 3, seed=1)
    batch = KeepCache(llama, policy, compression_ratio=0.6)
    feed(llama, batch, padded, attention_mask=mask, position_ids=positions_of(mask, padded))
    mask = torch.cat([mask, torch.ones_like(more)], 1)
    ours = feed(llama, batch, more, attention_mask=mask, position_ids=positions_of(mask, more))
    for row, ids in enumerate(rows):
        single = KeepCache(llama, policy, compression_ratio=0.6)
        feed(llama, single, ids)
        torch.testing.assert_close(ours[row], feed(llama, single, more[row : row + 1])[0], rtol=0, atol=1e-10)
        assert [held(batch, layer, row) for layer in range(3)] == [held(single, layer) for layer in range(3)]


@pytest.mark.parametrize("policy", ["snapkv[window=6]+ada", "snapkv[window=6]+threshold", "frc"])
def test_p40_generate_gives_each_padded_row_its_own_tokens(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: a batch in `generate` hides wrong tokens. Right: the same tokens as unpadded runs, row by row."""
    rows = [text(1, length, seed=length) for length in (41, 12, 29)]
    padded, mask = left_padded(rows)
    batch = generate(llama, padded, KeepCache(llama, policy, compression_ratio=0.5), 12, attention_mask=mask)
    for row, ids in enumerate(rows):
        single = generate(llama, ids, KeepCache(llama, policy, compression_ratio=0.5), 12)
        assert batch[row, -12:].tolist() == single[0, -12:].tolist()


def test_p80_a_suffix_does_not_depend_on_an_evicted_prefix() -> None:
    """Elsewhere: logits change after eviction since positions or slots are off. Right: RoPE is relative, so a suffix
    at positions 0, 1, ... equals the same suffix after a prefix of which nothing is left."""
    model = tiny_model("llama")
    model.model.layers = model.model.layers[:1]  # deeper layers have seen the prefix when it goes
    model.config.num_hidden_layers = 1
    suffix = text(1, 20)
    alone = KeepCache(model, "full")
    expected = feed(model, alone, suffix)
    for length in (1, 30, 200):
        cache = KeepCache(model, "streaming-llm[sinks=0]", entries=1)
        feed(model, cache, torch.cat([text(1, length, seed=1), suffix[:, :1]], 1))
        assert held(cache) == [[length]] * 2
        ours = torch.cat(
            [feed(model, cache, suffix[:, 1:8]), *(feed(model, cache, s) for s in suffix[:, 8:].split(1, 1))], 1
        )
        # transformers computes cosines in float32, whose error grows with the position.
        torch.testing.assert_close(ours, expected[:, 1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", EVICTING)
def test_p83_a_chunk_above_the_budget_attends_before_it_is_evicted(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: entries go before their chunk has attended, and the causal mask no longer fits. Right: each token of
    a chunk sees what was held before the chunk and the chunk up to itself; the cut comes after."""
    pair = LockStep(llama, KeepCache(llama, policy, entries=6))
    for step, length in enumerate((8, 8, 1, 20, 3)):
        pair.cache.cut_next()
        pair.feed(text(2, length, seed=step))
        assert pair.cache.ledger.entries <= 3 * 2 * 2 * 6
        assert pair.cache.ledger.uncut_entries == 0
