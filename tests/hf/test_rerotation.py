"""Keys rotated anew after a cut: kept entries stand one behind the other, and no error grows with the cuts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep import Budget, CacheStateError, KeepCache, Session, UnsupportedError
from kvkeep.hf.decoding import decode_batch
from kvkeep.hf.rerotation import KeyRerotation
from kvkeep.hf.shared_prompt import SharedPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.hf.weighing import measure_bytes
from kvkeep.store.prefix import Prefix
from kvkeep.testing import fake_model, ordinary_rotary

from .tiny import tiny_model

LENGTH = 60
IDS = torch.randint(3, 128, (1, LENGTH), generator=torch.Generator().manual_seed(0))
QUESTION, NEXT = torch.tensor([[7, 8, 9, 10]]), torch.tensor([[11]])
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10_000.0,
    },
}


def feed(model: PreTrainedModel, cache: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, **{CACHE_ARGUMENT: cache}, **more).logits
    return logits


def recomputed(model: PreTrainedModel, cache: KeepCache) -> DynamicCache:
    """What transformers would hold if the kept entries had been rotated to 0, 1, 2, ... in the first place.

    Only for cells that keep equally many. Keys before rotation are taken at the projections of a dense forward.
    """
    attentions = [layer.self_attn for layer in model.get_decoder().layers]
    plain: dict[int, Tensor] = {}
    hooks = [
        attention.k_proj.register_forward_hook(
            lambda module, args, output, index=index: plain.__setitem__(index, output)
        )
        for index, attention in enumerate(attentions)
    ]
    dense = DynamicCache(config=model.config)
    feed(model, dense, IDS)
    for hook in hooks:
        hook.remove()
    short = DynamicCache(config=model.config)
    for layer in cache.keep_layers:
        kv_heads, size = layer.store.kv_heads, dense.layers[layer.index].keys.shape[-1]
        keys = plain[layer.index].view(1, LENGTH, kv_heads, size).transpose(1, 2)
        kept = torch.stack([cache.kept_positions(layer.index, 0, head) for head in range(kv_heads)])
        index = kept[None, :, :, None].expand(-1, -1, -1, size)
        cos, sin = model.get_decoder().rotary_emb(keys, torch.arange(kept.shape[1])[None])
        keys = keys.gather(2, index)
        half = size // 2
        rotated_keys = keys * cos[:, None] + torch.cat([-keys[..., half:], keys[..., :half]], -1) * sin[:, None]
        short.update(rotated_keys, dense.layers[layer.index].values.gather(2, index), layer.index)
    return short


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("policy", ["knorm", "streaming-llm", "snapkv[window=6]"])
def test_the_model_reads_entries_at_0_1_2(rope: str, policy: str) -> None:
    """Another way of counting, the same distances: kvkeep's next token stands at 60, the reference's at 24."""
    model = tiny_model("llama", rope_parameters=ROPES[rope])
    cache = KeepCache(model, policy, entries=24, rerotate_keys=True)
    feed(model, cache, IDS)
    short = recomputed(model, cache)
    plain = KeepCache(model, policy, entries=24)
    feed(model, plain, IDS)
    positions = 24
    for piece in (QUESTION, NEXT, NEXT):
        at = torch.arange(positions, positions + piece.shape[1])[None]
        positions += piece.shape[1]
        ours, theirs = feed(model, cache, piece), feed(model, short, piece, position_ids=at)
        # The two count from other numbers, whose angles transformers computes in float32.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
        assert (feed(model, plain, piece) - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "gemma3"])
def test_where_nothing_was_evicted_before_the_kept_nothing_changes(architecture: str) -> None:
    """The newest entries stand in a row as they are: the same object, the same answer, no second copy."""
    model = tiny_model(architecture)
    caches = [
        KeepCache(model, "streaming-llm[sinks=0]", entries=20, rerotate_keys=rerotate) for rerotate in (True, False)
    ]
    for cache in caches:
        feed(model, cache, IDS)
    for piece in (QUESTION, NEXT):
        assert torch.equal(feed(model, caches[0], piece), feed(model, caches[1], piece))
    assert caches[0].ledger.to_dict() == caches[1].ledger.to_dict()


@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "gemma3"])
def test_other_models_read_moved_keys(architecture: str) -> None:
    """Each key against its own rotation, written down here: turned back by what its entry has moved."""
    model = tiny_model(architecture)
    cache = KeepCache(model, "snapkv[window=6]+ada", entries=20, rerotate_keys=True)
    feed(model, cache, IDS)
    for layer in cache.keep_layers:
        assert layer._moved is not None
        made, moved = layer._moved
        assert made is layer.store.prefix
        for cell in range(2):
            inside = slice(made.bounds[cell], made.bounds[cell + 1])
            count = made.bounds[cell + 1] - made.bounds[cell]
            shift = torch.arange(LENGTH - count, LENGTH) - made.positions[inside]
            assert int(shift.min()) >= 0
            kind = {"layer_type": "full_attention"} if architecture == "gemma3" else {}
            rotary = model.get_decoder().rotary_emb
            cos, sin = rotary(torch.empty(0, dtype=torch.float64), shift[None], **kind)
            keys, size = made.keys[inside], cos.shape[-1]
            turning = keys[:, :size]
            turned = torch.cat([-turning[:, size // 2 :], turning[:, : size // 2]], -1)
            expected = torch.cat([turning * cos[0] + turned * sin[0], keys[:, size:]], -1)
            torch.testing.assert_close(moved.keys[inside], expected, rtol=0, atol=1e-4)
            assert torch.equal(moved.values[inside], made.values[inside])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_error_grows_over_50_cuts(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    cache = KeepCache(model, "streaming-llm[sinks=4]", entries=24, rerotate_keys=True)
    feed(model, cache, IDS)
    store = cache.keep_layers[0].store
    first = store.cell(0, 0)[0][:4].clone()
    generator = torch.Generator().manual_seed(2)
    errors = []
    for _ in range(50):
        cache.cut_next()
        feed(model, cache, torch.randint(3, 128, (1, 5), generator=generator))
        worst = 0.0
        for layer in cache.keep_layers:
            assert layer._moved is not None
            made, moved = layer._moved
            places = torch.arange(24).repeat(2) + cache.lengths[0] - 24  # two cells of 24
            exact = _turned(made.keys, places - made.positions, model.model.rotary_emb.inv_freq)
            worst = max(worst, float((moved.keys.double() - exact).abs().max() / exact.abs().max()))
        errors.append(worst)
    assert cache.lengths == [LENGTH + 250]
    assert torch.equal(store.cell(0, 0)[0][:4], first)  # as the model made them, 50 cuts ago
    bound = 2e-5 if dtype == torch.float32 else 2**-8  # one rounding of the largest key
    assert max(errors[-10:]) < bound
    assert sum(errors[-10:]) < 2 * sum(errors[:10]) + bound


def _turned(keys: Tensor, shift: Tensor, frequencies: Tensor) -> Tensor:
    """In float64, by what each key has moved; with the frequencies that this model has, rounded as they are."""
    angles = shift[:, None].double() * frequencies.double().repeat(2)
    wide = keys.double()
    return wide * angles.cos() + torch.cat([-wide[:, 8:], wide[:, :8]], -1) * angles.sin()


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 40), max_size=8, unique=True), min_size=2, max_size=6), st.integers(0, 9))
def test_entries_of_each_cell_end_before_the_next_token(cells: list[list[int]], extra: int) -> None:
    """Any cells, empty ones too, of rows of two heads: a dot product depends on the distance only."""
    cells = [sorted(cell) for cell in cells[: len(cells) // 2 * 2]]
    counts = torch.tensor([len(cell) for cell in cells]).view(-1, 2)
    positions = torch.tensor([p for cell in cells for p in cell], dtype=torch.int32)
    generator = torch.Generator().manual_seed(len(positions))
    plain = torch.randn(len(positions), 8, generator=generator, dtype=torch.float64)
    rotary = ordinary_rotary(8)
    keys = rotary.rotate(plain[None, None], positions.long()[None])[0, 0]
    prefix = Prefix.from_counts(keys, keys.clone(), positions, counts)
    ends = [41 + extra + row for row in range(len(counts))]
    moved = KeyRerotation(rotary).moved_up(prefix, ends)
    for cell, held in enumerate(cells):
        inside = slice(prefix.bounds[cell], prefix.bounds[cell + 1])
        places = torch.arange(ends[cell // 2] - len(held), ends[cell // 2])
        expected = rotary.rotate(plain[None, None, inside], places[None])[0, 0]
        torch.testing.assert_close(moved.keys[inside], expected, rtol=0, atol=1e-5)
    assert moved.values is prefix.values
    assert moved.positions is prefix.positions


# --- what a cache does beside reading ---------------------------------------------------------------------------------


def test_all_bytes_are_counted() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "snapkv[window=6]", entries=24, rerotate_keys=True)
    feed(model, cache, IDS)
    ledger = cache.ledger
    assert ledger.state_bytes == ledger.payload_bytes // 2
    for piece in (None, QUESTION, NEXT):
        if piece is not None:
            feed(model, cache, piece)
        assert measure_bytes(cache).total == ledger.held_bytes
    assert ledger.peak_bytes >= ledger.held_bytes
    limit = 30_000
    bounded = KeepCache(model, "snapkv[window=6]", bytes=limit, rerotate_keys=True)
    feed(model, bounded, IDS)
    assert limit * 0.9 < bounded.ledger.held_bytes <= limit


def test_forks_rewinds_and_copies_agree(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "snapkv[window=6]+ada", entries=20, rerotate_keys=True)
    feed(model, cache, IDS)
    fork = cache.fork()
    asked = feed(model, cache, QUESTION)
    cache.rewind()
    assert torch.equal(feed(model, cache, QUESTION), asked)
    assert torch.equal(feed(model, fork, QUESTION), asked)
    cache.crop(-4)
    assert torch.equal(feed(model, cache, QUESTION), asked)
    cache.save(tmp_path / "cache.safetensors")
    loaded = KeepCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.rerotate_keys
    assert torch.equal(feed(model, loaded, NEXT), feed(model, cache, NEXT))
    shared = SharedPrompt(model, IDS[0].tolist(), ["snapkv[window=6]+ada"]).cut(
        "snapkv[window=6]+ada", Budget(entries=20)
    )
    assert not shared.rerotate_keys


@settings(max_examples=15)
@given(st.lists(st.sampled_from(["feed", "cut", "fork", "rewind", "crop", "swap"]), min_size=2, max_size=7))
def test_whatever_happens_the_moved_keys_are_those_of_the_store(happens: list[str]) -> None:
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(len(happens))
    cache = KeepCache(model, "snapkv[window=4]+ada", entries=12, rerotate_keys=True)
    feed(model, cache, torch.randint(3, 128, (2, 30), generator=generator))
    for what in happens:
        if what == "cut":
            cache.cut_next()
        elif what == "fork":
            former, cache = cache, cache.fork()
            former.cut_next()
            feed(model, former, QUESTION.repeat(2, 1))
        elif what == "rewind":
            with suppress(CacheStateError):  # where rows were swapped
                cache.rewind()
        elif what == "crop":
            with suppress(CacheStateError):  # where nothing came since the cut
                cache.crop(-2)
        elif what == "swap":
            cache.reorder_cache(torch.tensor([1, 0]))
        feed(model, cache, torch.randint(3, 128, (2, 3), generator=generator))
        check_moved(cache)


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(["ingest", "ask", "forget", "rewind", "reload"]), max_size=5),
    st.sampled_from([None, 17]),
)
def test_a_conversation_reads_moved_keys(happens: list[str], chunk_tokens: int | None) -> None:
    model, tokenizer = fake_model()
    options: dict[str, Any] = {"entries": 20, "chunk_tokens": chunk_tokens, "rerotate_keys": True}
    session = Session(model, tokenizer, "snapkv[window=4]+ada", **options)
    session.ingest("The ferry leaves at nine, and nobody knows why. ")
    for what in happens:
        if what == "ingest":
            session.ingest("The harbour is cold. ")
        elif what == "rewind":
            session.rewind()
        elif what == "reload":
            with TemporaryDirectory() as folder:
                session.save(Path(folder) / "talk.safetensors")
                session = Session.load(Path(folder) / "talk.safetensors", model, tokenizer)
        else:
            session.ask("When?", max_new_tokens=3, keep=what == "ask")
        assert session.cache.rerotate_keys
        assert session.cache.ledger.state_bytes > 0
        check_moved(session.cache)


def check_moved(cache: KeepCache) -> None:
    """What attention reads is what the store holds, rotated anew, and all of it is counted."""
    for layer in cache.keep_layers:
        assert layer._moved is not None
        assert layer.rerotation is not None
        made, moved = layer._moved
        assert made is layer.store.prefix
        ends = [length - int(n) for length, n in zip(cache.lengths, layer.store.tail_counts(), strict=True)]
        fresh = layer.rerotation.moved_up(made, ends)
        torch.testing.assert_close(moved.keys, fresh.keys, rtol=0, atol=1e-5)
    assert measure_bytes(cache).total == cache.ledger.held_bytes


def test_rows_of_a_batch_have_ends_of_their_own() -> None:
    model = tiny_model("llama")
    short = IDS[:, :41]
    ids = torch.cat([IDS, torch.nn.functional.pad(short, (LENGTH - 41, 0))])
    mask = (ids > 0).long()
    both = KeepCache(model, "knorm", compression_ratio=0.5, rerotate_keys=True)
    feed(model, both, ids, attention_mask=mask)
    more = torch.cat([mask, mask.new_ones(2, 4)], 1)
    answers = feed(model, both, QUESTION.repeat(2, 1), attention_mask=more)
    both.reorder_cache(torch.tensor([1, 0]))
    after = feed(model, both, NEXT.repeat(2, 1), attention_mask=torch.cat([more[[1, 0]], mask.new_ones(2, 1)], 1))
    for row, text in ((0, IDS), (1, short)):
        alone = KeepCache(model, "knorm", compression_ratio=0.5, rerotate_keys=True)
        feed(model, alone, text)
        # Angles are computed in float32, whose last bit depends on where a number stands among others.
        torch.testing.assert_close(answers[row : row + 1], feed(model, alone, QUESTION), rtol=0, atol=1e-4)
        torch.testing.assert_close(after[1 - row : 2 - row], feed(model, alone, NEXT), rtol=0, atol=1e-4)


def test_stacked_caches_decode_as_alone() -> None:
    model = tiny_model("llama")
    caches, alone = [], []
    for length, policy in ((60, "knorm"), (45, "snapkv[window=6]+ada")):
        cache = KeepCache(model, policy, entries=18, rerotate_keys=True)
        feed(model, cache, IDS[:, :length])
        caches.append(cache)
        alone.append(decode_batch(model, KeepCache.stack([cache]), [QUESTION[0].tolist()], max_new_tokens=5)[0])
    together = decode_batch(model, KeepCache.stack(caches), [QUESTION[0].tolist()] * 2, max_new_tokens=5)
    assert together == alone
    plain = KeepCache(model, "knorm", entries=18)
    feed(model, plain, IDS)
    with pytest.raises(CacheStateError, match="all rotate their keys anew, or none of them"):
        KeepCache.stack([caches[0], plain])


def test_chunks_under_a_cap() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "streaming-llm", entries=16, prompt_tokens=LENGTH, cut_chunks=True, rerotate_keys=True)
    for chunk in IDS.split(13, dim=1):
        feed(model, cache, chunk)
        assert cache.ledger.entries <= 16 * 6
    for layer in cache.keep_layers:
        assert layer._moved is not None
        assert layer._moved[0] is layer.store.prefix
    output = model.generate(IDS, **{CACHE_ARGUMENT: KeepCache(model, "knorm", entries=9, rerotate_keys=True)},
                            max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
    assert output.shape == (1, LENGTH + 6)


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_other_rotations_are_refused(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    model = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedError, match=f"default, linear, llama3; received rope_type '{kind}'"):
        KeepCache(model, "snapkv", entries=9, rerotate_keys=True)
