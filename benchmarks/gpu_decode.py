"""One layer's decode attention on a GPU: the Triton kernels against torch.

The other sides are (a) kvkeep's padded path, which fills the cells up to a rectangle in each call; (b) SDPA over that
rectangle with a mask, built beforehand, the query heads of a KV head as rows of one product, so that only attention is
timed. Both sides of a ratio are measured alternately. (a) is timed as it is called, the host's work included; (b) also
from a CUDA graph, which leaves the GPU's time alone. Cells are ragged by a factor of 4.

    python benchmarks/gpu_decode.py            parity, times, and whether they reach what was claimed
    python benchmarks/gpu_decode.py --tune     the kernels' time by programs for each multiprocessor, too
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvkeep.attention import padded, reference, triton_decode
from kvkeep.store import RaggedLayer

HEADS, KV_HEADS, SIZE = 32, 8, 128
SHARES = (0.4, 0.5, 0.8, 1.0, 1.0, 1.2, 1.5, 1.6)  # of the average entries, by KV head
TAIL = 40
WORKING_SET = 256e6  # bytes of all layers that are read in turn: several times a GPU's cache
ENTRIES = (2048, 8192, 32768)
RUNS, CALLS = 15, 20  # medians are over the runs, each the mean of some calls
SCALING = SIZE**-0.5
# Error of the output by its root mean square; the first is what rounding to the type costs and a bit.
ALLOWED = {torch.float16: 4e-4, torch.bfloat16: 3e-3}

# Ratios `other side / kernels`, written down before the script was run.
MUST_REACH = {
    **{f"padded path, {entries}, {dtype}": 1.5 for entries in ENTRIES for dtype in ALLOWED},
    **{f"SDPA, graph, {entries}, {dtype}": 1.2 for entries in ENTRIES[1:] for dtype in ALLOWED},
}


def ragged_layer(entries: int, dtype: torch.dtype) -> RaggedLayer:
    """A cut layer and some tokens that came after the cut, the last one just now."""
    longest = int(entries * max(SHARES))

    def random(length: int) -> Tensor:
        return torch.randn(1, KV_HEADS, length, SIZE, device="cuda", dtype=dtype)

    places = torch.arange(longest + TAIL, device="cuda")[None]
    layer = RaggedLayer()
    layer.append(random(longest), random(longest), places[:, :longest])
    counts = torch.tensor([int(entries * share) for share in SHARES], device="cuda")
    layer.cut(layer.held([longest]), [places[:, None, :longest] < counts[None, :, None]])
    layer.append(random(TAIL), random(TAIL), places[:, longest:], reserve=2 * TAIL)
    return layer


class Sides:
    """Layers that are read in turn, in the form that each side wants."""

    def __init__(self, entries: int, dtype: torch.dtype) -> None:
        self.bytes = sum(int(entries * share) + TAIL for share in SHARES) * 2 * SIZE * dtype.itemsize
        self.layers = [ragged_layer(entries, dtype) for _ in range(max(2, int(WORKING_SET / self.bytes)))]
        self.query = torch.randn(1, HEADS, 1, SIZE, device="cuda", dtype=dtype)
        self.rectangles = []
        for layer in self.layers:
            held = layer.held([int(layer.cell_counts().max())])[0]
            # Keys a multiple of 8, as the fused kernels of SDPA want their masks.
            fill = (0, 0, 0, -held.keys.shape[2] % 8)
            keys, values = (torch.nn.functional.pad(part, fill) for part in (held.keys, held.values))
            mask = torch.nn.functional.pad(held.valid, (0, fill[3]), value=False)[:, :, None]
            self.rectangles.append((keys, values, mask.expand(-1, -1, HEADS // KV_HEADS, -1).contiguous()))

    def kernels(self, index: int) -> Tensor:
        return triton_decode.attend(self.query, self.layers[index], SCALING)

    def padded(self, index: int) -> Tensor:
        return padded.attend(self.query, self.layers[index], SCALING)

    def sdpa(self, index: int) -> Tensor:
        keys, values, mask = self.rectangles[index]
        rows = self.query.view(1, KV_HEADS, HEADS // KV_HEADS, SIZE)
        return scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=SCALING).view_as(self.query)

    def check(self, label: str) -> None:
        expected = reference.attend(self.query.double(), self.layers[0], SCALING)
        allowed = ALLOWED[self.query.dtype]
        for name, side, factor in (("kernels", self.kernels, 1), ("padded", self.padded, 1), ("SDPA", self.sdpa, 4)):
            error = (side(0).double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            if not error <= factor * allowed:
                raise SystemExit(f"{name}, {label}: off by {error:.2g}, more than {factor * allowed:.2g}; no report")
            print(f"parity, {name}, {label}: {error:.2g} (at most {factor * allowed:.2g})")

    def turning(self, side: Callable[[int], object]) -> Callable[[], None]:
        """`CALLS` calls on one layer after the other."""
        turns = itertools.cycle(range(len(self.layers)))

        def calls() -> None:
            for _ in range(CALLS):
                side(next(turns))

        return calls


def graph(calls: Callable[[], None]) -> Callable[[], None]:
    """The same work without the host's part in it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        calls()
    stream.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        calls()
    return recorded.replay


def alternate(sides: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds of one call of each side: medians of runs that take turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(-3, RUNS):
        for name, calls in sides.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            begin.record()
            calls()
            end.record()
            end.synchronize()
            if run >= 0:
                taken[name].append(1000 * begin.elapsed_time(end) / CALLS)
    return {name: statistics.median(values) for name, values in taken.items()}


def skip(reason: str) -> None:
    print(reason)
    print(json.dumps({"name": "gpu_decode", "skipped": True, "reason": reason}))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        return skip("no GPU here")
    if not triton_decode.is_available():
        return skip("no Triton here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds of one call")
    ratios = {}
    for dtype, entries in itertools.product(ALLOWED, ENTRIES):
        sides, label = Sides(entries, dtype), f"{entries}, {dtype}"
        sides.check(label)
        kernels, sdpa = sides.turning(sides.kernels), sides.turning(sides.sdpa)
        taken = alternate(
            {
                "kernels": kernels,
                "padded path": sides.turning(sides.padded),
                "SDPA": sdpa,
                "kernels, graph": graph(kernels),
                "SDPA, graph": graph(sdpa),
            }
        )
        print(f"{label}: " + ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in taken.items()))
        print(f"{label}: the kernels read {sides.bytes / taken['kernels, graph'] / 1e3:.0f} GB/s\n")
        ratios[f"padded path, {label}"] = taken["padded path"] / taken["kernels"]
        ratios[f"SDPA, {label}"] = taken["SDPA"] / taken["kernels"]
        ratios[f"SDPA, graph, {label}"] = taken["SDPA, graph"] / taken["kernels, graph"]
        if options.tune and dtype == torch.bfloat16:
            tune(sides, label)
    passed = all(ratios[name] >= least for name, least in MUST_REACH.items())
    rounded = {name: round(ratio, 3) for name, ratio in ratios.items()}
    print(json.dumps({"name": "gpu_decode", "ratios": rounded, "must_reach": MUST_REACH, "passed": passed}))
    raise SystemExit(0 if passed else 1)


def tune(sides: Sides, label: str) -> None:
    usual = triton_decode._PROGRAMS
    for programs in (1, 2, 3, 4, 6, 8):
        triton_decode._PROGRAMS = programs
        taken = alternate({"kernels": graph(sides.turning(sides.kernels))})
        print(f"{label}, {programs} programs for each multiprocessor: {taken['kernels']:.1f}")
    triton_decode._PROGRAMS = usual


if __name__ == "__main__":
    main()
