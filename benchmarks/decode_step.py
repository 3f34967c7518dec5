"""A whole decode step of a real model: a KeepCache against transformers' DynamicCache, both with SDPA's model attached.

Entries are random numbers, the same on both sides, since a step costs the same whatever they are. The model is the same
object: kvkeep hands other caches to the model's own implementation.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from harness import Claim, alternate, arguments, median, report, require_parity, show
from models import dense_cache, embedded_model, kept_cache, step

from kvkeep.attention.dispatch import VARIABLE


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("decode_step")
    options = arguments(claim)
    model, _ = embedded_model()
    token = torch.tensor([[42]])
    ratios = {}
    for length, compression_ratio in ((8192, 0.75), (8192, 0.0), (32768, 0.75)):
        dense, kept = dense_cache(model, length), kept_cache(model, length, compression_ratio)
        ours = step(model, kept, token)
        if compression_ratio:
            os.environ[VARIABLE] = "reference"
            expected = step(model, kept_cache(model, length, compression_ratio), token)
            del os.environ[VARIABLE]
        else:
            expected = step(model, dense, token)
        require_parity(
            f"logits, {length} tokens, ratio {compression_ratio}", float((ours - expected).abs().max()), 1e-2
        )
        taken = alternate(
            {
                "KeepCache": partial(step, model, kept, token),
                "DynamicCache": partial(step, model, dense, token),
            },
            options.runs,
        )
        what = f"{100 * compression_ratio:g} % evicted" if compression_ratio else "nothing evicted"
        show(f"{what}, {length} tokens, {kept.ledger.held_bytes / 2**20:.0f} MiB held", taken)
        ratios[f"{what}, {length} tokens"] = median(taken["DynamicCache"]) / median(taken["KeepCache"])
    report(claim, ratios)


if __name__ == "__main__":
    main()
