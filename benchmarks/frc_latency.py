"""Prefill wall time with FRC, ChunkKV, SnapKV and nothing: mean and standard deviation; and FRC's scores by themselves.

"none" is transformers' own cache. The scores are taken on layers of a real prompt, against those of kvpress's ChunkKV,
which look at as many queries (64); both sides are given the same tensors. That ChunkKV's scores are the same on both
sides is checked first; FRC's are compared with its formula in the tests.

The claim's 100 runs of both lengths take an hour on two cores. `--record DIR` keeps every prefill, and the same command
goes on with those that are missing; `--runs 10` measures fewer, and the report says what was run. With `--quick`,
prefills are of 1,024 tokens only.

    python benchmarks/frc_latency.py --kvpress PATH_TO_PYTHON
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from harness import Claim, Milliseconds, alternate, arguments, median, report, require_parity, show, sittings_in
from kvpress_side import PAUSE, Kvpress, add_arguments, kvpress_side
from models import embedded_model, prefill, random_prompt
from single_layers import Layer, as_file, layers_of
from transformers import DynamicCache

import kvkeep
from kvkeep.policies import parse_prompt_policy
from kvkeep.results.keyed import KeyedLog

LENGTHS = (1024, 4096)
RATIO, WINDOW, KERNEL = 0.75, 64, 5
LAYERS = (0, 7, 13, 19, 25, 29)
POLICIES = {"FRC": "frc", "ChunkKV": "chunkkv", "SnapKV": "snapkv"}
CHUNKKV = parse_prompt_policy(f"chunkkv[window={WINDOW},kernel={KERNEL}]")
PRESS = {"name": "chunkkv", "ratio": RATIO, "window": WINDOW, "kernel": KERNEL}


def prefills(model: Any, length: int, runs: int, sittings: KeyedLog | None) -> dict[str, float]:
    """Print the times of a prefill with each policy; the means as shares of the mean without any."""
    tokens = random_prompt(model, length)

    def run(policy: str | None) -> Callable[[], object]:
        if policy is None:
            return lambda: prefill(model, DynamicCache(config=model.config), tokens)
        return lambda: prefill(model, kvkeep.KeepCache(model, policy, compression_ratio=RATIO), tokens)

    sides = {"none": run(None), **{name: run(policy) for name, policy in POLICIES.items()}}
    taken = alternate(sides, runs, warm_up=1, progress=f"{length} tokens", sittings=sittings)
    print(f"\na prefill of {length} tokens (ms)")
    print(f"  {'':<10} {'mean':>10} {'std':>9} {'median':>10} {'min':>10} {'max':>10}   to none")
    means = {name: statistics.mean(values) for name, values in taken.items()}
    for name, values in taken.items():
        deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
        print(
            f"  {name:<10} {means[name]:10.1f} {deviation:9.1f} {median(values):10.1f} "
            f"{min(values):10.1f} {max(values):10.1f} {means[name] / means['none']:9.3f}"
        )
    return {f"prefill, {name} to none, {length} tokens": means[name] / means["none"] for name in POLICIES}


def check(layers: Sequence[Layer], kvpress: Kvpress, length: int) -> None:
    """Refuse to measure unless ChunkKV's scores outside of the window are the same on both sides."""
    differing = 0.0
    for at, layer in enumerate(layers):
        scored, _ = kvpress.result("evict", layer=at, press=PRESS, part="score")
        theirs = scored["scores"][:, :, : length - WINDOW]
        ours = layer.score(CHUNKKV, RATIO)[0].scores[:, :, : length - WINDOW]
        differing = max(differing, float((ours - theirs).abs().max() / theirs.max()))
    require_parity(f"ChunkKV's scores to the largest, {length} tokens", differing, 1e-4)


def scores(model: Any, kvpress: Kvpress, length: int, runs: int) -> dict[str, float]:
    """kvpress's ChunkKV over kvkeep's FRC: scores alone, and all of the eviction; the layers come in turns."""
    layers = layers_of(model, random_prompt(model, length), LAYERS)
    kvpress.ask("load", tensors=kvpress.hand_over(as_file(layers)))
    check(layers, kvpress, length)
    frc = parse_prompt_policy("frc")

    def turns(side: Callable[[int], Milliseconds]) -> Callable[[], Milliseconds]:
        places = itertools.cycle(range(len(layers)))
        return lambda: side(next(places))

    def measured(sides: Mapping[str, Callable[[int], Milliseconds]]) -> dict[str, list[float]]:
        alternating = {name: turns(side) for name, side in sides.items()}
        return alternate(alternating, runs, warm_up=len(layers), pause=PAUSE)

    scoring = measured(
        {
            "kvkeep FRC": lambda at: layers[at].score(frc, RATIO)[1],
            "kvkeep ChunkKV": lambda at: layers[at].score(CHUNKKV, RATIO)[1],
            "kvpress ChunkKV": lambda at: kvpress.measure("evict", layer=at, press=PRESS, part="score"),
        }
    )
    show(f"scores of one layer of {length} tokens", scoring)
    whole = measured(
        {
            "kvkeep FRC": lambda at: layers[at].evict(frc, RATIO)[1],
            "kvkeep ChunkKV": lambda at: layers[at].evict(CHUNKKV, RATIO)[1],
            "kvpress ChunkKV": lambda at: kvpress.measure("evict", layer=at, press=PRESS),
        }
    )
    show(f"score, choose and gather one layer of {length} tokens", whole)
    return {
        f"{part}, kvpress ChunkKV, {length} tokens": median(taken["kvpress ChunkKV"]) / median(taken["kvkeep FRC"])
        for part, taken in {"scoring": scoring, "eviction": whole}.items()
    }


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("frc_latency")
    parser = argparse.ArgumentParser(description=claim.cell)
    add_arguments(parser)
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep the prefills here, and go on from those")
    options = arguments(claim, parser, quick_runs=5)
    ratios: dict[str, float] = {}
    model, _ = embedded_model()
    with kvpress_side(options) as kvpress:
        for length in LENGTHS:
            ratios |= scores(model, kvpress, length, options.runs)
    with sittings_in(options.record, claim, options.threads) if options.record else nullcontext() as sittings:
        for length in LENGTHS[:1] if options.quick else LENGTHS:
            ratios |= prefills(model, length, options.runs, sittings)
    report(claim, ratios, runs=options.runs)


if __name__ == "__main__":
    main()
