"""Low-rank adapters by peft, for those who have it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from kvkeep.learn.config import LearnError


def adapted(model: Any, rank: int, seed: int) -> Any:
    """A model with new adapters at all linear layers but the head; only they can be trained.

    Hu et al. 2021 (arXiv 2106.09685). Scaled by 2, which is peft's usual.

    Args:
        model: of transformers.
        rank: of the adapters.
        seed: of their initial values.

    Raises:
        LearnError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise LearnError(
            expected="the package that adapters are made with",
            received=str(error),
            remedy='pip install "kvkeep[finetune]", or train all weights: leave the rank out',
        ) from None
    how = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by names that are being replaced
        torch.manual_seed(seed)
        return get_peft_model(model, how)


def merged(model: Any) -> Any:
    """The transformers model with its adapters added to the weights; the adapters are gone."""
    return model.merge_and_unload()
