"""What caches hold after a prompt at ratio 0.75: kvpress's presses that give heads different shares, beside kvkeep.

Nominal is what the ratio says: a quarter of the full cache. Measured are the storages that keys and values keep alive,
on both sides; kvkeep's also count positions and offsets, kvpress's indices of what it masks stand apart. SnapKV, which
gives all heads the same share, is there as a check of the scale: both sides must hold a quarter.

Bytes hang on the shares, not on the scores: AdaKV and CriticalAdaKV let the heads of a layer compete, as `+ada` does;
KVzip lets all cells of the model compete, as `+threshold` does. What each side keeps is not compared here. KVzip is
weighed right after the prompt, where its keys are views of tensors that also have the context which it repeated.

    python benchmarks/audit_kvpress.py --kvpress PATH_TO_PYTHON
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from harness import Claim, arguments, report, require_parity
from kvpress_side import Kvpress, add_arguments, kvpress_side
from models import embedded_model, prefill, random_prompt
from torch import Tensor

import kvkeep

LENGTH, QUICK_LENGTH, RATIO, WINDOW, KERNEL = 4096, 1024, 0.75, 64, 5
SCORER = f"snapkv[window={WINDOW},kernel={KERNEL}]"
# kvpress's press, its name in requests, and the policy of kvkeep that shares the budget in the same way.
SIDES = {
    "SnapKV": ("snapkv", SCORER),
    "AdaKV": ("adakv", f"{SCORER}+ada"),
    "CriticalAdaKV": ("criticaladakv", f"{SCORER}+ada"),
    "KVzip": ("kvzip", f"{SCORER}+threshold"),
}


def ours(model: Any, tokens: Tensor, policy: str) -> kvkeep.CacheBytes:
    """The bytes of a KeepCache after the prompt, after a check against its own ledger."""
    cache = kvkeep.KeepCache(model, policy, compression_ratio=RATIO)
    prefill(model, cache, tokens)
    weighed = kvkeep.measure_bytes(cache)
    require_parity(f"bytes of {policy}, ledger and storages", abs(weighed.total - cache.ledger.held_bytes), 0)
    return weighed


def theirs(kvpress: Kvpress, prompt: str, name: str | None) -> dict[str, Any]:
    """The bytes of kvpress's cache after the prompt: `bytes` of keys and values, `index_bytes` of what it masks."""
    press = None if name is None else {"name": name, "ratio": RATIO, "window": WINDOW, "kernel": KERNEL}
    answer = kvpress.ask("prefill", cache="audited", tokens=prompt, press=press)
    kvpress.ask("forget", cache="audited")
    return answer


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("audit_kvpress")
    parser = argparse.ArgumentParser(description=claim.cell)
    add_arguments(parser)
    options = arguments(claim, parser, quick_runs=1)
    length = QUICK_LENGTH if options.quick else LENGTH
    with kvpress_side(options) as kvpress:
        model, _ = embedded_model()
        tokens = random_prompt(model, length)
        prompt = kvpress.hand_over({"tokens": tokens})
        config = model.config
        size = config.hidden_size // config.num_attention_heads
        full = 2 * config.num_hidden_layers * config.num_key_value_heads * length * size * model.dtype.itemsize
        require_parity(
            "bytes of kvpress's full cache, against arithmetic", theirs(kvpress, prompt, None)["bytes"] - full, 0
        )
        nominal = full * (1 - RATIO)
        ratios, shares = {}, {}
        lines = []
        for name, (press, policy) in SIDES.items():
            held, mine = theirs(kvpress, prompt, press), ours(model, tokens, policy)
            if name == "SnapKV":
                require_parity("SnapKV's bytes over nominal", abs(held["bytes"] / nominal - 1), 0.01)
                require_parity("kvkeep's bytes over nominal", abs(mine.total / nominal - 1), 0.01)
            else:
                ratios[f"bytes, kvpress {name}"] = held["bytes"] / mine.total
            shares[name] = {
                "kvpress": round(held["bytes"] / full, 4),
                "kvpress indices": round(held["index_bytes"] / full, 4),
                "kvkeep": round(mine.total / full, 4),
            }
            lines.append((name, held["bytes"], held["index_bytes"], mine.total))
    print(f"\n{length} tokens; MiB: nominal {nominal / 2**20:.1f}, full cache {full / 2**20:.1f}")
    print(f"  {'press':<16} {'kvpress':>10} {'x nominal':>10} {'indices':>10} {'kvkeep':>10} {'x nominal':>10}")
    for name, held_bytes, index_bytes, total in lines:
        mib = [number / 2**20 for number in (held_bytes, index_bytes, total)]
        print(
            f"  {name:<16} {mib[0]:>10.1f} {held_bytes / nominal:>10.2f} {mib[1]:>10.1f} {mib[2]:>10.1f} "
            f"{total / nominal:>10.2f}"
        )
    report(claim, ratios, shares_of_full=shares, length=length)


if __name__ == "__main__":
    main()
