"""What these tests share: texts, calls, two policies without opinions, and the lock step with dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvkeep import KeepCache, Needs, Observation, available_policies
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import Policy, Scorer, TopK, Uniform, parse_policy

from ..hf.dense_reference import _evicted, dense_with_evictions, positions_of

# Policies whose allocators and selectors differ: the same for all heads, per head, per layer, over the model, chunks.
SHAPES = ["snapkv[window=6]", "snapkv[window=6]+ada", "pyramidkv[window=6]", "snapkv[window=6]+threshold", "frc"]
# Policies that want a calibration of the model have tests of their own.
EVICTING = [name for name in available_policies() if name != "full" and not parse_policy(name).needs().statistics]


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids `[rows, length]`, none of them special."""
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def feed(model: PreTrainedModel, cache: Any, ids: Tensor, **arguments: Any) -> Tensor:
    """Logits of one forward with a cache."""
    with torch.no_grad():
        return model(ids, **{CACHE_ARGUMENT: cache}, **arguments).logits


def generate(model: PreTrainedModel, ids: Tensor, cache: Any = None, steps: int = 8, **options: Any) -> Any:
    """Greedy generation of exactly `steps` tokens unless the options say otherwise."""
    options = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(ids, **({} if cache is None else {CACHE_ARGUMENT: cache}), **options)


def held(cache: KeepCache, layer: int = 0, row: int = 0) -> list[list[int]]:
    """Positions that each head of one row holds."""
    index, heads = cache.keep_layers[layer].index, cache.keep_layers[layer].store.kv_heads
    return [cache.kept_positions(index, row, head).tolist() for head in range(heads)]


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows `[1, n]` of different length as one batch with padding on the left, and its mask."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    return ids, (ids > 0).long()


@contextmanager
def without_evicted(model: PreTrainedModel, cache: KeepCache, columns: int | None = None) -> Iterator[None]:
    """Within the block the model attends densely, but not to what `cache` has seen and no longer holds.

    Args:
        model: with a DynamicCache of its own.
        cache: its padding, if any, is on the left.
        columns: what came after so many columns is visible; default: all that was seen can be evicted.
    """
    seen = cache.get_seq_length() if columns is None else columns
    gone: dict[int, tuple[int, Tensor]] = {}
    for layer in cache.keep_layers if seen else ():
        hidden = torch.ones(layer.store.batch, layer.store.kv_heads, cache.get_seq_length(), dtype=torch.bool)
        for row, length in enumerate(cache._progress.lengths):
            for head in range(layer.store.kv_heads):
                hidden[row, head, layer.store.cell(row, head)[2] + (cache.get_seq_length() - length)] = False
        gone[layer.index] = (seen, hidden[..., :seen])
    with dense_with_evictions(model, None):
        _evicted.update(gone)
        yield


class LockStep:
    """A KeepCache beside dense attention with `-inf` on what the KeepCache no longer holds.

    pair = LockStep(model, cache)
    pair.feed(prompt)          # both run; equal logits or the test fails
    pair.feed(question)
    """

    def __init__(self, model: PreTrainedModel, cache: KeepCache, atol: float = 1e-10) -> None:
        self.model, self.cache, self.atol = model, cache, atol
        self.full = DynamicCache(config=model.config)

    def feed(self, ids: Tensor, mask: Tensor | None = None, **arguments: Any) -> Tensor:
        """The logits, after they have been compared; those of padding are left out of the comparison."""
        arguments = {"attention_mask": mask, "position_ids": positions_of(mask, ids)} | arguments
        with without_evicted(self.model, self.cache):
            dense = feed(self.model, self.full, ids, **arguments)
        ours = feed(self.model, self.cache, ids, **arguments)
        real = torch.ones_like(ids).bool() if mask is None else mask[:, -ids.shape[1] :].bool()
        torch.testing.assert_close(ours[real], dense[real], rtol=0, atol=self.atol)
        return ours


@dataclass(frozen=True)
class Indifferent(Scorer):
    """Every entry is worth the same."""

    sinks: int = 0
    window: int = 0
    name: ClassVar[str] = "indifferent"

    def protects(self, observation: Observation) -> tuple[int, int]:
        return self.sinks, self.window

    def score(self, observation: Observation) -> Tensor:
        return observation.zeros()


@dataclass(frozen=True)
class Spy(Scorer):
    """Keeps what it was shown."""

    asks: Needs = field(default_factory=Needs)
    seen: list[Observation] = field(default_factory=list, compare=False)
    name: ClassVar[str] = "spy"

    def needs(self) -> Needs:
        return self.asks

    def score(self, observation: Observation) -> Tensor:
        self.seen.append(observation)
        return observation.zeros()


def spy(**needs: Any) -> tuple[Policy, list[Observation]]:
    """A policy that evicts by position only, and the list of observations that it will have seen."""
    scorer = Spy(Needs(**needs))
    return Policy(scorer, Uniform(), TopK()), scorer.seen
