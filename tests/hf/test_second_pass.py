"""The second pass: its scores equal those of a dense cache, and nothing of it stays."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep import Budget, CacheStateError, KeepCache, PolicyError, RepeatPrompt, SecondPass, Session, UnsupportedError
from kvkeep.hf.planning import plan_cache
from kvkeep.hf.shared_prompt import SharedPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import parse_policy
from kvkeep.testing import fake_model

from ..peer_problems.common import LockStep, feed, generate, held, left_padded, spy, text
from .dense_reference import dense_logits, kept_logits, positions_of
from .tiny import ARCHITECTURES, tiny_model

PROMPT = RepeatPrompt(first=(7, 8, 9), further=(10, 11), footer=(12, 13))
PASSES = [SecondPass(), SecondPass(chunk=16, sinks=3), SecondPass(chunk=16, sinks=3, normalised=True)]
POLICIES = ["kvzip", "kvzip+ada", "kvzip+threshold[floor=4]", "kvzip-plus[chunk=16]"]


# --- the naive side ---------------------------------------------------------------------------------------------------


def fed_tokens(prompt: RepeatPrompt, ids: list[int], start: int, end: int) -> list[int]:
    """What makes a model repeat a chunk, and the chunk."""
    asks = list(prompt.first) if start == 0 else [*prompt.further, *ids[max(0, start - 8) : start]]
    return [*asks, *prompt.footer, *ids[start:end]]


@torch.no_grad()
def naive_scores(model: PreTrainedModel, ids: list[int], second_pass: SecondPass, prompt: RepeatPrompt) -> list[Tensor]:
    """`[H_kv, L]` by layer, from transformers' own cache and the attention matrices of its eager implementation."""
    full, length = DynamicCache(config=model.config), len(ids)
    model(torch.tensor([ids]), **{CACHE_ARGUMENT: full})
    states: dict[int, Tensor] = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: states.update({module.layer_idx: kwargs["hidden_states"]}), with_kwargs=True
        )
        for layer in model.get_decoder().layers
    ]
    kv_heads = full.layers[0].keys.shape[1]
    best = [torch.zeros(kv_heads, length, dtype=torch.float64) for _ in full.layers]
    for start in range(0, length, second_pass.chunk):
        end = min(start + second_pass.chunk, length)
        fed = torch.tensor([fed_tokens(prompt, ids, start, end)])
        output = model(fed, output_attentions=True, **{CACHE_ARGUMENT: copy.deepcopy(full)})
        for index, attention in enumerate(output.attentions):
            if attention.shape[-1] != length + fed.shape[1]:
                continue  # a sliding layer
            at = torch.arange(attention.shape[-1])
            seen = (at < second_pass.sinks) | ((at >= start) & (at < end)) | (at >= length)
            rows = attention[0].double() * seen
            rows = (rows / rows.sum(-1, keepdim=True))[..., :length]  # [H, q, L]
            if second_pass.normalised:
                rows = rows / states[index][0].norm(dim=-1)[None, :, None]
                heads = rows.shape[0]
                weight = model.get_decoder().layers[index].self_attn.o_proj.weight  # [hidden, H * D]
                values = full.layers[index].values[0].repeat_interleave(heads // kv_heads, dim=0)
                moved = [
                    v @ w.T for v, w in zip(values, weight.view(len(weight), heads, -1).transpose(0, 1), strict=True)
                ]
                rows = rows * torch.stack(moved).norm(dim=-1)[:, None]
            peaks = rows.view(kv_heads, -1, length).amax(1)
            best[index] = torch.maximum(best[index], peaks)
    for hook in hooks:
        hook.remove()
    return best


def observed(
    model: PreTrainedModel, ids: Tensor, *passes: SecondPass, **arguments: Any
) -> dict[SecondPass, list[Tensor]]:
    """What a policy sees of each pass, layer by layer."""
    policy, seen = spy(second_passes=frozenset(passes))
    feed(model, KeepCache(model, policy, entries=1, **arguments), ids)
    return {each: [o.second_passes[each] for o in seen] for each in passes}


@pytest.mark.parametrize("prompt", [RepeatPrompt(), PROMPT], ids=["bare", "asked"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_those_of_a_dense_cache(architecture: str, prompt: RepeatPrompt) -> None:
    ids = text(1, 45)
    ours = observed(tiny_model(architecture), ids, *PASSES, repeat_prompt=prompt)
    eager = tiny_model(architecture, attn_implementation="eager")
    full_layers = [i for i, kind in enumerate(getattr(eager.config, "layer_types", None) or []) if "full" in kind]
    for each in PASSES:
        expected = naive_scores(eager, ids[0].tolist(), each, prompt)
        wanted = [expected[i] for i in full_layers] if full_layers else expected
        assert len(ours[each]) == len(wanted)
        for found, layer in zip(ours[each], wanted, strict=True):
            torch.testing.assert_close(found[0].double(), layer, rtol=0, atol=1e-6)
            assert layer.std() > 1e-3, "all entries are alike; the test shows nothing"


def test_chunks_and_sinks_matter() -> None:
    ids = text(1, 45)
    model = tiny_model("llama")
    ours = observed(model, ids, *PASSES, SecondPass(chunk=16, sinks=0))
    tensors = [torch.stack(layers) for layers in ours.values()]
    for i, one in enumerate(tensors):
        for other in tensors[:i]:
            assert not torch.allclose(one, other, atol=1e-3)
    asked = observed(model, ids, SecondPass(), repeat_prompt=PROMPT)[SecondPass()]
    assert not torch.allclose(torch.stack(asked), tensors[0], atol=1e-3)


# --- eviction after it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "phi3"])
def test_question_and_steps_equal_dense_attention(architecture: str, policy: str) -> None:
    model = tiny_model(architecture)
    pieces = [text(2, 61), text(2, 7, seed=1), text(2, 1, seed=2), text(2, 1, seed=3)]
    cache = KeepCache(model, policy, compression_ratio=0.6, repeat_prompt=PROMPT)
    kept = kept_logits(model, cache, pieces)
    dense = dense_logits(model, cache, pieces)
    for ours, reference in zip(kept, dense, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)
    assert (dense[1] - dense_logits(model, None, pieces)[1]).abs().max() > 1e-4, "nothing was evicted that mattered"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_nothing_of_the_repetition_stays(architecture: str) -> None:
    model = tiny_model(architecture)
    others = tiny_model(architecture)
    ids = text(2, 50)
    cache = KeepCache(model, "kvzip[chunk=16]", compression_ratio=0.5, repeat_prompt=PROMPT)
    plain = KeepCache(others, "knorm", compression_ratio=0.5)
    logits = feed(model, cache, ids)
    torch.testing.assert_close(logits, feed(others, plain, ids), rtol=0, atol=1e-12)
    assert cache.get_seq_length() == 50
    assert cache.lengths == [50, 50]
    assert cache.ledger.uncut_entries == cache.ledger.state_bytes == 0
    assert cache.ledger.to_dict().keys() == plain.ledger.to_dict().keys()
    assert cache.ledger.held_bytes == plain.ledger.held_bytes
    assert cache.ledger.window_bytes == plain.ledger.window_bytes
    for ours, theirs in zip(cache.sliding_layers, plain.sliding_layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-12)
        assert ours.cumulative_length == theirs.cumulative_length == 50
    assert all(layer.store.tail is None for layer in cache.keep_layers)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.get_decoder().layers)
    # Neither does anything stay on the model: another cache gives what it gave before.
    torch.testing.assert_close(feed(model, DynamicCache(config=model.config), ids), logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_padded_rows_equal_single_rows(architecture: str) -> None:
    model = tiny_model(architecture)
    rows = [text(1, length, seed=length) for length in (41, 9, 29)]
    padded, mask = left_padded(rows)
    batch = KeepCache(model, "kvzip[chunk=12]+threshold[floor=2]", compression_ratio=0.6, repeat_prompt=PROMPT)
    feed(model, batch, padded, attention_mask=mask, position_ids=positions_of(mask, padded))
    for row, ids in enumerate(rows):
        single = KeepCache(model, "kvzip[chunk=12]+threshold[floor=2]", compression_ratio=0.6, repeat_prompt=PROMPT)
        feed(model, single, ids)
        for layer in range(len(single.keep_layers)):
            assert held(batch, layer, row) == held(single, layer)


def test_a_prompt_in_chunks_is_repeated_as_a_whole() -> None:
    model = tiny_model("llama")
    ids = text(2, 47)
    whole = KeepCache(model, "kvzip+ada", compression_ratio=0.5)
    expected = generate(model, ids, whole)
    chunks = KeepCache(model, "kvzip+ada", compression_ratio=0.5, prompt_tokens=47)
    assert torch.equal(generate(model, ids, chunks, prefill_chunk_size=10), expected)
    assert [held(chunks, i, r) for i in range(3) for r in range(2)] == [
        held(whole, i, r) for i in range(3) for r in range(2)
    ]
    with pytest.raises(PolicyError, match="received kvzip"):
        KeepCache(model, "kvzip", entries=10, prompt_tokens=47, cut_chunks=True)


def test_later_cuts_repeat_everything_that_was_seen() -> None:
    """What earlier cuts have left is judged again, with the tokens of old and new texts."""
    model = tiny_model("llama")
    policy, seen = spy(second_passes=frozenset({SecondPass(chunk=20)}))
    cache = KeepCache(model, policy, entries=12)
    fed: list[list[int]] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    pair = LockStep(model, cache)
    ids = text(1, 60)
    for start, end, cut in ((0, 30, True), (30, 40, False), (40, 60, True)):
        cache.cut_next(cut)
        pair.feed(ids[:, start:end])
    hook.remove()
    words = ids[0].tolist()
    repeated = [tokens for tokens in fed if tokens not in (words[:30], words[30:40], words[40:])]
    assert repeated == [words[:20], words[12:30], words[:20], words[12:40], words[32:60]]
    last = seen[-1]
    assert last.valid.sum(-1).tolist() == [[42, 42]]
    assert bool((last.second_passes[SecondPass(chunk=20)][last.valid] > 0).all())


def test_all_layers_of_a_mixed_table_wait_for_the_repetition() -> None:
    model = tiny_model("llama")
    ids = text(1, 60)
    mixed = KeepCache(model, {0: "full", 1: "snapkv[window=6]", "*": "kvzip"}, compression_ratio=0.5)
    pair = LockStep(model, mixed)
    pair.feed(ids)
    pair.feed(text(1, 4, seed=1))
    expected = observed(model, ids, SecondPass())[SecondPass()][2][0]
    expected[:, :4] = torch.inf
    kept = [
        row.topk(len(cell) - 4).indices.sort().values.tolist()
        for row, cell in zip(expected, held(mixed, 2), strict=True)
    ]
    assert [cell[:-4] for cell in held(mixed, 2)] == kept


# --- what it takes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["kvzip", "kvzip-plus", "kvzip[chunk=60]+ada"])
@pytest.mark.parametrize("length", [5, 150])
def test_the_peak_is_counted_and_planned(architecture: str, policy: str, length: int) -> None:
    model = tiny_model(architecture, torch.float32)
    for prompt in (None, PROMPT):
        cache = KeepCache(model, policy, compression_ratio=0.5, repeat_prompt=prompt)
        feed(model, cache, text(1, length))
        planned = plan_cache(model, parse_policy(policy), Budget(compression_ratio=0.5), length, prompt)
        assert cache.ledger.peak_bytes == planned.peak_bytes
        assert cache.ledger.held_bytes == planned.held_bytes
        entry = 2 * 16 * 4
        layers = len(cache.keep_layers)
        repeated = min(length, parse_policy(policy).scorer.chunk)  # type: ignore[union-attr]
        assert cache.ledger.peak_bytes > layers * 2 * length * entry + 2 * (length + repeated) * entry


def test_its_time_is_part_of_the_eviction() -> None:
    model = tiny_model("llama", torch.float32)
    cache = KeepCache(model, "kvzip", compression_ratio=0.5)
    feed(model, cache, text(1, 100))
    assert cache.evict_seconds > cache.second_pass_seconds[SecondPass()] > 0


def test_nothing_is_left_alive() -> None:
    model = tiny_model("llama", torch.float32)
    KeepCache(model, "kvzip-plus", compression_ratio=0.9)

    def alive() -> dict[int, int]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}

    before = alive()
    cache = KeepCache(model, "kvzip-plus", compression_ratio=0.9)
    feed(model, cache, text(2, 200))
    new = sum(size for pointer, size in alive().items() if pointer not in before)
    tokens = 2 * 200 * 4
    assert new <= cache.ledger.held_bytes + tokens + 1024


def test_one_shared_prefill_serves_it() -> None:
    model = tiny_model("gemma3")
    ids = text(1, 60)[0].tolist()
    names = ["full", "kvzip", "kvzip-plus", "kvzip[chunk=16]+threshold[floor=4]", "snapkv[window=6]"]
    runs = 0
    shared = SharedPrompt(model, ids, names, repeat_prompt=PROMPT)

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    hook = model.get_decoder().register_forward_hook(count)
    cuts = {name: shared.cut(name, Budget(entries=20)) for name in names[1:]}
    assert runs == 0
    hook.remove()
    for name, ours in cuts.items():
        alone = KeepCache(model, name, entries=20, repeat_prompt=PROMPT)
        feed(model, alone, torch.tensor([ids]))
        assert [held(ours, i) for i in range(len(ours.keep_layers))] == [
            held(alone, i) for i in range(len(alone.keep_layers))
        ]
        assert ours.ledger.to_dict() == alone.ledger.to_dict() or "threshold" in name
        for cache in (ours, alone):
            cache.cut_next()
        again = [feed(model, cache, text(1, 9, seed=1)) for cache in (ours, alone)]
        torch.testing.assert_close(*again, rtol=0, atol=1e-10)
        assert held(ours) == held(alone)
    assert cuts["kvzip"].evict_seconds > 0
    with pytest.raises(PolicyError, match="a policy that was announced"):
        shared.cut("kvzip[chunk=17]", Budget(entries=20))


# --- what it asks for -------------------------------------------------------------------------------------------------


def test_embeddings_cannot_be_repeated() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "kvzip", compression_ratio=0.5)
    embedded = model.get_input_embeddings()(text(1, 20))
    with pytest.raises(UnsupportedError, match=r"expected input_ids.*received inputs_embeds"), torch.no_grad():
        model(inputs_embeds=embedded, **{CACHE_ARGUMENT: cache})
    assert not cache.is_broken
    assert cache.get_seq_length() == 0
    feed(model, cache, text(1, 20))
    other = KeepCache(model, "snapkv[window=4]", compression_ratio=0.5)
    with torch.no_grad():
        model(inputs_embeds=embedded, **{CACHE_ARGUMENT: other})


def test_tokens_follow_the_cache_wherever_it_goes() -> None:
    """Beams, forks, rewinds, crops and files: a later cut repeats the tokens of just what is held."""
    model = tiny_model("llama")
    first, other, last = text(2, 30), text(2, 6, seed=1), text(2, 8, seed=2)

    def new() -> KeepCache:
        return KeepCache(model, "kvzip", entries=10, repeat_prompt=PROMPT)

    def finish(cache: KeepCache, rows: Tensor) -> list[Any]:
        cache.cut_next()
        feed(model, cache, rows)
        return [held(cache, layer, row) for layer in range(3) for row in range(len(cache.lengths))]

    straight = new()
    feed(model, straight, first)
    expected = finish(straight, last)
    rewound, cropped, forked, turned = new(), new(), new(), new()
    for cache in (rewound, cropped, forked, turned):
        feed(model, cache, first)
    feed(model, rewound, other)
    rewound.rewind()
    feed(model, cropped, other)
    cropped.crop(-6)
    fork = forked.fork()
    feed(model, forked, other)
    for cache in (rewound, cropped, fork):
        assert finish(cache, last) == expected
    turned.reorder_cache(torch.tensor([1, 0]))
    swapped = finish(turned, last.flip(0))
    assert swapped == [expected[layer * 2 + 1 - row] for layer in range(3) for row in range(2)]


def test_files_hold_the_tokens_and_the_request(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "kvzip", entries=10, repeat_prompt=PROMPT)
    feed(model, cache, text(1, 30))
    feed(model, cache, text(1, 3, seed=1))
    cache.save(tmp_path / "cache")
    loaded = KeepCache.load(tmp_path / "cache", model)
    assert loaded.repeat_prompt == PROMPT
    for each in (cache, loaded):
        each.cut_next()
        feed(model, each, text(1, 8, seed=2))
    assert [held(loaded, i) for i in range(3)] == [held(cache, i) for i in range(3)]


def test_rows_of_other_policies_remember_no_tokens() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "knorm", entries=10)
    feed(model, cache, text(1, 30))
    assert cache._seen.columns == 0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "frequencies do not change"),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            "repeated below 64 tokens",
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_frequencies_must_not_change_under_the_keys(rope: dict[str, Any], message: str) -> None:
    architecture = "phi3" if rope["rope_type"] == "longrope" else "llama"
    model = tiny_model(architecture, rope_parameters=rope, original_max_position_embeddings=64)
    with pytest.raises(UnsupportedError, match=message):
        feed(model, KeepCache(model, "kvzip", compression_ratio=0.5), text(1, 40))
    if architecture == "phi3":
        feed(model, KeepCache(model, "kvzip", compression_ratio=0.5), text(1, 30))


