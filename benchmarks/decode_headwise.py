"""A decode step after heads were cut to different lengths: kvkeep deletes the entries, kvpress masks them.

Both sides run the same prompt of random tokens with the same weights, SnapKV's scores and AdaKV's shares. Before
anything is measured, the entries that stay and the next token's logits are compared: the sides compute attention by
different code, so a few entries near the threshold may differ. Beside these two (but not with `--quick`), the same
steps with nothing evicted, with a cache of each side.

Bytes are those of the tensors that hold keys and values, after the prompt; kvkeep's also count positions and offsets,
kvpress's do not count the indices that it masks (printed apart).

    python benchmarks/decode_headwise.py --kvpress PATH_TO_PYTHON
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from harness import Claim, alternate, arguments, median, report, require_parity, show
from kvpress_side import PAUSE, Kvpress, add_arguments, kvpress_side
from models import embedded_model, prefill, random_prompt, step
from torch import Tensor

import kvkeep

LENGTH, RATIO, WINDOW, KERNEL = 4096, 0.75, 64, 5
POLICY = f"snapkv[window={WINDOW},kernel={KERNEL}]+ada"
PRESS = {"name": "adakv", "ratio": RATIO, "window": WINDOW, "kernel": KERNEL}
TOKEN = 42


def kept_entries(cache: kvkeep.KeepCache, length: int) -> Tensor:
    """`[layers, H_kv, L]` true where an entry of row 0 is held."""
    layers = cache.keep_layers
    kept = torch.zeros(len(layers), layers[0].store.kv_heads, length, dtype=torch.bool)
    for at, layer in enumerate(layers):
        for head in range(layer.store.kv_heads):
            kept[at, head, cache.kept_positions(layer.index, 0, head)] = True
    return kept


def check(their_kept: Tensor, our_kept: Tensor, their_logits: Tensor, our_logits: Tensor) -> None:
    """Refuse to measure if the sides keep different entries of a layer, or say different things afterwards."""
    sizes = our_kept.sum((1, 2))
    require_parity("entries kept in a layer", float((their_kept.sum((1, 2)) - sizes).abs().max()), 0)
    shared = (their_kept & our_kept).sum((1, 2)) / sizes
    require_parity("share of a layer's kept entries that differ", 1 - float(shared.min()), 0.01)
    apart = (our_logits - their_logits).abs().max() / our_logits.std()
    require_parity("next logits, in standard deviations", float(apart), 0.1)


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("decode_headwise")
    parser = argparse.ArgumentParser(description=claim.cell)
    add_arguments(parser)
    options = arguments(claim, parser)
    with kvpress_side(options) as kvpress:
        model, _ = embedded_model()
        compare(claim, options, model, kvpress)


def compare(claim: Claim, options: argparse.Namespace, model: Any, kvpress: Kvpress) -> None:
    tokens, token = random_prompt(model, LENGTH), torch.tensor([[TOKEN]])
    prompt = kvpress.hand_over({"tokens": tokens})

    kept = kvkeep.KeepCache(model, POLICY, compression_ratio=RATIO)
    ours = prefill(model, kept, tokens)[0, -1]
    theirs, held = kvpress.result("prefill", cache="adakv", tokens=prompt, press=PRESS)
    sizes = {"kvkeep, 75 % evicted": kept.ledger.held_bytes, "kvpress AdaKV": held["bytes"]}
    masked_indices = held["index_bytes"]
    mask = kept_entries(kept, LENGTH)
    ours_next = step(model, kept, token)[0, -1]
    theirs_next, _ = kvpress.result("step", cache="adakv", token=TOKEN)
    require_parity("logits of the prompt", float((ours - theirs["logits"]).abs().max()), 1e-2)
    check(theirs["kept"], mask, theirs_next["logits"], ours_next)
    sides: dict[str, Callable[[], object]] = {
        "kvkeep, 75 % evicted": lambda: step(model, kept, token),
        "kvpress AdaKV": lambda: kvpress.measure("step", cache="adakv", token=TOKEN),
    }

    if not options.quick:
        full = kvkeep.KeepCache(model, "full")
        prefill(model, full, tokens)
        sizes["kvkeep, nothing evicted"] = full.ledger.held_bytes
        sizes["kvpress, nothing evicted"] = kvpress.ask("prefill", cache="full", tokens=prompt)["bytes"]
        sides["kvkeep, nothing evicted"] = lambda: step(model, full, token)
        sides["kvpress, nothing evicted"] = lambda: kvpress.measure("step", cache="full", token=TOKEN)

    print(f"\nbytes after {LENGTH} tokens")
    for name, size in {**sizes, "(indices that kvpress AdaKV masks)": masked_indices}.items():
        print(f"  {name:<44} {size:>12,}")
    taken = alternate(sides, options.runs, pause=PAUSE)
    show(f"a decode step after {LENGTH} tokens", taken)

    mine, *others = sides
    ratios = {f"steps, {name}": median(taken[name]) / median(taken[mine]) for name in others}
    ratios |= {f"bytes, {name}": sizes[name] / sizes[mine] for name in others}
    report(claim, ratios)


if __name__ == "__main__":
    main()
