"""What eviction costs: the share of a prefill that it takes, and the same work on identical tensors against kvpress.

The share is taken inside the run: the cache's own clock (`evict_seconds`: scores, choice and gather of all layers)
against the rest of the same prefill. Prefills are few, since each gives a share of its own.

On identical tensors, layers of a real prompt are evicted from outside of a forward. Both sides are given the same keys,
values and queries, so that neither pays for projections, and work with kvpress's options (a window of 64, a kernel of
5). What they keep is compared first: SnapKV's entries must be the same; ChunkKV's differ on purpose (kvpress rounds the
number of chunks, and lets one forced entry win its whole chunk; see docs/from-kvpress.md).

    python benchmarks/eviction_cost.py --kvpress PATH_TO_PYTHON
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import Claim, Milliseconds, alternate, arguments, median, report, require_parity, show
from kvpress_side import PAUSE, Kvpress, add_arguments, kvpress_side
from models import embedded_model, prefill, random_prompt
from single_layers import Layer, as_file, layers_of
from torch import Tensor

import kvkeep
from kvkeep.policies import PromptPolicy, parse_prompt_policy

LENGTH, RATIO, WINDOW, KERNEL = 4096, 0.75, 64, 5
LAYERS = (0, 7, 13, 19, 25, 29)
POLICIES = ("snapkv", "frc", "adasnapkv")
SAME = {"SnapKV": "snapkv", "ChunkKV": "chunkkv"}  # the same name on both sides
ALLOWED = {"SnapKV": 0.005, "ChunkKV": 0.1}  # share of the entries that may differ


def shares(model: Any, tokens: Tensor, prefills: int) -> dict[str, float]:
    """What eviction adds to a prefill, as a share of the rest of it; the median over some prefills."""
    added: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    whole: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(prefills):
        for policy in POLICIES:
            cache = kvkeep.KeepCache(model, policy, compression_ratio=RATIO)
            started = time.perf_counter()
            prefill(model, cache, tokens)
            whole[policy].append(1000 * (time.perf_counter() - started))
            added[policy].append(1000 * cache.evict_seconds)
    show(f"a prefill of {LENGTH} tokens, {prefills} of each", whole)
    show("of which scores, choices and gathers", added)
    return {
        policy: median([a / (w - a) for a, w in zip(added[policy], whole[policy], strict=True)]) for policy in POLICIES
    }


def press(name: str) -> dict[str, Any]:
    return {"name": SAME[name], "ratio": RATIO, "window": WINDOW, "kernel": KERNEL}


def policy(name: str) -> PromptPolicy:
    return parse_prompt_policy(f"{SAME[name]}[window={WINDOW},kernel={KERNEL}]")


def check(layers: Sequence[Layer], kvpress: Kvpress) -> None:
    """Refuse to measure if the two sides keep different entries."""
    for name in SAME:
        differing = 0.0
        for at, layer in enumerate(layers):
            stored, _ = kvpress.result("evict", layer=at, press=press(name), mark=True)
            theirs = stored["values"][0, :, :, 0].long()
            ours, _ = layer.evict(policy(name), RATIO)
            for head, kept in enumerate(theirs):
                mine = set(ours.cell(0, head)[2].tolist())
                differing = max(differing, 1 - len(mine & set(kept.tolist())) / len(mine))
        require_parity(f"share of {name}'s entries that differ", differing, ALLOWED[name])


def compare(layers: Sequence[Layer], kvpress: Kvpress, runs: int) -> dict[str, float]:
    """kvpress's time over kvkeep's, for each method; the layers come in turns."""
    ratios = {}
    for name in SAME:
        ours, theirs = itertools.cycle(layers), itertools.cycle(range(len(layers)))
        mine, yours = policy(name), press(name)

        def evict(layers: Any = ours, mine: Any = mine) -> Milliseconds:
            return next(layers).evict(mine, RATIO)[1]  # type: ignore[no-any-return]

        def compress(layers: Any = theirs, yours: Any = yours) -> Milliseconds:
            return kvpress.measure("evict", layer=next(layers), press=yours)

        taken = alternate(
            {f"kvkeep {name}": evict, f"kvpress {name}": compress}, runs, warm_up=len(layers), pause=PAUSE
        )
        show(f"score, choose and gather one layer of {LENGTH} tokens", taken)
        ratios[f"kvpress {name}"] = median(taken[f"kvpress {name}"]) / median(taken[f"kvkeep {name}"])
    return ratios


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("eviction_cost")
    parser = argparse.ArgumentParser(description=claim.cell)
    add_arguments(parser)
    options = arguments(claim, parser)
    with kvpress_side(options) as kvpress:
        model, _ = embedded_model()
        tokens = random_prompt(model, LENGTH)
        layers = layers_of(model, tokens, LAYERS)  # the first prefill, which warms up
        kvpress.ask("load", tensors=kvpress.hand_over(as_file(layers)))
        check(layers, kvpress)
        ratios = compare(layers, kvpress, options.runs)
    added = shares(model, tokens, 1 if options.quick else max(3, options.runs // 3))
    report(claim, {**ratios, **{f"share of the prefill, {policy}": share for policy, share in added.items()}})


if __name__ == "__main__":
    main()
