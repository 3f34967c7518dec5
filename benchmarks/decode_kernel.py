"""One layer's decode attention: the compiled kernel against torch, and against what the machine can read.

The other sides are (a) SDPA over the cells padded to one rectangle, padding built beforehand, so that only attention is
timed; (b) a loop of SDPA over the heads, without padding; (c) reading as many bytes and doing nothing with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Claim, alternate, arguments, median, report, require_parity, show
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvkeep.attention import native, reference
from kvkeep.store import RaggedLayer

HEADS, KV_HEADS, SIZE = 9, 3, 64
SHARES = (0.4, 1.0, 1.6)  # of the average entries, by KV head
WORKING_SET = 160e6  # bytes of all layers that are read in turn: several times the processor's cache


def ragged_layer(entries: int, dtype: torch.dtype) -> RaggedLayer:
    """A cut layer and the new token."""
    longest = int(entries * max(SHARES))
    keys, values = (torch.randn(1, KV_HEADS, longest, SIZE).to(dtype) for _ in range(2))
    layer = RaggedLayer()
    layer.append(keys, values, torch.arange(longest)[None])
    counts = torch.tensor([int(entries * share) for share in SHARES])
    layer.cut(layer.held([longest]), [torch.arange(longest) < counts[None, :, None]])
    key, value = (torch.randn(1, KV_HEADS, 1, SIZE).to(dtype) for _ in range(2))
    layer.append(key, value, torch.tensor([[longest]]))
    return layer


def rectangle(layer: RaggedLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values `[1, H_kv, N, D]` of all cells, filled up, and the mask `[1, H_kv, 1, N]` of what is real."""
    held = layer.held([int(layer.cell_counts().max())])[0]
    return held.keys.contiguous(), held.values.contiguous(), held.valid[:, :, None]


def cells_of(layer: RaggedLayer) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[1, 1, n, D]` of each cell, prefix and tail together."""
    return [tuple(t[None, None].contiguous() for t in layer.cell(0, head)[:2]) for head in range(KV_HEADS)]  # type: ignore[misc]


def by_rectangle(query: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    keys, values, valid = parts
    mask = valid.repeat_interleave(HEADS // KV_HEADS, dim=1)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def by_head(query: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    group = HEADS // KV_HEADS
    outputs = [
        scaled_dot_product_attention(query[:, h * group : (h + 1) * group], k, v, enable_gqa=True)
        for h, (k, v) in enumerate(parts)
    ]
    return torch.cat(outputs, dim=1)


@dataclass(frozen=True, eq=False)
class Sides:
    """Layers that are read in turn, in the form that each side wants."""

    query: Tensor
    layers: list[RaggedLayer]
    rectangles: list[tuple[Tensor, Tensor, Tensor]]
    heads: list[list[tuple[Tensor, Tensor]]]
    memory: list[Tensor]

    @classmethod
    def of(cls, entries: int, dtype: torch.dtype) -> Sides:
        size = entries * KV_HEADS * 2 * SIZE * dtype.itemsize
        layers = [ragged_layer(entries, dtype) for _ in range(max(2, int(WORKING_SET / size)))]
        payload = layers[0].bytes().payload
        return cls(
            query=torch.randn(1, HEADS, 1, SIZE).to(dtype),
            layers=layers,
            rectangles=[rectangle(layer) for layer in layers],
            heads=[cells_of(layer) for layer in layers],
            memory=[torch.zeros(payload // 8, dtype=torch.int64) for _ in layers],
        )

    def kernel(self, index: int) -> Tensor:
        return native.attend(self.query, self.layers[index], SIZE**-0.5)

    def padded(self, index: int) -> Tensor:
        return by_rectangle(self.query, self.rectangles[index])

    def head_by_head(self, index: int) -> Tensor:
        return by_head(self.query, self.heads[index])

    def torch_sum(self, index: int) -> Tensor:
        return self.memory[index].sum()

    def compiled_read(self, index: int) -> None:
        # Not what torch.sum has just read, which would come from the processor's cache.
        memory = self.memory[(index + len(self.memory) // 2) % len(self.memory)]
        native._compiled().read_all(memory.data_ptr(), memory.nbytes, torch.get_num_threads())

    def turning(self, side: Callable[[int], object]) -> Callable[[], object]:
        turns = itertools.cycle(range(len(self.layers)))
        return lambda: side(next(turns))

    def check(self, label: str) -> None:
        dtype = self.query.dtype
        expected = reference.attend(self.query.double(), self.layers[0], SIZE**-0.5)
        allowed = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        for name, side in {"kernel": self.kernel, "padded": self.padded, "head by head": self.head_by_head}.items():
            require_parity(f"{name}, {label}", float((side(0) - expected).abs().max()), allowed)


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("decode_kernel")
    options = arguments(claim)
    ratios = {}
    cells = [(torch.float32, entries) for entries in (2048, 8192)]
    if not options.quick:
        cells += [(dtype, entries) for dtype in (torch.bfloat16, torch.float16) for entries in (2048, 8192)]
    for dtype, entries in cells:
        label = f"{entries} entries" if dtype == torch.float32 else f"{entries} entries, {dtype}"
        sides = Sides.of(entries, dtype)
        sides.check(label)
        taken = alternate(
            {
                "kernel": sides.turning(sides.kernel),
                "padded SDPA": sides.turning(sides.padded),
                "SDPA head by head": sides.turning(sides.head_by_head),
                "reading, torch.sum": sides.turning(sides.torch_sum),
                "reading, compiled": sides.turning(sides.compiled_read),
            },
            options.runs,
            warm_up=len(sides.layers),
        )
        size = sides.memory[0].nbytes
        show(f"{label}, {size / 2**20:.1f} MiB", taken)
        kernel = median(taken["kernel"])
        reading = min(median(taken["reading, torch.sum"]), median(taken["reading, compiled"]))
        print(f"  kernel {size / kernel / 1e6:.1f} GB/s, reading {size / reading / 1e6:.1f} GB/s\n")
        ratios[f"padded SDPA, {label}"] = median(taken["padded SDPA"]) / kernel
        ratios[f"SDPA head by head, {label}"] = median(taken["SDPA head by head"]) / kernel
        ratios[f"share of read bandwidth, {label}"] = reading / kernel
    report(claim, ratios)


if __name__ == "__main__":
    main()
