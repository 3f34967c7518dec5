"""State lives in the cache: several caches on one model, rewinding, resetting, leaving, and other models beside."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

import kvkeep
from kvkeep import CacheStateError, KeepCache
from kvkeep.hf.attention import NAMES
from kvkeep.hf.layers import KeepLayer
from kvkeep.hf.sliding import KeepSlidingLayer
from kvkeep.lab.rows import NAMES as LAB_NAMES

from ..hf.tiny import tiny_model
from .common import SHAPES, LockStep, feed, generate, held, text


@pytest.mark.parametrize("policy", SHAPES)
def test_p11_a_shorter_text_after_a_longer_one_meets_no_stale_state(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: state of the first text breaks or bends the second, shorter one. Right: as if it were the first."""
    used = KeepCache(llama, policy, compression_ratio=0.5)
    generate(llama, text(2, 60), used)
    used.reset()
    ours = generate(llama, text(1, 20), used)
    fresh = KeepCache(llama, policy, compression_ratio=0.5)
    assert torch.equal(ours, generate(llama, text(1, 20), fresh))
    assert used.ledger.to_dict() == fresh.ledger.to_dict()


@pytest.mark.parametrize("policies", [("snapkv[window=6]+ada", "knorm"), ("frc", "snapkv[window=6]+threshold")])
def test_p50_two_caches_on_one_model_do_not_meet(llama: PreTrainedModel, policies: tuple[str, str]) -> None:
    """Elsewhere: masks sit on the modules, so two chats contaminate each other. Right: each as if it were alone."""
    pairs = [LockStep(llama, KeepCache(llama, policy, compression_ratio=0.5)) for policy in policies]
    plain, untouched = DynamicCache(config=llama.config), DynamicCache(config=llama.config)
    first = feed(llama, plain, text(1, 40))
    for pair, prompt in zip(pairs, (text(1, 50, seed=1), text(2, 33, seed=2)), strict=True):
        pair.feed(prompt)
    for step in range(3):
        for pair in pairs:
            pair.feed(text(len(pair.cache._progress.lengths), 1 + step, seed=step))
        last = feed(llama, plain, text(1, 1, seed=step))
    kvkeep.detach(llama)
    assert torch.equal(first, feed(llama, untouched, text(1, 40)))
    for step in range(3):
        expected = feed(llama, untouched, text(1, 1, seed=step))
    assert torch.equal(last, expected)


def test_p50_nothing_survives_leaving_also_after_an_exception(llama: PreTrainedModel) -> None:
    """Elsewhere: masks survive the context manager. Right: the model is as it was: name, hooks, attributes, results."""

    def traces() -> list[object]:
        modules = [(len(m._forward_pre_hooks), len(m._forward_hooks), sorted(vars(m))) for m in llama.modules()]
        return [llama.config.to_dict(), llama.config._attn_implementation, modules]

    def fail() -> None:
        with kvkeep.attached(llama):
            generate(llama, text(1, 30), KeepCache(llama, "knorm", compression_ratio=0.5))
            raise RuntimeError("on purpose")

    kvkeep.detach(llama)
    before, expected = traces(), generate(llama, text(1, 30))
    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert traces() == before
    assert torch.equal(generate(llama, text(1, 30)), expected)


def test_p50_a_mark_of_another_text_is_refused(llama: PreTrainedModel) -> None:
    """Elsewhere: saved state is put back into a cache that holds another text. Right: refused, and nothing changes."""
    cache = KeepCache(llama, "knorm", compression_ratio=0.5)
    feed(llama, cache, text(1, 40))
    of_a_former_text = cache.mark()
    other = KeepCache(llama, "knorm", compression_ratio=0.5)
    feed(llama, other, text(1, 40, seed=1))
    cache.reset()
    pair = LockStep(llama, cache)
    pair.feed(text(1, 30))
    start = cache.mark()
    feed(llama, cache, text(1, 5))
    of_former_tokens = cache.mark()
    cache.rewind(start)
    pair.feed(text(1, 7, seed=1))
    for mark in (of_a_former_text, other.mark(), of_former_tokens):
        with pytest.raises(CacheStateError, match="expected a mark"):
            cache.rewind(mark)
    assert cache.get_seq_length() == 37
    pair.feed(text(1, 3))
    cache.rewind(start)
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("copied", [KeepCache.fork, copy.deepcopy])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_p50_a_copy_goes_its_own_way(architecture: str, copied: Callable[[KeepCache], KeepCache]) -> None:
    """Elsewhere: copies of a cache share tensors or counters. Right: what one does, the other does not see."""
    model = tiny_model(architecture)
    pair = LockStep(model, KeepCache(model, "snapkv[window=6]+ada", compression_ratio=0.5))
    pair.feed(text(1, 40))
    pair.feed(text(1, 3))
    twin = LockStep(model, copied(pair.cache))
    twin.full = copy.deepcopy(pair.full)
    facts = pair.cache.ledger.to_dict()
    for step in range(3):
        twin.feed(text(1, 2, seed=step + 10))
    assert pair.cache.ledger.to_dict() == facts
    assert twin.cache.ledger.to_dict()["logical_length"] == twin.cache.get_seq_length() == 49
    for step in range(2):
        pair.feed(text(1, 2, seed=step))
    twin.cache.rewind()
    assert (pair.cache.get_seq_length(), twin.cache.get_seq_length()) == (47, 40)


