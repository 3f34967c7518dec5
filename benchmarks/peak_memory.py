"""Peak bytes of keys and values while a prompt of 8,192 tokens is processed, against what the design says.

Three ways: a policy that decides layer by layer holds one dense layer beside what was kept; a prompt that is cut chunk
by chunk holds its cap and one chunk; a policy that weighs all layers against one another holds the full cache until the
last layer is done. The ledger's peak is compared with sums that are written out here, and what is held after each
forward with the storages that are alive; all to the byte.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Claim, arguments, report
from transformers import LlamaConfig, LlamaForCausalLM

from kvkeep import KeepCache
from kvkeep.hf.support import CACHE_ARGUMENT

LAYERS, KV_HEADS, SIZE, LENGTH, CHUNK = 6, 3, 64, 8192, 512
KEPT = LENGTH // 4
VECTOR = 2 * SIZE * 4  # bytes of a key and a value in float32
POSITION = 4
PREFIX = KV_HEADS * KEPT * (VECTOR + POSITION) + (KV_HEADS + 1) * POSITION  # a layer after its cut
DENSE = LENGTH * (KV_HEADS * VECTOR + POSITION)  # before it; all heads of a row share the positions


def random_llama() -> Any:
    torch.manual_seed(0)
    heads = 3 * KV_HEADS
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=heads * SIZE,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).eval()


def run(model: Any, cache: KeepCache, chunk: int) -> int:
    """Feed the prompt; the peak, after a check of what is held against the storages."""
    ids = torch.randint(3, 512, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    for start in range(0, LENGTH, chunk):
        part = ids[:, start : start + chunk]
        model(part, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        alive = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for layer in cache.keep_layers
            for tensor in layer.store.tensors().values()
        }
        held = cache.ledger.held_bytes - cache.ledger.state_bytes
        if sum(alive.values()) != held:
            raise SystemExit(f"storages of {sum(alive.values())} bytes are alive, and the ledger counts {held}")
    return cache.ledger.peak_bytes


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("peak_memory")
    arguments(claim)
    model = random_llama()
    full = LAYERS * DENSE

    layerwise = run(model, KeepCache(model, "knorm", compression_ratio=0.75), LENGTH)
    capped = run(model, KeepCache(model, "knorm", compression_ratio=0.75, prompt_tokens=LENGTH, cut_chunks=True), CHUNK)
    cache = KeepCache(model, "knorm+threshold", compression_ratio=0.75)
    waiting = run(model, cache, LENGTH)

    # While a layer is cut, what it held and what it keeps are there together.
    first = sum(cache.ledger.entries_per_cell[0][0]) * (VECTOR + POSITION) + (KV_HEADS + 1) * POSITION
    tail = CHUNK * (KV_HEADS * VECTOR + POSITION)
    rectangle = KV_HEADS * (KEPT + CHUNK) * VECTOR  # prefix and chunk side by side, for the policy to look at
    expected = {
        "layer by layer": (layerwise, (LAYERS - 1) * PREFIX + DENSE + PREFIX),
        "chunks under a cap": (capped, LAYERS * PREFIX + tail + rectangle + PREFIX),
        "whole model": (waiting, full + first),
    }
    for name, (measured, said) in expected.items():
        print(f"  {name:<24} {measured:>12,} bytes, expected {said:>12,}; {measured / full:6.1%} of the full cache")
    report(
        claim,
        {name: measured / said for name, (measured, said) in expected.items()},
        shares_of_full={name: round(measured / full, 4) for name, (measured, _) in expected.items()},
    )


if __name__ == "__main__":
    main()
