"""The tiny models of these tests: three layers in float64, so that a difference of 1e-10 shows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from kvkeep.testing import fake_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3")


def tiny_model(architecture: str, dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random model of an architecture; `config` changes its configuration."""
    return fake_model(architecture, dtype=dtype, seed=seed, layers=3, **config)[0]
