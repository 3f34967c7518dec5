"""Eight rows of different length decode together: kept entries only, against transformers' padded batch.

Our side stacks eight caches, each cut to a quarter of its text; transformers' side pads them to the longest and masks
the padding. Both decode the same number of new tokens for every row. Entries are random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Claim, alternate, arguments, median, report, require_parity, show
from models import embedded_model, kept_cache, random_entries, step
from transformers import DynamicCache

from kvkeep import KeepCache, decode_batch
from kvkeep.hf.support import CACHE_ARGUMENT

LENGTHS = (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
NEW_TOKENS = 16


def padded_cache(model: Any, lengths: tuple[int, ...]) -> DynamicCache:
    """Rows of random entries with padding on the left."""
    longest = max(lengths)
    cache = DynamicCache(config=model.config)
    rows = [random_entries(model, length) for length in lengths]
    for layer, entries in enumerate(zip(*rows, strict=True)):
        keys, values = (
            torch.cat([torch.nn.functional.pad(t, (0, 0, longest - t.shape[2], 0)) for t in tensors])
            for tensors in zip(*entries, strict=True)
        )
        cache.update(keys, values, layer)
    return cache


def decode_padded(model: Any, cache: DynamicCache, lengths: tuple[int, ...], count: int) -> None:
    """Greedy decoding as `generate` does it, and the cache as it was before."""
    longest = cache.get_seq_length()
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    token = torch.full((len(lengths), 1), 42)
    positions = torch.tensor(lengths)[:, None]
    for _ in range(count):
        mask = torch.cat([mask, mask.new_ones(len(lengths), 1)], dim=1)
        logits = model(
            input_ids=token, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE_ARGUMENT: cache}
        ).logits
        token, positions = logits[:, -1].argmax(-1, keepdim=True), positions + 1
    cache.crop(-count)


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("batch_decode")
    options = arguments(claim)
    lengths = tuple(length // 4 for length in LENGTHS) if options.quick else LENGTHS
    count = 8 if options.quick else NEW_TOKENS
    model, _ = embedded_model()
    caches = [kept_cache(model, length, 0.75) for length in lengths]
    stacked = KeepCache.stack(caches)
    token = torch.tensor([[42]])

    alone = torch.cat([step(model, cache.fork(), token) for cache in caches])
    positions = torch.tensor(lengths)[:, None]
    together = model(
        input_ids=token.expand(len(caches), 1),
        position_ids=positions,
        use_cache=True,
        **{CACHE_ARGUMENT: stacked.fork()},
    ).logits
    require_parity("rows together and alone", float((alone - together).abs().max()), 1e-2)

    dense = padded_cache(model, lengths)
    prompts = [[42]] * len(lengths)
    taken = alternate(
        {
            "KeepCache, stacked": lambda: decode_batch(model, stacked.fork(), prompts, max_new_tokens=count),
            "DynamicCache, padded": lambda: decode_padded(model, dense, lengths, count),
        },
        max(3, options.runs // 2),
        warm_up=1,
        progress="decoding",
    )
    show(f"{len(lengths)} rows of {lengths[0]} to {lengths[-1]} tokens, {count} new tokens each", taken)
    ours, theirs = (len(lengths) * count / median(times) * 1000 for times in taken.values())
    print(f"  {ours:.1f} against {theirs:.1f} tokens per second")
    padded = sum(tensor.nbytes for layer in dense.layers for tensor in (layer.keys, layer.values))
    print(f"  {stacked.ledger.held_bytes / 2**20:.0f} MiB against {padded / 2**20:.0f} MiB")
    report(claim, {"tokens per second, padded batch": ours / theirs})


if __name__ == "__main__":
    main()
