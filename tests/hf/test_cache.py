"""What a KeepCache refuses and reports, beside what the peer problems show."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvkeep import BudgetError, CacheStateError, KeepCache, load_model
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

from .tiny import tiny_model


def feed(model, cache, length: int, rows: int = 1, **arguments) -> torch.Tensor:
    ids = torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        return model(ids, **{CACHE_ARGUMENT: cache}, **arguments).logits


@pytest.mark.parametrize("question", [(5, 2), (1000, 1001), (50, 50), (-70, None)])
def test_a_question_outside_of_the_text_is_refused(question: tuple[int, int | None]) -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "finch", compression_ratio=0.5, question=question)
    with pytest.raises(BudgetError, match="a question within the 60 tokens"):
        feed(model, cache, 60)
    assert not cache.is_broken
    assert cache.get_seq_length() == 0


def test_a_question_counted_from_the_end_is_each_rows_own() -> None:
    model = tiny_model("llama")
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :25] = 0
    cache = KeepCache(model, "finch", compression_ratio=0.5, question=(-6, None))
    feed(model, cache, 60, rows=2, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert set(range(29, 35)) <= set(cache.kept_positions(0, row=0).tolist())
    assert set(range(54, 60)) <= set(cache.kept_positions(0, row=1).tolist())


@pytest.mark.parametrize("policy", ["h2o", "snapkv[window=8]", "knorm"])
def test_queries_that_wait_for_the_end_of_a_prompt_are_held_bytes(policy: str) -> None:
    model = tiny_model("llama", torch.float32)
    cache = KeepCache(model, policy, compression_ratio=0.5, prompt_tokens=160)
    for _ in range(2):
        feed(model, cache, 60)
        gc.collect()
        waiting = [t for layer in cache.keep_layers for q, p, v in layer._queries for t in (q, p) if t is not None]
        stored = [t for layer in cache.keep_layers for t in layer.store.tensors().values()]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*waiting, *stored]}
        # Positions of a chunk are the same for all layers; each layer counts them.
        assert sum(held.values()) <= cache.ledger.held_bytes <= sum(held.values()) + 2 * 3 * 8 * 60
        assert bool(cache.ledger.state_bytes) == (policy != "knorm")
    feed(model, cache, 40)
    assert cache.ledger.state_bytes == 0
    assert cache.ledger.uncut_entries == 0


def test_a_prompt_in_chunks_holds_the_full_cache_until_its_end() -> None:
    model = tiny_model("llama", torch.float32)
    whole = KeepCache(model, "knorm", compression_ratio=0.9)
    feed(model, whole, 200)
    chunks = KeepCache(model, "knorm", compression_ratio=0.9, prompt_tokens=200)
    for _ in range(4):
        feed(model, chunks, 50)
    assert chunks.ledger.entries == whole.ledger.entries
    assert whole.ledger.peak_bytes < 0.5 * whole.ledger.full_bytes
    assert chunks.ledger.peak_bytes > chunks.ledger.full_bytes


def test_the_room_of_a_prompt_is_not_made_again_for_later_texts() -> None:
    model = tiny_model("llama", torch.float32)
    cache = KeepCache(model, "knorm", entries=16, prompt_tokens=200)
    for _ in range(4):
        feed(model, cache, 50)
    cache.ledger.restart()
    cache.cut_next()
    feed(model, cache, 4)
    assert cache.ledger.entries_per_cell[0] == [[16, 16]]
    assert cache.ledger.peak_bytes < 2.5 * cache.ledger.held_bytes


def test_a_saved_cache_knows_its_weights_however_they_were_loaded(tmp_path: Path) -> None:
    model, tokenizer = fake_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ours, _ = load_model(str(tmp_path / "model"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    cache = KeepCache(ours, "knorm", compression_ratio=0.5)
    feed(ours, cache, 40)
    cache.save(tmp_path / "cache.safetensors")
    loaded = KeepCache.load(tmp_path / "cache.safetensors", theirs)
    torch.testing.assert_close(feed(theirs, loaded, 3), feed(ours, cache, 3))
    with pytest.raises(CacheStateError, match="the model that the cache was made with"):
        KeepCache.load(tmp_path / "cache.safetensors", fake_model(seed=1)[0])
    with pytest.raises(CacheStateError, match="the model that the cache was made with"):
        KeepCache.load(tmp_path / "cache.safetensors", fake_model()[0].to(torch.bfloat16))


def test_a_cache_that_cannot_be_written_is_our_error(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    feed(model, cache, 40)
    with pytest.raises(CacheStateError, match="a path that can be written to"):
        cache.save(tmp_path / "no" / "such" / "folder.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_cells_are_named_by_the_models_layers() -> None:
    model = tiny_model("gemma3", torch.float32)
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    with pytest.raises(CacheStateError, match="row 0"):
        cache.kept_positions(1)
    feed(model, cache, 40)
    assert len(cache.kept_positions(1)) == 20
    for layer, row, head in ((0, 0, 0), (9, 0, 0), (1, 1, 0), (1, 0, 2), (1, 0, -1)):
        with pytest.raises(CacheStateError, match=r"a layer of \[1\]"):
            cache.kept_positions(layer, row, head)


def test_bytes_may_be_text() -> None:
    model = tiny_model("llama")
    assert KeepCache(model, "knorm", bytes="64KiB").budget.bytes == 65536
    with pytest.raises(BudgetError, match="64MiB"):
        KeepCache(model, "knorm", bytes="a lot")
