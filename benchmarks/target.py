"""The training target of KVpop: against the whole matrix, and against one causal attention pass.

The LSE is given, as it is in training, where attention returns it. (a) `S x S` probabilities and the sums of their
columns, where they fit; (b) torch's causal attention of the same queries, keys and values. Memory is what is alive at
once of the tensors that the call makes, counted storage by storage; a kernel's own scratch is not among them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Claim, alternate, arguments, median, report, require_parity, show
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvkeep.learn import causal_lse, future_log_mass

HEADS, KV_HEADS, SIZE, WINDOW = 9, 3, 64, 128
DENSE, LONG = 2048, 8192


def tensors(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and the LSE."""
    queries, keys, values = (torch.randn(1, heads, length, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return queries, keys, values, causal_lse(queries, keys)


def dense(queries: Tensor, keys: Tensor, lse: Tensor) -> Tensor:
    """The same numbers from the whole matrix."""
    length = queries.shape[2]
    logits: Tensor = queries @ keys.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(-1, -2) * SIZE**-0.5
    counted = torch.ones(length, length, dtype=torch.bool).tril(-WINDOW)
    probabilities = (logits - lse[..., None]).exp().masked_fill_(~counted, 0)
    return (probabilities.sum(-2) / (length - WINDOW - torch.arange(length)).clamp(min=1)).log()[..., :-WINDOW]


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that were alive at once of storages that came into being meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor, given)
        return result

    def _count(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_bytes(call: Callable[[], object]) -> int:
    alive = Alive()
    with alive:
        call()
    return alive.peak


def main() -> None:
    claim = Claim.read("target")
    options = arguments(claim, quick_runs=3)
    torch.manual_seed(0)
    ratios = {}

    queries, keys, _, lse = tensors(DENSE)
    ours = future_log_mass(queries, keys, lse, WINDOW)
    exact = dense(queries.double(), keys.double(), lse.double())
    require_parity(f"log-mass of {DENSE} tokens", float((ours - exact).abs().max()), 1e-4)
    taken = alternate(
        {
            "target": lambda: future_log_mass(queries, keys, lse, WINDOW),
            "in blocks": lambda: future_log_mass(queries, keys, lse, WINDOW, backend="blocks"),
            "whole matrix": lambda: dense(queries, keys, lse),
        },
        options.runs,
    )
    show(f"target, {DENSE} tokens", taken)
    ratios[f"whole matrix, {DENSE} tokens"] = median(taken["whole matrix"]) / median(taken["target"])

    queries, keys, values, lse = tensors(LONG)
    taken = alternate(
        {
            "target": lambda: future_log_mass(queries, keys, lse, WINDOW),
            "in blocks": lambda: future_log_mass(queries, keys, lse, WINDOW, backend="blocks"),
            "causal attention": lambda: scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            ),
        },
        options.runs,
        warm_up=1,
    )
    show(f"target, {LONG} tokens", taken)
    ratios[f"times a causal attention pass, {LONG} tokens"] = median(taken["target"]) / median(
        taken["causal attention"]
    )

    peaks = []
    for length in (LONG, LONG // 2):
        queries, keys, _, lse = tensors(length)
        peaks.append(peak_bytes(partial(future_log_mass, queries, keys, lse, WINDOW)))
    matrix = HEADS * LONG**2 * 4
    print(f"\npeak bytes: {peaks[0]:,} for {LONG} tokens, {peaks[1]:,} for half of them; the matrix has {matrix:,}")
    ratios[f"peak bytes, {LONG} over {LONG // 2} tokens"] = peaks[0] / peaks[1]
    ratios[f"bytes of the matrix over peak bytes, {LONG} tokens"] = matrix / peaks[0]
    report(claim, ratios)


if __name__ == "__main__":
    main()