# --- sessions ---------------------------------------------------------------------------------------------------------

STORY = "Mira parked the red bicycle behind the bakery on Elm Street, next to the blue van. "


def test_a_session_asks_for_the_repetition_in_words() -> None:
    model, tokenizer = fake_model()
    fed: list[str] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tokenizer.decode(kwargs["input_ids"][0])), with_kwargs=True
    )
    session = Session(model, tokenizer, "kvzip[chunk=60]+ada", entries=24)
    session.ingest(STORY)
    hook.remove()
    header = tokenizer.decode(tokenizer(session.texts.header)["input_ids"])
    whole = header + STORY
    footer = session.texts.footer
    end = len(header) + 60 - session.header_tokens  # one token is one letter, but for those of the template
    further = f"\n\nRepeat the part of the previous context exactly, starting with{whole[end - 8 : end]}"
    assert fed == [
        whole,
        f"\n\nRepeat the previous context exactly.{footer}{whole[:end]}",
        f"{further}{footer}{whole[end:]}",
    ]


def test_a_session_goes_on_over_turns_and_files(tmp_path: Path) -> None:
    model, tokenizer = fake_model(dtype=torch.float64)
    session = Session(model, tokenizer, "kvzip+threshold[floor=8]", entries=24)
    session.ingest(STORY)
    session.ask("Where?", max_new_tokens=6)
    session.save(tmp_path / "talk")
    other = Session.load(tmp_path / "talk", model, tokenizer)
    for each in (session, other):
        each.ingest("Then she went home. ")
        assert each.cache.ledger.entries == 24 * each.cache.keep_layers[0].store.kv_heads * 2
        assert each.cache.ledger.uncut_entries == 0
    assert [held(other.cache, i) for i in range(2)] == [held(session.cache, i) for i in range(2)]
    answers = {each.ask("And then?", max_new_tokens=6, keep=False).text for each in (session, other)}
    assert len(answers) == 1
    session.rewind()
    session.reset()
    session.ingest(STORY, question="Where is it?")
    session.answer(max_new_tokens=4)


def test_an_interrupted_repetition_leaves_a_cache_that_says_so() -> None:
    model = tiny_model("llama")
    cache = KeepCache(model, "kvzip", compression_ratio=0.5)
    calls = 0

    def stop(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    hook = model.get_decoder().layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        feed(model, cache, text(1, 40))
    hook.remove()
    assert cache.is_broken
    with pytest.raises(CacheStateError, match=r"reset\(\)"):
        feed(model, cache, text(1, 1))
    cache.reset()
    fresh = KeepCache(model, "kvzip", compression_ratio=0.5)
    for each in (cache, fresh):
        feed(model, each, text(1, 40))
    assert held(cache) == held(fresh)
