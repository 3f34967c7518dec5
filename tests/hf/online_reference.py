"""A model under an online policy, computed from the definition: whole texts, no cache, one query after the other.

The model runs once over the text with an attention function of its own, which decides query by query what each KV head
holds, with lists and loops. Nothing of kvkeep takes part. Beside it, how the tests read a text through a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvkeep import KeepCache
from kvkeep.hf.support import CACHE_ARGUMENT

_NAME = "online_reference"

CAP, LENGTH = 12, 37  # of the cells and the texts of the tests
NAMES = ["online-streaming-llm", "online-tova", "online-h2o", "online-random"]


Held = dict[int, list[list[list[int]]]]  # layer -> [query][head] -> positions


@dataclass
class Rule:
    """A policy as a table and numbers.

    Attributes:
        sinks: that stay.
        window: that stays.
        slots: beside them.
        priority: of a token, by layer, KV head and position; None where attention decides.
        watch: the new priority of an entry, from the old one and the attention of one query to it.
        shared: whether all heads of a layer use the mean of their attention.
    """

    sinks: int
    window: int
    slots: int
    priority: Callable[[int, int, int], float] | None = None
    watch: Callable[[float, float], float] | None = None
    shared: bool = False


# Of a cap of 12.
STREAMING = Rule(4, 3, 5, priority=lambda layer, head, t: float(t))
TOVA = Rule(0, 1, 11, watch=lambda old, new: new, shared=True)
H2O = Rule(0, 6, 6, watch=lambda old, new: old + new)


@dataclass
class _Running:
    rule: Rule
    held: Held


_now: list[_Running] = []


def _simulate(run: _Running, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """`[H, S, D]` from `[H, S, D]` and `[H_kv, S, D]`."""
    rule, (heads, length, _), kv_heads = run.rule, query.shape, keys.shape[0]
    group = heads // kv_heads
    output = torch.zeros(heads, length, values.shape[2], dtype=query.dtype)
    rated: list[dict[int, float]] = [{} for _ in range(kv_heads)]
    held: list[list[int]] = [[] for _ in range(kv_heads)]
    run.held[layer] = []
    for q in range(length):
        rows = []
        for head in range(kv_heads):
            left = [t for t in held[head] if rule.sinks <= t <= q - rule.window]
            if len(left) > rule.slots:
                worst = min(left, key=lambda t: (rated[head].get(t, 0.0), -t))
                held[head].remove(worst)
            held[head].append(q)
            rated[head][q] = 0.0 if rule.priority is None else rule.priority(layer, head, q)
            mine = slice(head * group, (head + 1) * group)
            weights = (query[mine, q] @ keys[head, held[head]].T * scaling).softmax(-1)
            output[mine, q] = weights @ values[head, held[head]]
            rows.append(weights.mean(0))
        if rule.watch is not None:
            pooled = torch.stack(rows).mean(0) if rule.shared else None
            for head in range(kv_heads):
                for place, t in enumerate(held[head]):
                    new = float((rows[head] if pooled is None else pooled)[place])
                    rated[head][t] = rule.watch(rated[head][t], new)
        run.held[layer].append([list(positions) for positions in held])
    return output


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if getattr(module, "sliding_window", None):
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        visible = attention_mask
        if visible is None:
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        output = (query @ keys.transpose(2, 3) * scaling).masked_fill(~visible, -torch.inf).softmax(-1) @ values
    else:
        output = torch.stack(
            [
                _simulate(_now[-1], module.layer_idx, query[row], key[row], value[row], scaling)
                for row in range(len(query))
            ]
        )
    return output.transpose(1, 2).contiguous(), None


def online_reference(model: PreTrainedModel, ids: Tensor, rule: Rule) -> tuple[Tensor, Held]:
    """Logits `[1, S, V]` of a text `[1, S]`, and what each head of each layer holds at every query."""
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    config = model.config.get_text_config(decoder=True)
    former = config._attn_implementation
    model.set_attn_implementation(_NAME)
    _now.append(_Running(rule, {}))
    try:
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
    finally:
        run = _now.pop()
        model.set_attn_implementation(former)
    return logits, run.held


def text(rows: int = 1, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(model: Any, cache: KeepCache, ids: Tensor, sizes: Sequence[int] = (), mask: Tensor | None = None) -> Tensor:
    """Logits of a text that comes in pieces of these sizes."""
    logits, before = [], cache.get_seq_length()
    at = 0
    for size in sizes or [ids.shape[1]]:
        seen = None if mask is None else mask[:, : before + at + size]
        positions = None if seen is None else (seen.long().cumsum(1) - 1).clamp(min=0)[:, -size:]
        with torch.no_grad():
            piece = ids[:, at : at + size]
            out = model(piece, attention_mask=seen, position_ids=positions, **{CACHE_ARGUMENT: cache})
        logits.append(out.logits)
        assert held_at_most(cache, CAP)
        at += size
    assert at == ids.shape[1]
    return torch.cat(logits, dim=1)


def held_at_most(cache: KeepCache, cap: int) -> bool:
    counts = [count for layer in cache.ledger.entries_per_cell for row in layer for count in row]
    return bool(counts) and max(counts) <= cap
