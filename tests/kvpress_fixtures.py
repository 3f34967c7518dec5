"""Reads the fixtures that kvpress wrote (fixtures/kvpress/README.md); needs neither kvpress nor transformers.

    fixtures = load()
    case = fixtures.cases["snapkv@0.5"]
    layer = fixtures.layers[0]           # queries, keys and values of the prompt, the same for every case
    case.scores[0]                       # [H_kv, L], what kvpress scored in layer 0
    case.kept[0][1]                      # ascending positions that KV head 1 of layer 0 keeps
    case.logits                          # the question's 5 rows and 3 greedy rows, after compression

`B` is 1 and left out, except in the tensors of `LayerInput`, which have the shapes that an observation has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent / "fixtures" / "kvpress"
MODEL_FOLDER = FOLDER / "model"  # for LlamaForCausalLM.from_pretrained


@dataclass(frozen=True)
class LayerInput:
    """What one layer's attention saw while the prompt was processed; float32.

    Attributes:
        queries: [1, H, L, D], after RoPE at positions 0 .. L-1.
        queries_pre: [1, H, L, D], the same before RoPE.
        keys: [1, H_kv, L, D], after RoPE.
        values: [1, H_kv, L, D].
    """

    queries: Tensor
    queries_pre: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Case:
    """One press at one ratio. Lists have one item a layer.

    Attributes:
        name: `press@ratio`, or `full` for the uncompressed cache.
        press: name without the ratio; None for `full`.
        press_class: class name in kvpress; None for `full`.
        options: the arguments of the press, without the ratio; of the inner press too, whose short name is `press`.
        compression_ratio: fraction removed.
        kind: `cut` (tensors are shortened, all KV heads of a layer alike), `masked` (AdaKV: heads differ), or `full`.
        scores: [layers, H_kv, L] float32 of the press, or of its inner scorer before anything is forced by AdaKV.
        kept: kept[layer][kv head], int64 positions [n], ascending.
        kept_order: kept_order[layer], int64 [H_kv, n], in the order in which kvpress stores the entries; `cut` only.
        evicted_order: evicted_order[layer], int64 [2, n] of (KV head, position), in kvpress's order; `masked` only.
        chunk_scores: [layers, C] float32, ChunkKV only.
        chunks: chunks[layer], the chosen chunks, best first, ChunkKV only.
        margin: relative distance between the worst kept and the best evicted score (or chunk score), by layer.
        logits: [5 + 3, vocabulary] float32: the question's rows, then one row for each greedy token that was fed.
        greedy: the three greedy tokens; greedy[i] is the argmax of row 4 + i and was fed at position L + 5 + i.
        question_block: the question went in as one block; False: token by token, since layers differ in length.
        reference_difference: largest distance of `logits` from attention over the whole cache, evicted entries at -inf.
    """

    name: str
    press: str | None
    press_class: str | None
    options: dict[str, Any]
    compression_ratio: float
    kind: Literal["cut", "masked", "full"]
    scores: Tensor | None
    kept: tuple[tuple[Tensor, ...], ...]
    kept_order: tuple[Tensor, ...] | None
    evicted_order: tuple[Tensor, ...] | None
    chunk_scores: Tensor | None
    chunks: tuple[tuple[int, ...], ...] | None
    margin: tuple[float, ...]
    logits: Tensor
    greedy: tuple[int, ...]
    question_block: bool
    reference_difference: float


@dataclass(frozen=True)
class KeptCount:
    """How many of `length` entries kvpress keeps in each KV head (`compute_n_kept`, floats and all)."""

    length: int
    compression_ratio: float
    kept: int


@dataclass(frozen=True)
class PyramidCount:
    """How many entries PyramidKVPress keeps in each KV head of layer 0, 1, ..., window included."""

    length: int
    compression_ratio: float
    window_size: int
    beta: int
    layers: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Fixtures:
    """Everything in the folder.

    Attributes:
        layers: the three layers' inputs.
        cases: by name, `full` first.
        input_ids: [L] int64, the prompt.
        question_ids: [5] int64.
        inv_freq: [D / 2] float32, RoPE's frequencies (halves are rotated, not neighbours).
        prompt_logits: [vocabulary] float32, the last row of the prompt.
        scale: what attention scores are multiplied with, D ** -0.5.
        versions: of kvpress, transformers, torch, safetensors and Python.
        kept_counts, pyramid_counts: budgets on a grid of lengths and ratios.
    """

    layers: tuple[LayerInput, ...]
    cases: dict[str, Case]
    input_ids: Tensor
    question_ids: Tensor
    inv_freq: Tensor
    prompt_logits: Tensor
    scale: float
    versions: dict[str, str]
    kept_counts: tuple[KeptCount, ...]
    pyramid_counts: tuple[PyramidCount, ...]


@cache
def _index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads((FOLDER / "fixtures.json").read_text())
    return index


def case_names(*presses: str) -> list[str]:
    """Names of the compressed cases, for parametrised tests: all, or those of the given presses. Reads no tensor."""
    compressed = [entry for entry in _index()["cases"] if entry["press"]]
    known = {entry["press"] for entry in compressed}
    if not known.issuperset(presses):
        raise KeyError(f"expected presses among {sorted(known)}; received {presses}")
    return [entry["name"] for entry in compressed if not presses or entry["press"] in presses]


@cache
def load() -> Fixtures:
    """All fixtures; read once a process. Tests must not write into the tensors."""
    index = _index()
    tensors = load_file(FOLDER / "fixtures.safetensors")
    parts = [tensors[name] for name in ("queries", "queries_pre", "keys", "values")]
    return Fixtures(
        layers=tuple(LayerInput(*(part[i : i + 1] for part in parts)) for i in range(index["layers"])),
        cases={entry["name"]: _case(entry, index, tensors) for entry in index["cases"]},
        input_ids=tensors["input_ids"],
        question_ids=tensors["question_ids"],
        inv_freq=tensors["inv_freq"],
        prompt_logits=tensors["logits/prompt_last"],
        scale=index["scale"],
        versions=index["versions"],
        kept_counts=tuple(KeptCount(*row) for row in index["counts"]["n_kept"]),
        pyramid_counts=tuple(
            PyramidCount(**(row | {"kept": tuple(row["kept"])})) for row in index["counts"]["pyramid"]
        ),
    )


def _case(entry: dict[str, Any], index: dict[str, Any], tensors: dict[str, Tensor]) -> Case:
    name, kind = entry["name"], entry["kind"]
    layers, heads, length = range(index["layers"]), index["kv_heads"], index["length"]
    kept_order = tuple(tensors[f"kept/{name}/{i}"].long() for i in layers) if kind == "cut" else None
    evicted_order = tuple(tensors[f"evicted/{name}/{i}"].long() for i in layers) if kind == "masked" else None

    kept = []
    for i in layers:
        stays = torch.ones(heads, length, dtype=torch.bool)
        if kept_order is not None:
            stays = torch.zeros_like(stays).scatter_(1, kept_order[i], True)
        elif evicted_order is not None:
            stays[evicted_order[i][0], evicted_order[i][1]] = False
        kept.append(tuple(row.nonzero()[:, 0] for row in stays))

    return Case(
        name=name,
        press=entry["press"],
        press_class=entry["class"],
        options=entry["options"],
        compression_ratio=entry["compression_ratio"],
        kind=kind,
        scores=tensors[entry["scores"]] if entry["scores"] else None,
        kept=tuple(kept),
        kept_order=kept_order,
        evicted_order=evicted_order,
        chunk_scores=tensors[entry["chunk_scores"]] if "chunk_scores" in entry else None,
        chunks=tuple(tuple(chosen) for chosen in entry["chunks"]) if "chunks" in entry else None,
        margin=tuple(entry["margin"]),
        logits=tensors[f"logits/{name}"],
        greedy=tuple(entry["greedy"]),
        question_block=entry["question_block"],
        reference_difference=entry["reference_difference"],
    )
