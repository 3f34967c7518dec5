"""Models: what is supported is exact, with all its oddities; what is not is refused by name before any forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep import KeepCache, UnsupportedError

from ..hf.tiny import ARCHITECTURES, tiny_model
from .common import SHAPES, LockStep, feed, generate, left_padded, spy, text

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ROPES = {
    "default": ("llama", {}),
    "biased": ("qwen2", {}),
    "normed keys": ("qwen3", {}),
    "two thetas": ("gemma3", {}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "partial": ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    "partial longrope": (
        "phi3",
        {
            "rope_type": "longrope",
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 64,
        },
    ),
}


def roped(name: str) -> PreTrainedModel:
    """A tiny model with this kind of rotary positions."""
    architecture, parameters = ROPES[name]
    options: dict[str, Any] = {"rope_parameters": {"rope_theta": 10_000.0} | parameters} if parameters else {}
    if parameters.get("rope_type") == "longrope":
        options["original_max_position_embeddings"] = 64
    return tiny_model(architecture, **options)


@pytest.fixture
def before_rotation(monkeypatch: pytest.MonkeyPatch) -> Callable[[PreTrainedModel], list[tuple[Tensor, Tensor]]]:
    """Records queries and keys as the model's layers hand them to the rotation."""

    def record(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
        module = sys.modules[type(model.get_decoder()).__module__]
        rotate, seen = module.apply_rotary_pos_emb, []

        def recording(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            seen.append((query, key))
            return rotate(query, key, *args, **kwargs)

        monkeypatch.setattr(module, "apply_rotary_pos_emb", recording)
        return seen

    return record


@pytest.mark.parametrize("name", ROPES)
def test_p62_rotations_are_undone_as_the_model_made_them(name: str, before_rotation) -> None:
    """Elsewhere: partial, scaled or interleaved rotary positions are undone wrongly. Right: back to the unrotated."""
    model = roped(name)
    recorded = before_rotation(model)
    policy, observations = spy(queries=None, rotary=True)
    feed(model, KeepCache(model, policy, compression_ratio=0.5), text(2, 40))
    unrotated = recorded[: model.config.num_hidden_layers]
    assert len(observations) >= 1
    for seen in observations:
        query, key = unrotated[seen.layer]
        for rotated, positions, expected in (
            (seen.keys, seen.positions[:, 0], key),
            (seen.queries, seen.query_positions, query),
        ):
            back = seen.rotary.unrotate(rotated, positions)
            torch.testing.assert_close(back, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(seen.rotary.rotate(back, positions), rotated, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ROPES)
def test_p62_recomputed_attention_is_the_models_own(name: str) -> None:
    """Elsewhere: recomputed attention has another scale or rotation than the model. Right: its own eager attention."""
    model = roped(name)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(text(2, 40), output_attentions=True, use_cache=False).attentions
    policy, observations = spy(queries=None)
    feed(model, KeepCache(model, policy, compression_ratio=0.5), text(2, 40))
    for seen in observations:
        expected = attentions[seen.layer].unflatten(1, (-1, seen.group)).mean(2).float()  # [B, H_kv, L, L]
        torch.testing.assert_close(seen.attention_rows(40), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(seen.accumulated_attention(), expected.sum(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ROPES)
def test_p62_eviction_is_exact_for_every_kind_of_rotation(name: str) -> None:
    """Elsewhere: positions are applied anew by a formula that this model does not use. Right: keys stay as they are."""
    model = roped(name)
    pair = LockStep(model, KeepCache(model, "expected-attention+ada", compression_ratio=0.5))
    pair.feed(text(2, 40))
    pair.feed(text(2, 5, seed=1))
    pair.feed(text(2, 1, seed=2))


def test_p62_a_policy_that_looks_ahead_does_not_switch_the_models_frequencies() -> None:
    """Elsewhere: asking the model's rotary embedding for later positions changes it. Right: it stays as it was."""
    model = roped("partial longrope")
    policy, observations = spy(queries=None, rotary=True)
    pair = LockStep(model, KeepCache(model, policy, compression_ratio=0.5))
    pair.feed(text(1, 40))
    before = model.model.rotary_emb.inv_freq.clone()
    observations[0].rotary.mean_rotation(torch.arange(40, 600), 16)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_p62_rotations_that_change_as_the_text_grows_cannot_be_undone() -> None:
    """Elsewhere: earlier keys are unrotated by later frequencies. Right: refused by name; other policies are served."""
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0})
    with pytest.raises(UnsupportedError, match="received rope_type 'dynamic' in LlamaForCausalLM"):
        KeepCache(model, "expected-attention", compression_ratio=0.5)
    assert model.config._attn_implementation == "sdpa"
    pair = LockStep(model, KeepCache(model, "snapkv[window=6]", compression_ratio=0.5))
    pair.feed(text(1, 500))
    pair.feed(text(1, 30))


@pytest.mark.parametrize("pieces", [(60, 4), (60, 8), (64,), (30, 34), (30, 50)])
def test_p62_a_text_that_crosses_the_switch_of_longrope_is_refused(pieces: tuple[int, ...]) -> None:
    """Elsewhere: at this length Phi-3 changes all frequencies, and `generate` drops the cache without a word: the rest
    runs on a full cache. Right: refused, with the length."""
    model = roped("partial longrope")
    pair = LockStep(model, KeepCache(model, "knorm", compression_ratio=0.5))
    for piece in pieces[:-1]:
        pair.feed(text(1, piece))
    with pytest.raises(UnsupportedError, match=r"fewer than 64 tokens, answer included.*longrope"):
        feed(model, pair.cache, text(1, pieces[-1]))
    pair.feed(text(1, 2))


def test_p62_generate_reaches_the_switch_of_longrope_with_an_error_not_without_a_cache() -> None:
    """The same in `generate`; a prompt beyond the switch is served, whole."""
    model = roped("partial longrope")
    with pytest.raises(UnsupportedError, match="fewer than 64 tokens"):
        generate(model, text(1, 56), KeepCache(model, "knorm", compression_ratio=0.5), 20)
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    generate(model, text(1, 66), cache, 20)
    assert cache.get_seq_length() == 85
    pair = LockStep(model, KeepCache(model, "knorm", compression_ratio=0.5))
    pair.feed(text(1, 66))
    pair.feed(text(1, 5))


def unsupported() -> dict[str, tuple[type[PreTrainedModel], Any, str]]:
    """Class, configuration, and what the refusal must say."""
    few = {name: SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return {
        "GPT2LMHeadModel": (transformers.GPT2Config(**few, n_embd=64, n_layer=2, n_head=4), "GPT2Model"),
        "Gemma2ForCausalLM": (transformers.Gemma2Config(**SIZES, head_dim=16), "soft-capped"),
        "DeepseekV3ForCausalLM": (
            transformers.DeepseekV3Config(
                **SIZES | {"num_key_value_heads": 4} | experts,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=16,
                n_routed_experts=4,
                n_group=1,
                topk_group=1,
            ),
            "latent attention",
        ),
        "GptOssForCausalLM": (
            transformers.GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
            "GptOssModel",
        ),
        "MambaForCausalLM": (
            transformers.MambaConfig(**few, hidden_size=32, state_size=4, num_hidden_layers=2),
            "recurrent state",
        ),
        "Lfm2ForCausalLM": (transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "Lfm2Model"),
        "Qwen3NextForCausalLM": (
            transformers.Qwen3NextConfig(
                **SIZES | experts,
                head_dim=16,
                num_experts=4,
                shared_expert_intermediate_size=32,
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
            ),
            "Qwen3NextModel",
        ),
        "GlmForCausalLM": (transformers.GlmConfig(**SIZES, head_dim=16), "GlmModel"),
        "CohereForCausalLM": (transformers.CohereConfig(**SIZES), "CohereModel"),
        "T5ForConditionalGeneration": (
            transformers.T5Config(**few, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4),
            "cross-attention",
        ),
    }


@pytest.mark.parametrize("name", unsupported())
def test_p56_p62_unsupported_models_are_refused_by_name(name: str) -> None:
    """Elsewhere: attribute errors deep inside, or wrong scores without a word. Right: one error that names the class,
    before the first forward, and a model that is as it was."""
    config, reason = unsupported()[name]
    model = getattr(transformers, name)(config).eval()
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=f"received {name} with decoder .*{reason}|received {name}.*{reason}"):
        KeepCache(model, "knorm", compression_ratio=0.5)
    assert model.config._attn_implementation == implementation
    assert not model.get_decoder()._forward_pre_hooks


def test_p56_a_layer_of_another_kind_is_refused_by_name() -> None:
    """Elsewhere: hybrid models die on their linear-attention layers. Right: the layer, its place and the model."""
    model = tiny_model("qwen2", layer_types=["full_attention", "linear_attention", "full_attention"])
    with pytest.raises(UnsupportedError, match="received LinearAttentionLayer as layer 1 of Qwen2ForCausalLM"):
        KeepCache(model, "knorm", compression_ratio=0.5)


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "llama", None], ids=str)
def test_p56_things_that_are_no_models_are_refused(thing: object) -> None:
    """Elsewhere: attribute errors. Right: the type that came, and what would have been right."""
    with pytest.raises(UnsupportedError, match=f"a transformers model .*received {type(thing).__name__}"):
        KeepCache(thing, "knorm", compression_ratio=0.5)


class Wrapper(nn.Module):
    """What PEFT puts around a model, as far as it matters here: another class, and the way to the model inside."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> PreTrainedModel:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def test_p56_a_wrapped_model_is_served(llama: PreTrainedModel, tmp_path) -> None:
    """Elsewhere: attribute errors for PEFT models. Right: the same numbers through the wrapper (a stand-in here)."""
    wrapped = Wrapper(llama)
    cache = KeepCache(wrapped, "snapkv[window=6]+ada", compression_ratio=0.5)
    pair = LockStep(llama, KeepCache(llama, "snapkv[window=6]+ada", compression_ratio=0.5))
    for ids in (text(1, 40), text(1, 3)):
        assert torch.equal(feed(wrapped, cache, ids), pair.feed(ids))
    del wrapped
    cache.save(tmp_path / "cache")
    again = KeepCache.load(tmp_path / "cache", Wrapper(llama))
    assert torch.equal(feed(llama, again, text(1, 1)), pair.feed(text(1, 1)))


# peft asks transformers for a property under its former name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_p56_a_real_peft_model_is_served(llama: PreTrainedModel) -> None:
    """The same with the real thing, where it is installed."""
    peft = pytest.importorskip("peft")
    model = tiny_model("llama")
    adapter = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, adapter).double().eval()
    pair = LockStep(wrapped, KeepCache(wrapped, "snapkv[window=6]+ada", compression_ratio=0.5))
    pair.feed(text(1, 40))
    pair.feed(text(1, 3))


def test_p08_head_dim_may_be_missing_from_the_config() -> None:
    """Elsewhere: AttributeError for Qwen2's config without head_dim. Right: hidden size over heads, in bytes too."""
    model = tiny_model("qwen2")
    if hasattr(model.config, "head_dim"):
        del model.config.head_dim
    full = KeepCache(model, "full")
    feed(model, full, text(1, 40))
    budget = 3 * (
        2 * 10 * (2 * 16 * 8 + 4) + 12
    )  # layers, heads, entries, K and V of 16 doubles and a position, offsets
    cache = KeepCache(model, "knorm", bytes=budget)
    pair = LockStep(model, cache)
    pair.feed(text(1, 40))
    assert cache.ledger.held_bytes == budget
    assert cache.ledger.full_bytes == full.ledger.payload_bytes == 3 * 2 * 40 * 2 * 16 * 8
    pair.feed(text(1, 2))


def sliding(name: str) -> PreTrainedModel:
    """Models of which some layers keep a window of 16."""
    if name == "gemma3":
        return tiny_model("gemma3")
    return tiny_model(name, use_sliding_window=True, sliding_window=16, max_window_layers=1)


@pytest.mark.parametrize(
    ("name", "policy"), [*(("gemma3", policy) for policy in SHAPES), ("qwen2", "frc"), ("qwen3", "frc")]
)
def test_p53_sliding_layers_keep_their_own_window(name: str, policy: str) -> None:
    """Elsewhere: sliding layers are compressed too, or hold the whole text. Right: what transformers' own cache holds
    in them, in no more bytes; full layers are cut beside them, also in a padded batch."""
    model = sliding(name)
    rows, mask = left_padded([text(1, 50), text(1, 27, seed=1)])
    pair = LockStep(model, KeepCache(model, policy, compression_ratio=0.5))
    pair.feed(rows, mask)
    windows = [layer for layer in pair.full.layers if layer.is_sliding]
    for ours, theirs in zip(pair.cache.sliding_layers, windows, strict=True):
        assert ours.keys.shape[2] == 15
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=1e-10)
        assert ours.keys.untyped_storage().nbytes() == ours.keys.numel() * ours.keys.element_size()
    assert pair.cache.ledger.window_bytes == sum(2 * window.keys.numel() * 8 for window in windows)
    pair.feed(text(2, 3), torch.cat([mask, mask.new_ones(2, 3)], 1))
    assert {layer.keys.shape[2] for layer in pair.cache.sliding_layers} == {15}


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_p53_a_model_of_sliding_layers_only_has_nothing_to_evict(name: str) -> None:
    """Elsewhere: Mistral's and Phi-3's windows are ignored. Right: said so, with the window."""
    model = tiny_model(name, sliding_window=16)
    with pytest.raises(UnsupportedError, match="whose layers all keep a window of 16; there is nothing to evict"):
        KeepCache(model, "knorm", compression_ratio=0.5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_p68_eager_equals_sdpa(architecture: str) -> None:
    """Elsewhere: eager's mask has the wrong length after compression. Right: both give the same, in padded rows too."""
    model = tiny_model(architecture, torch.float32)  # transformers' own eager attention fails at padding in float64
    rows, mask = left_padded([text(1, 33), text(1, 20, seed=1)])
    tokens = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        cache = KeepCache(model, "snapkv[window=6]+ada", compression_ratio=0.5)
        tokens.append(generate(model, rows, cache, attention_mask=mask))
        assert model.config._attn_implementation == f"kvkeep_{implementation}"
    assert torch.equal(*tokens)


def test_p65_nothing_but_tokens_and_the_cache_is_needed(llama: PreTrainedModel) -> None:
    """Elsewhere: `cache_position`, which transformers no longer passes, told the state. Right: the cache knows it."""
    seen: list[set[str]] = []
    hook = llama.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
    )
    pair = LockStep(llama, KeepCache(llama, "snapkv[window=6]+ada", compression_ratio=0.5))
    for ids in (text(1, 40), text(1, 4), text(1, 1)):
        pair.feed(ids)
    hook.remove()
    assert len(seen) == 6
    assert not any("cache_position" in names for names in seen)
