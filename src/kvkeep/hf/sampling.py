"""Drawing tokens instead of taking the likeliest, so that a draw can be repeated and compared.

    sampling = Sampling(temperature=0.6, top_p=0.95, top_k=20)
    decode_batch(model, cache, prompts, max_new_tokens=512, choose=sampling.chooser("aime25/3", 0))

The random numbers of a step hang on the seed and the step alone, not on the policy, on the rows that decode together or
on the device. All rows of a step share them: two policies that predict the same say the same, so that what differs
between them is the policy and not luck.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvkeep.errors import UnsupportedError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the cuts are transformers' own, in its order: temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divides the logits, above 0.
        top_p: the likeliest tokens whose probabilities add up to this, 0 < p <= 1.
        top_k: at most so many of the likeliest tokens; 0 for all.
        min_p: tokens at least so likely as this share of the likeliest, 0 <= p <= 1.

    Raises:
        UnsupportedError: a number out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        fine = {
            "temperature above 0": 0 < self.temperature < math.inf,
            "top_p with 0 < p <= 1": 0 < self.top_p <= 1,
            "top_k of 0 or more": self.top_k >= 0,
            "min_p with 0 <= p <= 1": 0 <= self.min_p <= 1,
        }
        for expected, holds in fine.items():
            if not holds:
                name = expected.split()[0]
                raise UnsupportedError(
                    expected=expected,
                    received=f"{getattr(self, name)}",
                    remedy="leave all of them out to take the likeliest token",
                )

    def chooser(self, *seed: str | int) -> Callable[[Tensor], Tensor]:
        """Draws one token a row, step by step; the same seed draws the same.

        Args:
            seed: whatever tells one text from another, such as a sample's key and a rollout's number.

        Returns:
            Maps logits `[rows, vocabulary]` to tokens `[rows]`; the n-th call is step n.
        """
        generator = torch.Generator().manual_seed(seed_number(*seed))
        cuts = self._cuts()

        def choose(logits: Tensor) -> Tensor:
            scores: Tensor = cuts(None, logits.float())
            # The first of exponential clocks to ring, each as fast as its token is likely, draws from the distribution.
            clocks = torch.empty(logits.shape[-1], dtype=torch.float64).exponential_(generator=generator)
            return (scores.double().softmax(-1) / clocks.to(logits.device)).argmax(-1)

        return choose

    def _cuts(self) -> LogitsProcessorList:
        cuts = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
        if self.top_k:
            cuts.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            cuts.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            cuts.append(MinPLogitsWarper(self.min_p))
        return cuts


def seed_number(*seed: str | int) -> int:
    """A seed below 2**53 from texts and numbers, the same in every process."""
    digest = hashlib.sha256(repr(seed).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 11
