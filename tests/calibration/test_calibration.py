"""Calibrations: the numbers are those of their formulas, and each belongs to one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from kvkeep import KeepCache
from kvkeep.calibration import Calibration, calibrate, calibration_path, cut_pieces
from kvkeep.calibration.collecting import Moments, copied_attention
from kvkeep.errors import ModelFileError, TaskError, UnsupportedError
from kvkeep.hf.models import model_sha256
from kvkeep.hf.shared_prompt import SharedPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.store.sealed import write_sealed
from kvkeep.tasks.text import Message
from kvkeep.testing import fake_model, random_observation

LENGTH, SINKS = 40, 3
STATISTICAL = ("qfilter", "qfilter+ada", "duo[sinks=2,recent=4]", "expected-attention[statistics=model]")
IDS = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(0))


def documents(count: int = 3, words: int = 30) -> list[Message]:
    generator = torch.Generator().manual_seed(1)
    letters = "abcdefgh "
    return [
        Message(f"text-{i}", "".join(letters[j] for j in torch.randint(0, 9, (words * 5,), generator=generator)))
        for i in range(count)
    ]


def calibrated(model: Any, tokenizer: Any, **options: Any) -> Calibration:
    return calibrate(
        model, tokenizer, documents(), corpus="letters", **({"texts": 4, "length": LENGTH, "sinks": SINKS} | options)
    )


@pytest.fixture(name="home")
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    return tmp_path


# --- what is computed -------------------------------------------------------------------------------------------------


def queries_of(model: Any, ids: list[int]) -> dict[int, torch.Tensor]:
    """`[H, n, D]` of each layer of a Llama before rotation, from its projections."""
    found: dict[int, torch.Tensor] = {}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, args, output, index=index: found.__setitem__(index, output[0].view(len(ids), 4, 16))
        )
        for index, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), **{CACHE_ARGUMENT: DynamicCache(config=model.config)})
    for hook in hooks:
        hook.remove()
    return {index: x.transpose(0, 1).double() for index, x in found.items()}


def test_queries_and_filters_are_those_of_the_model() -> None:
    model, tokenizer = fake_model(layers=2)
    ours = calibrated(model, tokenizer)
    pieces = list(cut_pieces(documents(), tokenizer, length=LENGTH, count=4))
    assert (len(pieces), ours.facts["texts"], ours.facts["queries"]) == (4, 4, 4 * (LENGTH - SINKS))
    plain = [queries_of(model, piece) for piece in pieces]
    rotary = model.model.rotary_emb
    cos, sin = rotary(torch.empty(0), torch.arange(LENGTH)[None])
    turned = torch.cat([cos[0, :, :8].double()] * 2, -1), torch.cat([sin[0, :, :8].double()] * 2, -1)
    for layer, known in ours.layers.items():
        queries = torch.cat([text[layer][:, SINKS:] for text in plain], dim=1)  # [H, n, D]
        torch.testing.assert_close(known.query_mean.double(), queries.mean(1), rtol=1e-4, atol=1e-5)
        for head in range(4):
            spread = torch.cov(queries[head].T, correction=0)
            torch.testing.assert_close(known.query_covariance[head].double(), spread, rtol=1e-3, atol=1e-4)
        rotated = [
            x * turned[0] + torch.cat([-x[..., 8:], x[..., :8]], -1) * turned[1] for x in (t[layer] for t in plain)
        ]
        every = torch.cat([x[:, SINKS:] for x in rotated], dim=1)
        for kv_head in range(2):
            directions = []
            for head in (2 * kv_head, 2 * kv_head + 1):
                first = torch.linalg.svd(every[head], full_matrices=False).Vh[0]
                directions.append(first * torch.sign((every[head] @ first).mean()))
            torch.testing.assert_close(
                known.filters[kv_head].double(), torch.stack(directions).mean(0), rtol=1e-3, atol=1e-4
            )


def test_copying_is_attention_to_the_first_reading() -> None:
    model, tokenizer = fake_model(layers=2)
    eager = fake_model(layers=2)[0]
    eager.set_attn_implementation("eager")
    ours = calibrated(model, tokenizer, texts=2)
    half = LENGTH // 2
    rows = []
    for piece in cut_pieces(documents(), tokenizer, length=LENGTH, count=2):
        ids = piece[:half] * 2
        with torch.no_grad():
            attention = eager(torch.tensor([ids]), output_attentions=True).attentions
        rows.append(
            torch.stack(
                [
                    sum(layer[0, :, half + i, i : i + 2].sum(-1) for i in range(half - 1)) / (half - 1)
                    for layer in attention
                ]
            )
        )
    found = torch.stack([known.copying for known in ours.layers.values()])
    torch.testing.assert_close(found, torch.stack(rows).mean(0), rtol=1e-4, atol=1e-6)
    assert 0 < float(found.min()) < float(found.max()) < 1


def test_a_head_that_copies_is_found() -> None:
    """A query that points at what followed its twin, and one that points at its own neighbour."""
    seen = random_observation(length=16, heads=2, kv_heads=1, head_size=16)
    keys = torch.eye(16)[None, None]
    following = torch.cat([torch.zeros(8, 16), 90 * torch.eye(16)[1:9]])
    neighbour = torch.cat([torch.zeros(8, 16), 90 * torch.eye(16)[7:15]])
    queries = torch.stack([following, neighbour])[None, :, 8:]
    seen = replace(seen, keys=keys, queries=queries, query_positions=torch.arange(8, 16)[None], scaling=1.0)
    assert copied_attention(seen, 8).tolist() == pytest.approx([1, 0], abs=1e-6)


@settings(max_examples=30)
@given(st.integers(0, 1000), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_moments_do_not_depend_on_how_they_came(seed: int, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, sum(sizes), 5, generator=generator, dtype=torch.float64) + 3
    moments = Moments.of(2, 5)
    for part in vectors.split(sizes, dim=1):
        moments.add(part)
    torch.testing.assert_close(moments.mean, vectors.mean(1))
    centred = vectors - vectors.mean(1, keepdim=True)
    torch.testing.assert_close(moments.covariance, centred.transpose(1, 2) @ centred / sum(sizes), atol=1e-9, rtol=1e-9)
    directions = moments.main_directions()
    assert torch.linalg.vector_norm(directions, dim=-1).tolist() == pytest.approx([1, 1])
    assert bool(((directions * moments.mean).sum(-1) > 0).all())


@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "gemma3"])
def test_other_models(architecture: str) -> None:
    model, tokenizer = fake_model(architecture, layers=4)
    known = calibrated(model, tokenizer, texts=2)
    assert list(known.layers) == ([1, 3] if architecture == "gemma3" else [0, 1, 2, 3])  # sliding layers are left out
    for layer in known.layers.values():
        assert layer.query_covariance.shape == (4, 16, 16)
        assert bool((torch.linalg.eigvalsh(layer.query_covariance) > -1e-4).all())


# --- texts ------------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer: one token a word."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 9), st.integers(1, 12))
def test_pieces_are_whole_and_spread(sizes: list[int], length: int, count: int) -> None:
    texts = [Message(f"{i}", " ".join(str(100 * i + j) for j in range(size))) for i, size in enumerate(sizes)]
    pieces = list(cut_pieces(texts, Words(), length=length, count=count))
    assert len(pieces) == min(count, sum(size // length for size in sizes))
    for piece in pieces:
        assert piece == list(range(piece[0], piece[0] + length))
        assert piece[0] % 100 % length == 0
    assert len({piece[0] for piece in pieces}) == len(pieces)
    used, long_enough = {piece[0] // 100 for piece in pieces}, sum(size >= length for size in sizes)
    assert len(used) == min(count, long_enough)  # each document that can gives one before any gives two


def test_texts_that_are_too_short_are_refused() -> None:
    model, tokenizer = fake_model()
    with pytest.raises(TaskError, match="a text of at least 4000 tokens; received 3 shorter ones in letters"):
        calibrated(model, tokenizer, length=4000)
    with pytest.raises(TaskError, match="texts of at least 32 tokens"):
        calibrated(model, tokenizer, length=8)
    with pytest.raises(TaskError, match="length 40, sinks 20"):
        calibrated(model, tokenizer, sinks=20)
    with pytest.raises(TaskError, match=r"one or more texts .* received texts 0"):
        calibrated(model, tokenizer, texts=0)


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
def test_a_model_that_gives_no_numbers_is_refused(projection: str) -> None:
    """Such as one that overflows in float16. A file of it would be called damaged by every policy."""
    model, tokenizer = fake_model()
    with torch.no_grad():
        getattr(model.model.layers[-1].self_attn, projection).weight[0] = torch.nan
    with pytest.raises(UnsupportedError, match=r"finite numbers.*NaN or infinity in layer 1.*float32"):
        calibrated(model, tokenizer)


def test_rotations_that_change_with_the_text_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, tokenizer = fake_model(rope_parameters=rope)
    with pytest.raises(UnsupportedError, match="rope_type 'dynamic'"):
        calibrated(model, tokenizer)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_comes_back(tmp_path: Path) -> None:
    model, tokenizer = fake_model()
    known = calibrated(model, tokenizer)
    path = known.save(tmp_path / "deep" / "mine.safetensors")
    read = Calibration.load(path)
    assert read.facts == {"schema_version": 1, **known.facts}
    assert list(read.layers) == list(known.layers)
    for index, layer in known.layers.items():
        for name in ("query_mean", "query_covariance", "filters", "copying"):
            assert torch.equal(getattr(read.layers[index], name), getattr(layer, name))
    assert [p.name for p in path.parent.iterdir()] == ["mine.safetensors"]
    with pytest.raises(ModelFileError, match="a path that can be written to"):
        known.save(path / "below-a-file.safetensors")


@pytest.mark.parametrize("policy", STATISTICAL)
def test_policies_find_the_calibration_of_their_model(home: Path, policy: str) -> None:
    model, tokenizer = fake_model()
    with pytest.raises(ModelFileError, match=r"(?s)calibrations.*no such file.*kvkeep calibrate --model"):
        KeepCache(model, policy, compression_ratio=0.5)
    known = calibrated(model, tokenizer)
    known.save(calibration_path(known.facts["model_sha256"]))
    cache = KeepCache(model, policy, compression_ratio=0.5)
    with torch.no_grad():
        model(IDS, **{CACHE_ARGUMENT: cache})
    counts = torch.tensor(cache.ledger.entries_per_cell)
    assert counts.sum() <= 30 * 4
    assert policy.startswith("duo") or counts.sum() == 30 * 4
    assert cache.ledger.held_bytes < 0.6 * cache.ledger.full_bytes

    chunked = KeepCache(model, policy, entries=20, prompt_tokens=60, cut_chunks=True)
    for chunk in IDS.split(25, dim=1):
        with torch.no_grad():
            model(chunk, **{CACHE_ARGUMENT: chunked})
        assert chunked.ledger.entries <= 20 * 4

    shared = SharedPrompt(model, IDS[0].tolist(), [policy, "snapkv"])
    again = shared.cut(policy, cache.budget)
    for layer in range(2):
        for head in range(2):
            assert torch.equal(again.kept_positions(layer, 0, head), cache.kept_positions(layer, 0, head))


def test_a_model_that_changes_needs_another_calibration(home: Path) -> None:
    model, tokenizer = fake_model()
    known = calibrated(model, tokenizer)
    own = known.save(calibration_path(known.facts["model_sha256"]))
    KeepCache(model, "qfilter", entries=9)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ModelFileError, match="no such file"):
        KeepCache(model, "qfilter", entries=9)
    with pytest.raises(ModelFileError, match=r"a calibration of the model tensors:.*received .*one of tensors:"):
        KeepCache(model, f"qfilter[statistics={own}]", entries=9)


def test_attaching_does_not_change_who_a_model_is() -> None:
    model, _ = fake_model()
    before = model_sha256(model)
    KeepCache(model, "snapkv", entries=9)
    assert model_sha256(model) == before


def test_a_saved_cache_comes_back_with_its_calibration(home: Path, tmp_path: Path) -> None:
    model, tokenizer = fake_model()
    known = calibrated(model, tokenizer)
    path = known.save(tmp_path / "mine.safetensors")
    cache = KeepCache(model, f"qfilter[statistics={path}]", entries=20)
    with torch.no_grad():
        model(IDS, **{CACHE_ARGUMENT: cache})
    cache.save(tmp_path / "cache.safetensors")
    loaded = KeepCache.load(tmp_path / "cache.safetensors", model)
    for each in (cache, loaded):
        each.cut_next()
        with torch.no_grad():
            model(IDS[:, :7], **{CACHE_ARGUMENT: each})
    assert torch.equal(cache.kept_positions(0), loaded.kept_positions(0))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    model, tokenizer = fake_model()
    path = calibrated(model, tokenizer).save(tmp_path / "mine.safetensors")
    tensors = load_file(path)
    whole = path.read_bytes()
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1)}, other)
    for content, said in (
        (other.read_bytes(), "a file of something else"),
        (b"noise", "received"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "other bytes than were saved"),
    ):
        bad = tmp_path / "bad.safetensors"
        bad.write_bytes(content)
        with pytest.raises(ModelFileError, match=said):
            KeepCache(model, f"qfilter[statistics={bad}]", entries=9)
    write_sealed(bad, {"schema_version": 0}, tensors)
    with pytest.raises(ModelFileError, match="schema version 0"):
        Calibration.load(bad)
    for change in ({"filters": torch.full_like(tensors["filters"], torch.nan)}, {"copying": tensors["copying"][:1]}):
        write_sealed(bad, {"schema_version": 1}, tensors | change)
        with pytest.raises(ModelFileError, match="missing, not finite, or do not agree"):
            Calibration.load(bad)
    write_sealed(bad, {"schema_version": 1}, {name: tensors[name] for name in tensors if name != "filters"})
    with pytest.raises(ModelFileError, match="tensors that are missing"):
        Calibration.load(bad)
