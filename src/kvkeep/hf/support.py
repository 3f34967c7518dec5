"""What kvkeep has checked: an allow-list of models, and what it needs to know of them. All else is refused by name."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvkeep.budget import LayerShape
from kvkeep.errors import UnsupportedError
from kvkeep.observation import Rotary

# Decoder classes whose attention reaches the attention function with nothing but q, k, v and a scale.
DECODERS = (
    "LlamaModel",
    "Qwen2Model",
    "Qwen3Model",
    "MistralModel",
    "Phi3Model",
    "Olmo2Model",
    "Gemma3TextModel",
)

# What generate and forward call the cache: `past_key_values` up to transformers 5.23, `cache` since.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

_REASONS = {
    "kv_lora_rank": "its latent attention (MLA) keeps no key and value per head",
    "attn_logit_softcapping": "its attention scores are soft-capped",
    "state_size": "it keeps a recurrent state instead of keys and values",
    "is_encoder_decoder": "it has cross-attention",
}


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself.

    Raises:
        UnsupportedError: neither.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedError(
            expected="a transformers model (PreTrainedModel), or one that PEFT wraps",
            received=f"{type(model).__name__}",
            remedy="load one with kvkeep.load_model or AutoModelForCausalLM.from_pretrained",
        )
    return inner


def supported_decoder(model: PreTrainedModel) -> nn.Module:
    """The decoder of a supported model.

    Raises:
        UnsupportedError: an architecture that is not on the list, with the reason where it is known.
    """
    config = model.config.get_text_config(decoder=True)
    decoder: nn.Module = model.get_decoder()
    name = type(decoder).__name__
    reasons = [text for key, text in _REASONS.items() if getattr(config, key, None)]
    if name not in DECODERS or reasons:
        reason = f" ({reasons[0]})" if reasons else ""
        raise UnsupportedError(
            expected=f"a model that kvkeep has checked: {', '.join(n.removesuffix('Model') for n in DECODERS)}",
            received=f"{type(model).__name__} with decoder {name}{reason}",
            remedy="use one of these, or open an issue with the model's name",
        )
    return decoder


@dataclass(frozen=True)
class LayerPlan:
    """One layer of the model.

    Attributes:
        index: in the model.
        window: of a sliding layer, which is not evicted; None for full attention.
        shape: what an entry costs.
    """

    index: int
    window: int | None
    shape: LayerShape

    def window_bytes(self, length: int) -> int:
        """Bytes that a sliding layer holds of a row of `length` tokens; 0 for full attention."""
        if self.window is None:
            return 0
        return self.shape.kv_heads * self.shape.entry_bytes * min(self.window - 1, length)


def plan_layers(model: PreTrainedModel) -> list[LayerPlan]:
    """The layers of a supported model, in order.

    Raises:
        UnsupportedError: a layer that is neither full nor sliding attention.
    """
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = LayerShape(kv_heads=kv_heads, entry_bytes=2 * size * model.dtype.itemsize)
    plans = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            plans.append(LayerPlan(index, None, shape))
        elif type(layer) is DynamicSlidingWindowLayer:
            plans.append(LayerPlan(index, int(layer.sliding_window), shape))
        else:
            raise UnsupportedError(
                expected="layers of full or sliding-window attention",
                received=f"{type(layer).__name__} as layer {index} of {type(model).__name__}",
                remedy="models with linear, chunked or compressed attention layers are not supported",
            )
    return plans


def plan_model(model: Any) -> list[LayerPlan]:
    """The layers of a model that kvkeep supports, at least one of which can be evicted.

    Raises:
        UnsupportedError: an unknown model, or one whose layers all keep a window of their own.
    """
    inner = unwrap(model)
    supported_decoder(inner)
    plans = plan_layers(inner)
    if all(plan.window is not None for plan in plans):
        raise UnsupportedError(
            expected="a model with at least one layer of full attention",
            received=f"{type(inner).__name__}, whose layers all keep a window of {plans[0].window}",
            remedy="there is nothing to evict; use a DynamicCache",
        )
    return plans


def rope_types(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """The parameters of each kind of rotary embedding in the model, by `rope_type`."""
    given = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [kind for kind in given.values() if isinstance(kind, dict)] or [given]  # Gemma 3 has one by layer type
    return {str(kind.get("rope_type", "default")): kind for kind in kinds}


def check_rotary(model: PreTrainedModel) -> None:
    """Refuse a model whose rotations a policy cannot undo.

    Raises:
        UnsupportedError: the frequencies grow with the text, so that nothing tells those of an earlier piece.
    """
    if "dynamic" in rope_types(model):
        raise UnsupportedError(
            expected="rotary positions whose frequencies do not change as the text grows",
            received=f"rope_type 'dynamic' in {type(model).__name__}",
            remedy="choose a policy that does not undo rotations, such as snapkv",
        )


def rope_switch(model: PreTrainedModel) -> int | None:
    """The length at which the model changes all its rotary frequencies, those of cached keys too; None for most."""
    longrope = rope_types(model).get("longrope")
    return None if longrope is None else int(longrope["original_max_position_embeddings"])


def rotary_of(decoder: nn.Module, attention: nn.Module) -> Rotary:
    """The rotary embedding that `attention` applies to its queries and keys, from the model's own modules."""
    embedding: Any = decoder.rotary_emb
    # Below the decorators that choose frequencies by length: a policy that looks ahead must not switch the model's.
    forward = inspect.unwrap(type(embedding).forward)
    apply_both = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    layer_type = getattr(attention, "layer_type", None)
    extra = {"layer_type": layer_type} if isinstance(getattr(embedding, "layer_types", None), list) else {}

    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        # The tensor only tells the embedding which type and device to answer in; rotations are undone in float32.
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        with torch.no_grad():
            cos, sin = forward(embedding, like, positions, **extra)
        return cos, sin

    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, _ = apply_both(x, x, cos, sin)
        result: Tensor = rotated
        return result

    return Rotary(cos_sin, apply)


def output_weight_of(attention: Any, heads: int) -> Tensor:
    """The output projection of an attention module by query head, `[H, hidden, D]`."""
    weight: Tensor = attention.o_proj.weight  # [hidden, H * D]
    return weight.detach().view(weight.shape[0], heads, -1).transpose(0, 1)
