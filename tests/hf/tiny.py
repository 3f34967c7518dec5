"""Tiny random models of every supported architecture, built from their configs."""

from __future__ import annotations

import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers import AutoModelForCausalLM

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS = {
    "llama": lambda **k: LlamaConfig(**_COMMON, **k),
    "qwen2": lambda **k: Qwen2Config(**_COMMON, **k),
    "qwen3": lambda **k: Qwen3Config(**_COMMON, head_dim=16, **k),
    "mistral": lambda **k: MistralConfig(**_COMMON, sliding_window=None, **k),
    "phi3": lambda **k: Phi3Config(**_COMMON, **k),
    "olmo2": lambda **k: Olmo2Config(**_COMMON, **k),
    "gemma3": lambda **k: Gemma3TextConfig(
        **_COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **k,
    ),
}


def tiny_model(architecture: str, dtype: torch.dtype = torch.float64, seed: int = 0, **config: object) -> PreTrainedModel:
    """A model with random weights, large enough to make attention uneven."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](**config), attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(5)  # transformers' initialisation leaves attention flat and eviction without effect
    return model.to(dtype).eval()
