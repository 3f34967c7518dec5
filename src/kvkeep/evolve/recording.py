"""One prefill of a sample with the full cache, and everything of it that a search needs later.

Tensors, for evictable layer `i` (in order) and sliding layer `j`:

    layers.i.keys, layers.i.values   [1, H_kv, L, D]   of the text
    layers.i.queries                 [1, H, Q, D]      the last of the text
    layers.i.answering               [1, H, q, D]      of the tokens after it, which no feature has seen
    contexts.i.<name>                                  what programs see; see `context`
    windows.j.keys, windows.j.values [1, H_kv, w, D]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.evolve.context import FEATURES, QUERIES, contexts_of
from kvkeep.evolve.samples import Asked, Facts
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.recorder import Recorder
from kvkeep.hf.support import CACHE_ARGUMENT, plan_model
from kvkeep.observation import Needs
from kvkeep.tasks.protocols import Sample

NEEDS = Needs(queries=QUERIES, rotary=True)  # of the features
ANSWERING = 16  # queries after the text that are kept, the last ones


def recorded_bytes(model: Any, length: int) -> int:
    """About what a recorded sample takes on disk: keys, values and features; queries are few.

    Args:
        model: a supported model.
        length: tokens of the text.
    """
    config = model.config.get_text_config(decoder=True)
    queries = QUERIES + ANSWERING
    total = 0
    for plan in plan_model(model):
        if plan.window is not None:
            total += plan.window_bytes(length)
            continue
        entry = plan.shape.kv_heads * plan.shape.entry_bytes
        group = config.num_attention_heads // plan.shape.kv_heads
        total += length * (entry + 4 * len(FEATURES)) + queries * group * entry // 2
    return total


@torch.no_grad()
def record(model: Any, sample: Sample, asked: Asked, protocol: str) -> tuple[Facts, dict[str, Tensor]]:
    """Run a text and what follows it through the model, with the full cache.

    Args:
        model: a supported model.
        sample: where the tokens come from.
        asked: the tokens.
        protocol: of the sample.

    Returns:
        What is known of it, and its tensors on the CPU.
    """
    recorder = Recorder(NEEDS, keeps=True)
    follow = [*asked.prompt, *asked.reference[:-1]]
    whole = len(asked.ids) + len(follow)
    cache = KeepCache(model, recorder, entries=whole, question=asked.question)
    model(input_ids=_row(model, asked.ids), use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    text = list(recorder.observations)
    windows = [layer.snapshot() for layer in cache.sliding_layers]
    recorder.observations.clear()
    cache.cut_next()  # nothing goes: it shows the recorder the queries of what follows
    count = len(asked.reference)
    logits: Tensor = model(
        input_ids=_row(model, follow), use_cache=True, logits_to_keep=count, **{CACHE_ARGUMENT: cache}
    ).logits[0]
    told = torch.tensor(asked.reference, device=logits.device)[:, None]
    full = logits.float().log_softmax(-1).gather(1, told)[:, 0]
    tensors: dict[str, Tensor] = {}
    for ordinal, (observation, after) in enumerate(zip(text, recorder.observations, strict=True)):
        parts = {"keys": observation.keys, "values": observation.values, "queries": observation.queries}
        parts["answering"] = after.queries[:, :, -ANSWERING:]
        tensors |= {f"layers.{ordinal}.{name}": _plain(tensor) for name, tensor in parts.items()}
        (context,) = contexts_of(observation)
        arrays = context.to_arrays()
        tensors |= {f"contexts.{ordinal}.{name}": torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    for index, (keys, values, _) in enumerate(windows):
        if keys is None or values is None:
            raise RuntimeError("a sliding layer that has seen nothing")
        tensors |= {f"windows.{index}.keys": _plain(keys), f"windows.{index}.values": _plain(values)}
    turn = sample.turns[0]
    facts = Facts(
        sample=sample.key,
        task=sample.task,
        length=len(asked.ids),
        asked_length=sample.length,
        prompt=asked.prompt,
        reference=asked.reference,
        question=asked.question,
        protocol=protocol,
        references=tuple(turn.references),
        metric=turn.metric,
        max_new_tokens=turn.max_new_tokens,
        layers=tuple(observation.layer for observation in text),
        scaling=tuple(observation.scaling for observation in text),
        windows_seen=tuple(seen for _, _, seen in windows),
        full=tuple(full.tolist()),
    )
    return facts, tensors


def _row(model: Any, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.long, device=model.device)


def _plain(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own: a view would keep the whole layer alive, and safetensors refuses it."""
    return tensor.detach().to("cpu", copy=True).contiguous()
