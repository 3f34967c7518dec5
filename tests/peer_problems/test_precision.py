"""Precision: every dtype gives finite numbers, as close to the truth as dense attention in that dtype comes."""

from __future__ import annotations

import pytest
import torch

from kvkeep import KeepCache
from kvkeep.store import RaggedLayer

from ..attention.paths import PATH_PARAMETERS, PATHS
from ..hf.dense_reference import dense_logits, kept_logits
from ..hf.tiny import tiny_model
from .common import EVICTING, SHAPES, held, text

HALF = [torch.float16, torch.bfloat16]
PIECES = [text(2, 47), text(2, 5, seed=1), *(text(2, 1, seed=seed) for seed in (2, 3, 4))]


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [*((policy, torch.float16) for policy in EVICTING), *((policy, torch.bfloat16) for policy in SHAPES)],
    ids=str,
)
def test_p01_head_wise_eviction_is_finite_in_half_precision(policy: str, dtype: torch.dtype) -> None:
    """Elsewhere: a fake key outside of fp16's range stands for an evicted entry: NaN, "!!!!". Right: dense attention
    over the kept entries, at most twice as far from float64 as dense attention in the same dtype."""
    model = tiny_model("llama", dtype)
    cache = KeepCache(model, policy, compression_ratio=0.5)
    ours = kept_logits(model, cache, PIECES)
    dense = dense_logits(model, cache, PIECES)
    exact = dense_logits(tiny_model("llama", dtype).double(), cache, PIECES)
    for kept, half, truth in zip(ours, dense, exact, strict=True):
        assert kept.isfinite().all()
        assert (kept - truth).abs().max() <= 2 * (half - truth).abs().max()


def ragged_store(counts: tuple[int, int], scale: float, dtype: torch.dtype) -> RaggedLayer:
    """One row, two heads that hold so many of 20 entries, and three tokens after the cut."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 23, 16, generator=generator) for _ in range(2))
    keys, values, positions = (keys * scale).to(dtype), values.to(dtype), torch.arange(23)[None]
    store = RaggedLayer()
    store.append(keys[:, :, :20].contiguous(), values[:, :, :20].contiguous(), positions[:, :20])
    masks = torch.stack([torch.arange(20) < count for count in counts])[None]
    store.cut(store.held([20]), [masks])
    store.append(keys[:, :, 20:], values[:, :, 20:], positions[:, 20:])
    return store


@pytest.mark.parametrize("path", PATH_PARAMETERS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_p01_products_beyond_the_range_of_half_precision_are_finite(path: str, dtype: torch.dtype) -> None:
    """Elsewhere: q.k overflows fp16 before it is scaled: inf - inf. Right: finite, as transformers' SDPA is."""
    store = ragged_store((3, 9), 100.0, dtype)
    query = (100 * torch.randn(1, 4, 3, 16, generator=torch.Generator().manual_seed(1))).to(dtype)
    assert (query[:, :2, :1].double() @ store.cell(0, 0)[0][:3].double().T).abs().max() > 65504
    ours = PATHS[path](query, store, 0.25)
    exact = PATHS["reference"](query.double(), ragged_store((3, 9), 100.0, dtype), 0.25)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_p04_a_seed_gives_the_same_set_in_every_dtype(dtype: torch.dtype) -> None:
    """Elsewhere: a seeded random policy depends on dtype or device. Right: same seed, same set."""
    sets = []
    for model in (tiny_model("llama", dtype), tiny_model("llama", torch.float64, seed=1)):
        cache = KeepCache(model, "random[seed=7]", compression_ratio=0.5)
        kept_logits(model, cache, [text(1, 40)])
        sets.append([held(cache, layer) for layer in range(3)])
    assert sets[0] == sets[1]
    assert sets[0][0][0] != sets[0][0][1], "heads draw their own numbers"


@pytest.mark.parametrize("path", PATH_PARAMETERS)
@pytest.mark.parametrize("counts", [(3, 9), (9, 3), (1, 20), (5, 5)])
def test_p85_padding_between_ragged_heads_has_no_weight(path: str, counts: tuple[int, int]) -> None:
    """Elsewhere: short heads are padded with zeros that get softmax weight. Right: each head as if it were alone."""
    store = ragged_store(counts, 1.0, torch.float64)
    query = torch.randn(1, 4, 3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = PATHS[path](query, store, 0.25)
    for head in range(2):
        keys, values, _ = store.cell(0, head)
        future = torch.arange(len(keys)) > torch.arange(3)[:, None] + counts[head]
        for member in (2 * head, 2 * head + 1):
            weights = (0.25 * query[0, member] @ keys.T).masked_fill(future, -torch.inf).softmax(-1)
            torch.testing.assert_close(ours[0, member], weights @ values, rtol=0, atol=1e-12)
