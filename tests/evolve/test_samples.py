"""Recorded samples: what a prefill gives, splits apart, files that are made once and made again when damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.errors import CacheStateError, TaskError
from kvkeep.evolve import sample_store
from kvkeep.evolve.context import FEATURES
from kvkeep.evolve.policy import ProgramPolicy
from kvkeep.evolve.program import seed_program
from kvkeep.evolve.recording import recorded_bytes
from kvkeep.evolve.sample_store import SampleStore
from kvkeep.evolve.samples import SPLITS, Asked, Facts, SampleSettings, split_samples
from kvkeep.hf.prompting import Prompting
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.tasks.protocols import CONTINUATION, Sample, Turn

from ..bench.toy import Toy
from .toys import OtherToy, collected, sample_settings, tiny


def test_splits_share_no_sample_and_have_all_tasks_alike() -> None:
    _, tokenizer = tiny()
    settings = sample_settings(probe=2, stage1=3, stage2=4, heldout=5)
    splits = split_samples([Toy(), OtherToy()], tokenizer, settings)
    keys = [sample.key for split in SPLITS for sample in splits[split]]
    assert len(set(keys)) == len(keys) == 2 * (2 + 3 + 4 + 5)
    contexts = [sample.context for samples in splits.values() for sample in samples]
    assert len(contexts) == 28
    for split in SPLITS:
        tasks = [sample.task for sample in splits[split]]
        assert tasks.count("toy/colours") == tasks.count("toy/shades") == getattr(settings, split)
    # A split keeps its indices where the others are not asked for.
    assert split_samples([Toy(), OtherToy()], tokenizer, settings, ("heldout",))["heldout"] == splits["heldout"]


@pytest.mark.parametrize("protocol", ["query-agnostic", "query-aware"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_sample_is_what_the_model_makes_of_it(architecture: str, protocol: Any, tmp_path: Path) -> None:
    model, tokenizer = tiny(architecture, torch.float64)
    sample = next(iter(Toy().samples(tokenizer, length=300, count=1)))
    recorded = collected(tmp_path, (model, tokenizer), [Toy()], protocol=protocol)["probe"][0]
    facts = recorded.facts
    asked = Asked.of(sample, Prompting(tokenizer), protocol)
    assert facts.length == len(asked.ids)
    whole = [*asked.ids, *asked.prompt, *asked.reference]
    if protocol == "query-aware":
        start, end = facts.question or (0, 0)
        assert "What colour" in tokenizer.decode(asked.ids[start:end])
        assert len(asked.prompt) == 1
    else:
        assert facts.question is None
        assert "What colour" not in tokenizer.decode(asked.ids)
    with torch.no_grad():
        output = model(torch.tensor([whole]), use_cache=True)
    logprobs = output.logits[0, -len(asked.reference) - 1 : -1].float().log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(asked.reference)[:, None])[:, 0]
    assert facts.full == pytest.approx(expected.tolist(), abs=1e-5)
    dense = getattr(output, CACHE_ARGUMENT if hasattr(output, CACHE_ARGUMENT) else "past_key_values")
    for ordinal, layer in enumerate(facts.layers):
        keys = dense.layers[layer].keys[:, :, : facts.length]
        torch.testing.assert_close(recorded.tensors[f"layers.{ordinal}.keys"], keys, atol=1e-9, rtol=0)
    contexts = recorded.contexts(entries=7)
    observations = recorded.observations(entries=7)
    assert len(contexts) == len(observations) == len(facts.layers)
    for context, observation in zip(contexts, observations, strict=True):
        assert (context.K, context.L, context.layer) == (7, facts.length, observation.layer)
        attention = observation.window_attention(64).mean(1)[0].numpy()
        np.testing.assert_allclose(context.global_attention, attention, atol=1e-6)
        assert context.question_mask.sum() == (0 if facts.question is None else facts.question[1] - facts.question[0])
    assert Facts.from_dict(facts.to_dict()) == facts


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny()
    first = collected(tmp_path, loaded)
    monkeypatch.setattr(sample_store, "record", lambda *rest: pytest.fail("a prefill"))
    seen: list[tuple[int, int]] = []
    store = SampleStore(tmp_path, 2**28)
    again = store.collect(
        *loaded, [Toy(), OtherToy()], sample_settings(), on_sample=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (12, 12)
    for split in SPLITS:
        assert [recorded.facts for recorded in again[split]] == [recorded.facts for recorded in first[split]]
        for one, other in zip(again[split], first[split], strict=True):
            assert set(one.tensors) == set(other.tensors)
            assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize(
    "change", [{"seed": 3}, {"protocol": "query-agnostic"}, {"template": False}, {"length": 380}, {"model": 1}]
)
def test_another_question_is_another_file(tmp_path: Path, change: dict[str, Any]) -> None:
    collected(tmp_path)
    before = set(tmp_path.glob("*.json"))
    model = change.get("model", 0)
    change = {name: value for name, value in change.items() if name != "model"}
    collected(tmp_path, tiny(seed=model), **change)
    after = set(tmp_path.glob("*.json"))
    assert before < after


@pytest.mark.parametrize("damage", ["cut", "flipped", "facts", "no facts", "not json"])
def test_damaged_files_are_made_again(tmp_path: Path, damage: str) -> None:
    loaded = tiny()
    recorded = collected(tmp_path, loaded)["stage1"][0]
    good = {name: tensor.clone() for name, tensor in recorded.tensors.items()}
    recorded.close()
    facts = recorded.path.with_suffix(".json")
    content = recorded.path.read_bytes()
    if damage == "cut":
        recorded.path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        recorded.path.write_bytes(content[:-5] + bytes([content[-5] ^ 64]) + content[-4:])
    elif damage == "facts":
        facts.write_text("{}")
    elif damage == "no facts":
        facts.unlink()
    else:
        facts.write_text(facts.read_text()[:-20])
    again = collected(tmp_path, loaded)["stage1"][0]
    assert again.facts == recorded.facts
    assert all(torch.equal(good[name], again.tensors[name]) for name in good)


def test_the_folder_stays_below_its_limit(tmp_path: Path) -> None:
    model, tokenizer = tiny()
    store = SampleStore(tmp_path, 2**28)
    old = store.collect(model, tokenizer, [Toy()], sample_settings(seed=5))
    for path in tmp_path.glob("*.json"):
        os.utime(path, (1, 1))
    size = store.nbytes()
    narrow = SampleStore(tmp_path, size + size // 2)
    new = narrow.collect(model, tokenizer, [Toy()], sample_settings(seed=6))
    assert narrow.nbytes() <= size + size // 2
    assert all(recorded.path.exists() for split in SPLITS for recorded in new[split])
    assert not all(recorded.path.exists() for split in SPLITS for recorded in old[split])
    with pytest.raises(CacheStateError, match="sample-cache-bytes"):
        SampleStore(tmp_path, size // 4).collect(model, tokenizer, [Toy()], sample_settings(seed=6))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_size_is_told_before(architecture: str, tmp_path: Path) -> None:
    model, tokenizer = tiny(architecture)
    samples = collected(tmp_path, (model, tokenizer), [Toy()])
    recorded = samples["probe"][0]
    assert recorded.path.stat().st_size == pytest.approx(recorded_bytes(model, recorded.facts.length), rel=0.25)


def test_a_policy_sees_what_a_program_saw_when_it_was_recorded(tmp_path: Path) -> None:
    """What the policy of a seed chooses on a live prefill is what its functions choose on recorded contexts."""
    from kvkeep import KeepCache

    model, tokenizer = tiny(dtype=torch.float64)
    recorded = collected(tmp_path, (model, tokenizer), [Toy()])["stage2"][0]
    sample = next(iter(Toy().samples(tokenizer, length=300, count=1, first=2)))
    ids = Asked.of(sample, Prompting(tokenizer), "query-aware").ids
    for name in ("frc", "snapkv-like", "v1-generic"):
        program = seed_program(name)
        cache = KeepCache(model, ProgramPolicy(program), entries=25, question=recorded.facts.question)
        with torch.no_grad():
            model(torch.tensor([ids]), **{CACHE_ARGUMENT: cache})
        functions = program.functions()
        for context, layer in zip(recorded.contexts(25), recorded.facts.layers, strict=True):
            kept = np.sort(functions.select_tokens_to_keep(functions.score_tokens(context), context))
            assert cache.kept_positions(layer).tolist() == kept.tolist()


def test_what_makes_no_sample_is_refused(tmp_path: Path) -> None:
    _, tokenizer = tiny()
    with pytest.raises(TaskError):
        SampleSettings(length=100, stage1=0)
    with pytest.raises(TaskError, match="template"):
        split_samples([Toy()], tokenizer, sample_settings(length=8))
    with pytest.raises(TaskError):
        split_samples([], tokenizer, sample_settings())
    goes_on = Sample("toy/text", 0, "Once", (Turn("", (" upon a time",), CONTINUATION, 4),))
    with pytest.raises(TaskError, match="query-agnostic"):
        Asked.of(goes_on, Prompting(tokenizer), "query-aware")
    asked = Asked.of(goes_on, Prompting(tokenizer), "query-agnostic")
    assert tokenizer.decode([*asked.prompt, *asked.reference]) == " upon a time"
    silent = Sample("toy/text", 0, "Once", (Turn("What?", (), "match_all", 4),))
    with pytest.raises(TaskError, match="reference"):
        Asked.of(silent, Prompting(tokenizer), "query-aware")


def test_features_are_all_there(tmp_path: Path) -> None:
    recorded = collected(tmp_path, tasks=[Toy()])["probe"][0]
    assert {name.rpartition(".")[2] for name in recorded.tensors if name.startswith("contexts.0.")} > set(FEATURES)