@pytest.mark.parametrize("policy", ["snapkv[window=20]+ada", "h2o"])
def test_p50_rows_and_copies_may_change_within_a_prompt_in_chunks(llama: PreTrainedModel, policy: str) -> None:
    """Elsewhere: what is remembered of the first chunks is lost or belongs to other rows. Right: as in one forward."""
    first, second = text(2, 12), text(2, 18, seed=1)
    rows = torch.tensor([1, 1, 0])
    whole = LockStep(llama, KeepCache(llama, policy, compression_ratio=0.5))
    expected = whole.feed(torch.cat([first, second], 1)[rows])
    cache = KeepCache(llama, policy, compression_ratio=0.5, prompt_tokens=30)
    feed(llama, cache, first)
    early = cache.fork()
    with pytest.raises(CacheStateError, match="the first 12 of them"):
        cache.mark()
    cache.reorder_cache(rows)
    torch.testing.assert_close(feed(llama, cache, second[rows]), expected[:, 12:], rtol=0, atol=1e-10)
    feed(llama, early, second)
    for layer in range(3):
        for row, source in enumerate(rows.tolist()):
            assert held(cache, layer, row) == held(whole.cache, layer, row) == held(early, layer, source)


def test_p64_importing_and_attaching_patches_nothing(llama: PreTrainedModel) -> None:
    """Elsewhere: a global patch breaks other model families. Right: transformers' own functions stay, others run on."""
    KeepCache(llama, "knorm", compression_ratio=0.5)
    for registry in (AttentionInterface(), AttentionMaskInterface()):
        ours = {name for name in registry if registry[name].__module__.startswith("kvkeep.")}
        # Names of kvkeep's own, none of transformers'; the laboratory adds its two when it is used.
        assert ours - set(LAB_NAMES.values()) == set(NAMES.values())
    config = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1}
    other = GPT2LMHeadModel(GPT2Config(**config, eos_token_id=2)).eval()
    twin = tiny_model("llama")
    assert other.config._attn_implementation == twin.config._attn_implementation == "sdpa"
    assert generate(other, text(1, 20)).shape == (1, 28)
    assert torch.equal(generate(twin, text(1, 20)), generate(llama, text(1, 20)))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_p64_other_caches_on_an_attached_model_give_their_former_tokens(kind: str) -> None:
    """Elsewhere: the patched attention changes results without eviction. Right: bit by bit what they were."""
    model = tiny_model("gemma3", torch.float32)

    def run() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=64)
        return generate(model, text(2, 30), cache, disable_compile=True)

    expected = run()
    KeepCache(model, "knorm", compression_ratio=0.5)
    assert torch.equal(run(), expected)


def test_p28_only_the_adapter_knows_transformers() -> None:
    """Elsewhere: a cache refactor of transformers broke everything. Right: one room imports it, the rest does not."""
    source = Path(kvkeep.__file__).parent
    rooms = ["budget.py", "errors.py", "observation.py", "policies", "store", "attention"]
    files = [file for room in rooms for file in [source / room, *(source / room).rglob("*.py")] if file.is_file()]
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.startswith(("transformers", "kvkeep.hf")) for n in names), f"{file.name} imports {names}"


def test_p28_the_layers_answer_all_that_transformers_asks_of_a_layer() -> None:
    """Elsewhere: internal attributes moved. Right: our layers have every public method that a layer has now."""
    for kind in (KeepLayer, KeepSlidingLayer):
        assert not kind.__abstractmethods__
        missing = [n for n in vars(CacheLayerMixin) if not n.startswith("_") and not hasattr(kind, n)]
        assert missing == []


@pytest.mark.parametrize("policy", SHAPES)
def test_p94_reset_leaves_nothing(policy: str) -> None:
    """Elsewhere: reset has no effect on a dynamic cache. Right: length, rows, entries and bytes are 0; then as new."""
    model = tiny_model("gemma3")
    cache = KeepCache(model, policy, compression_ratio=0.5)
    expected = generate(model, text(2, 40), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    facts = cache.ledger.to_dict()
    assert not any(facts[name] for name in facts if name != "logical_length"), facts
    assert cache.notes == []
    assert torch.equal(generate(model, text(2, 40), cache), expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_p91_a_cache_serves_again_after_generating_beyond_its_window(architecture: str) -> None:
    """Elsewhere: a sink cache has wrong positions beyond its window and cannot be used again. Right: rewind, and the
    same question finds the same cache; another question too."""
    model = tiny_model(architecture)
    cache = KeepCache(model, "streaming-llm", entries=12)
    pair = LockStep(model, cache)
    pair.feed(text(1, 40))
    after = copy.deepcopy(pair.full)
    answers = []
    for question in (1, 2, 1):
        pair.full = copy.deepcopy(after)
        pair.feed(text(1, 5, seed=question))
        answers.append(torch.cat([pair.feed(text(1, 1, seed=step)) for step in range(12)]))
        cache.rewind()
        assert cache.get_seq_length() == 40
        assert held(cache) == [[0, 1, 2, 3, *range(32, 40)]] * 2
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])
