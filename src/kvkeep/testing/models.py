"""Tiny random models of every supported architecture, with a tokenizer; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from kvkeep.errors import UnsupportedError, near_names

# Architecture: its classes in transformers, and what its configuration needs beside sizes.
_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"use_sliding_window": False}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 16}),
}

_SPECIAL = ("<pad>", "<s>", "</s>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def fake_model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 16,
    **config: Any,
) -> tuple[Any, Any]:
    """A tiny model with random weights, ready to generate, and a byte-level tokenizer; made in memory in milliseconds.

        model, tokenizer = fake_model("qwen3")
        cache = KeepCache(model, "snapkv", compression_ratio=0.5)

    It writes nonsense, but everything works as with a real model. Weights are wide enough for attention to be peaked,
    come from `seed` alone (not from a version of transformers), and take no gradients. The global generator is left
    alone.

    Args:
        architecture: llama, qwen2, qwen3, mistral, phi3, olmo2 or gemma3 (text). Gemma's layers take turns: a sliding
            window of 16, then full attention.
        seed: of the weights.
        dtype: of the weights.
        layers: how many; at least two for gemma3, which would have no full attention else.
        heads: query heads.
        kv_heads: KV heads, a divisor of `heads`.
        head_size: of a head; the hidden size is `heads * head_size`.
        config: anything else of the architecture's configuration (`rope_parameters`, `sliding_window`, ...).

    Returns:
        A `transformers.PreTrainedModel` and a `transformers.PreTrainedTokenizerFast`: one token a byte, and `<pad>`,
        `<s>`, `</s>` (0, 1, 2). Texts get no special tokens; the chat template puts `<s>` and `</s>` around messages.

    Raises:
        UnsupportedError: an unknown architecture.
    """
    if architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            expected="an architecture that kvkeep supports",
            received=f"{architecture!r}",
            remedy=near_names(architecture, _ARCHITECTURES),
        )
    import transformers

    config_name, model_name, extra = _ARCHITECTURES[architecture]
    tokenizer = _tokenizer()
    if architecture == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        extra = {**extra, "layer_types": [kinds[i % 2] for i in range(layers)], "query_pre_attn_scalar": head_size}
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": heads * head_size,
        "intermediate_size": 2 * heads * head_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "attn_implementation": "sdpa",
    }
    made = getattr(transformers, config_name)(**(settings | extra | config))
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, model_name)(made)
    _fill(model, seed, offset=0.0 if architecture == "gemma3" else 1.0)
    return model.to(dtype).eval().requires_grad_(False), tokenizer


def _fill(model: Any, seed: int, offset: float) -> None:
    """Random weights in the order of their names; norms are near one (Gemma adds that one itself)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(offset + 0.1 * noise if "norm" in name else 0.16 * noise)


def _tokenizer() -> Any:
    """Bytes as tokens, from the alphabet that byte-level tokenizers share."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
