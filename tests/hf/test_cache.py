"""What a KeepCache refuses and reports, beside what the peer problems show."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvkeep import (
    Budget,
    BudgetError,
    CacheStateError,
    KeepCache,
    Needs,
    PolicyError,
    Session,
    detach,
    load_model,
)
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import Full
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
        waiting = [t for layer in cache.keep_layers for t in layer._queries.tensors()]
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


class Interrupt(Exception):
    """Stands for Ctrl-C in the middle of a forward."""


def interrupted(model, cache, length: int, layer: int = 1) -> None:
    def stop(*_: object) -> None:
        raise Interrupt

    hook = model.get_decoder().layers[layer].mlp.register_forward_pre_hook(stop)
    with pytest.raises(Interrupt):
        feed(model, cache, length)
    hook.remove()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_an_interrupted_answer_can_be_undone_and_nothing_else(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    cache = KeepCache(model, "snapkv[window=8]+ada", compression_ratio=0.5)
    feed(model, cache, 40)
    expected = feed(model, cache, 5)
    cache.rewind()
    interrupted(model, cache, 5)
    assert cache.is_broken
    for refused in (lambda: feed(model, cache, 1), lambda: cache.save(tmp_path / "x"), cache.fork, cache.mark):
        with pytest.raises(CacheStateError, match=r"rewind\(\)"):
            refused()
    cache.rewind()
    torch.testing.assert_close(feed(model, cache, 5), expected, rtol=0, atol=0)
    cache.cut_next()
    interrupted(model, cache, 5, layer=2)
    with pytest.raises(CacheStateError, match="reset"):
        cache.rewind()  # some layers were cut


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_loaded_cache_rewinds_to_its_cut(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    cache = KeepCache(model, "snapkv[window=8]+ada", compression_ratio=0.5)
    feed(model, cache, 40)
    feed(model, cache, 5)
    cache.save(tmp_path / "cache")
    loaded = KeepCache.load(tmp_path / "cache", model)
    for one in (cache, loaded):
        assert one.get_seq_length() == 45
        one.rewind()
        assert one.get_seq_length() == 40
    torch.testing.assert_close(feed(model, loaded, 3), feed(model, cache, 3), rtol=0, atol=0)


def test_a_damaged_file_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    feed(model, cache, 40)
    cache.save(tmp_path / "cache")
    whole = (tmp_path / "cache").read_bytes()
    for at in range(3, len(whole), max(1, len(whole) // 60)):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        (tmp_path / "damaged").write_bytes(bytes(damaged))
        with pytest.raises(CacheStateError):
            KeepCache.load(tmp_path / "damaged", model)
    with pytest.raises(CacheStateError, match="which is none"):
        cache.save(tmp_path)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda js: [j.valid for j in js], "at most .* entries in each row"),
        (lambda js: [torch.zeros_like(j.valid) for j in js], "at least one in each row"),
        (lambda js: [j.valid.float() for j in js], "a boolean mask of shape"),
        (lambda js: [j.valid[..., :3] for j in js], "a boolean mask of shape"),
        (lambda js: [], "1 masks"),
        (lambda js: None, "received NoneType"),
    ],
)
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_policy_whose_answer_is_none_is_refused(answer, message: str, scope: str) -> None:
    class Wrong:
        name = "wrong"

        def __init__(self) -> None:
            self.scope = scope

        def needs(self) -> Needs:
            return Needs()

        def judge(self, observation):
            return Full().judge(observation)

        def choose(self, judgements):
            return answer(judgements)

    model = tiny_model("llama")
    cache = KeepCache(model, Wrong(), entries=5)
    with pytest.raises(PolicyError, match=message.replace("1 masks", "masks")):
        feed(model, cache, 30)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_chunk_may_be_padding_only() -> None:
    model = tiny_model("llama")
    ids = torch.randint(3, 128, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :15] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = KeepCache(model, "snapkv[window=4]", compression_ratio=0.5)
    expected = model.generate(ids, **options, **{CACHE_ARGUMENT: whole})
    chunks = KeepCache(model, "snapkv[window=4]", compression_ratio=0.5, prompt_tokens=20)
    assert torch.equal(model.generate(ids, **options, prefill_chunk_size=4, **{CACHE_ARGUMENT: chunks}), expected)
    assert chunks.ledger.entries_per_cell == whole.ledger.entries_per_cell


def test_a_cache_that_went_back_to_nothing_takes_other_rows() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "knorm", entries=8)
    cache.cut_on_request()
    empty = cache.mark()
    feed(model, cache, 5)
    cache.rewind(empty)
    feed(model, cache, 5, rows=2)
    assert cache.ledger.entries_per_cell[0] == [[5, 5], [5, 5]]


def test_detach_leaves_the_implementation_that_the_user_chose_last() -> None:
    model = tiny_model("llama")
    KeepCache(model, "full")
    model.set_attn_implementation("eager")
    feed(model, KeepCache(model, "knorm", entries=5), 20)
    detach(model)
    assert model.config._attn_implementation == "eager"


def test_a_budget_is_given_in_one_way() -> None:
    model, tokenizer = fake_model()
    for budget in (Budget(entries=5), Budget(compression_ratio=0.5), Budget(bytes=50_000)):
        assert KeepCache(model, "knorm", budget=budget).budget == budget
        assert Session(model, tokenizer, "knorm", budget=budget).cache.budget == budget
    assert (
        KeepCache(model, "knorm", bytes="1KiB").budget == Session(model, tokenizer, "knorm", bytes="1KiB").cache.budget
    )
    for make in (
        lambda **given: KeepCache(model, "knorm", **given),
        lambda **given: Session(model, tokenizer, **given),
    ):
        with pytest.raises(BudgetError, match=r"one budget; received budget=.* beside entries=5"):
            make(budget=Budget(entries=5), entries=5)
        with pytest.raises(BudgetError, match=r"a kvkeep\.Budget.* received 0\.5 of type float"):
            make(budget=0.5)
    with pytest.raises(BudgetError, match="exactly one of"):
        KeepCache(model, "knorm")


@pytest.mark.parametrize("length", [0, 12])
def test_selecting_no_rows_is_refused_and_changes_nothing(length: int) -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "knorm", entries=8)
    if length:
        feed(model, cache, length, rows=2)
    before = cache.ledger.to_dict()
    for indices in ([2], [-3]):
        with pytest.raises(CacheStateError, match="at least one row that the cache holds"):
            cache.batch_select_indices(torch.tensor(indices, dtype=torch.long))
    if length:  # of an empty cache nothing may be selected
        for none in (torch.tensor([], dtype=torch.long), torch.zeros(2, dtype=torch.bool)):
            with pytest.raises(CacheStateError, match="none of 2 rows"):
                cache.batch_select_indices(none)
    with pytest.raises(CacheStateError, match="received 0 repeats"):
        cache.batch_repeat_interleave(0)
    assert cache.ledger.to_dict() == before
    feed(model, cache, 5, rows=2)
