"""Decode steps far into a text: KVpop's cost must not depend on how far, the full cache's does.

A KVpop cache reads a short text, until its cells are full, and is then told that it stands further on: what it holds,
and so what a step costs, is the same as if it had read all that. The full cache holds random entries. Scorers are new
ones; their numbers do not change what they cost. All lengths take turns, so that a noisy minute hits all of them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from harness import Claim, alternate, arguments, median, report, require_parity, show
from models import dense_cache, embedded_model, prefill, random_prompt, step

from kvkeep import KeepCache
from kvkeep.learn import KVpopConfig, KVpopScorer
from kvkeep.learn.policy import KVpop
from kvkeep.learn.traces import shape_of
from kvkeep.policies.online import Arrivals, State
from kvkeep.store import SlotLayer

ENTRIES = 512
LENGTHS = (1024, 2048, 8192, 32768, 131072)
FULL_LENGTHS = (1024, 2048, 8192, 32768, 131072)  # the longest takes 6 GB and some seconds a step: not with --quick


class TimedKVpop(KVpop):
    """Counts the seconds that its scorer takes."""

    seconds = 0.0

    def step(self, arrivals: Arrivals, state: State) -> tuple[torch.Tensor, State]:
        started = time.perf_counter()
        result = super().step(arrivals, state)
        TimedKVpop.seconds += time.perf_counter() - started
        return result


def far_on(model: Any, policy: KVpop, prompt: torch.Tensor, length: int) -> KeepCache:
    """A full cell at a logical length."""
    cache = KeepCache(model, policy, entries=ENTRIES)
    prefill(model, cache, prompt)
    for layer in cache.evictable_layers:
        if isinstance(layer.store, SlotLayer):
            layer.store.lengths = [length]
    cache.begin_with([length], length)
    return cache


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("long_generation")
    options = arguments(claim)
    model, _ = embedded_model()
    config = KVpopConfig(ENTRIES)
    policy = TimedKVpop(KVpopScorer(config, shape_of(model, fingerprint=False)))
    prompt, token = random_prompt(model, ENTRIES + 64), torch.tensor([[42]])

    plain = KeepCache(model, "online-streaming-llm", entries=config.geometry(64, 4).held)
    prefill(model, plain, prompt)
    here = far_on(model, policy, prompt, prompt.shape[1])
    difference = float((step(model, here, token) - step(model, plain, token)).abs().max())
    require_parity("logits, a new scorer and StreamingLLM of as many entries", difference, 1e-2)

    caches = {length: far_on(model, policy, prompt, length) for length in LENGTHS}
    sides = {f"{length} tokens": partial(step, model, caches[length], token) for length in LENGTHS}
    held = [caches[length].ledger.held_bytes for length in LENGTHS]
    runs = max(50, options.runs)
    alternate(sides, 1, warm_up=1)
    TimedKVpop.seconds = 0.0
    taken = alternate(sides, runs, warm_up=0, progress="kvpop")
    show(f"kvpop, {ENTRIES} entries a cell, {runs} steps each", taken)
    medians = {length: median(taken[f"{length} tokens"]) for length in LENGTHS}
    scorer = TimedKVpop.seconds * 1000 / sum(sum(values) for values in taken.values())
    held += [caches[length].ledger.held_bytes for length in LENGTHS]

    ratios = {
        "slowest over fastest length, kvpop": max(medians.values()) / min(medians.values()),
        "largest over smallest held bytes, kvpop": max(held) / min(held),
        "scorer's share of a step": scorer,
    }
    for length in FULL_LENGTHS:
        if options.quick and length > 8192:
            continue
        full = dense_cache(model, length)
        steps = 5 if length > 100_000 else 15
        full_taken = alternate({"full cache": partial(step, model, full, token)}, steps, warm_up=1)
        show(f"full cache, {length} tokens", full_taken)
        ratios[f"full cache, {length} tokens"] = median(full_taken["full cache"]) / medians[length]
    report(claim, ratios, held_bytes=held[0])


if __name__ == "__main__":
    main()
