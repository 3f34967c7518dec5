"""Every attention path against a dense oracle: softmax over everything in float64, with -inf at what was evicted.

Slack is NaN in all of these tests, and so are keys and values at padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import attend, attend_prompt, dispatch, joint, native
from kvkeep.attention.dispatch import VARIABLE
from kvkeep.errors import UnsupportedError
from kvkeep.store import RaggedLayer

from .paths import PATH_PARAMETERS, PATHS

pytestmark = pytest.mark.usefixtures("poisoned")

# Error of the output by its root mean square, as a share of the oracle's. Scores, softmax and sums are float32 for half
# precision too, so what remains there is one rounding of weights' products to the dtype: about 2^-9 / sqrt(3) and less.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
LENGTH = 37  # of the prompt


@dataclass(frozen=True)
class Shape:
    """Entries kept of the prompt by row and head (None: no cut at all), and the tail."""

    counts: list[list[int]] | None
    tail: int
    q: int
    group: int = 3
    size: int = 64
    padding: bool = False
    rows: int = 1
    kv_heads: int = 2

    @property
    def cells(self) -> tuple[int, int]:
        return (self.rows, self.kv_heads) if self.counts is None else (len(self.counts), len(self.counts[0]))


SHAPES = {
    "decode": Shape([[5, 11, 3]], tail=1, q=1),
    "heads of 3 and 9 entries": Shape([[3, 9]], tail=4, q=1, group=1),
    "empty cells": Shape([[0, 7], [1, 0]], tail=3, q=2, group=2, size=33),
    "nothing kept": Shape([[0, 0]], tail=5, q=5, group=1, size=32),
    "nothing kept, padding": Shape([[0, 0], [0, 0]], tail=5, q=5, group=2, size=32, padding=True),
    "empty cells, padding": Shape([[0, 5, 2], [4, 0, 0]], tail=7, q=7, group=2, padding=True),
    "all kept": Shape([[LENGTH, LENGTH]], tail=2, q=1, group=8),
    "one entry each": Shape([[1, 1], [1, 1]], tail=9, q=4, group=4, size=96),
    "uniform, padding": Shape([[6, 6], [6, 6], [6, 6]], tail=21, q=13, group=3, padding=True),
    "ragged, many queries": Shape([[13, 30, 8], [2, 37, 1]], tail=40, q=40, group=7, size=128),
    "ragged, padding": Shape([[13, 30], [2, 37], [20, 5]], tail=17, q=11, group=5, size=65, padding=True),
    "large head": Shape([[31, 4]], tail=19, q=3, group=6, size=256),
    "no prefix": Shape(None, tail=23, q=5, group=2),
    "no prefix, padding": Shape(None, tail=23, q=23, group=2, padding=True, rows=3),
}


@dataclass(frozen=True)
class Case:
    layer: RaggedLayer
    query: Tensor  # [B, H, q, D]
    expected: Tensor  # [B, H, q, D] float64
    scaling: float


def make(shape: Shape, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> Case:
    """A layer that was cut and went on, and what dense attention gives there."""
    generator = torch.Generator().manual_seed(seed)
    (rows, heads), size = shape.cells, shape.size
    prompt = 0 if shape.counts is None else LENGTH
    total = prompt + shape.tail

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    keys, values = (random(rows, heads, total, size) * spread).to(dtype), random(rows, heads, total, size).to(dtype)
    query = (random(rows, heads * shape.group, shape.q, size) * spread).to(dtype)
    valid = None
    if shape.padding:  # on the left in most rows, anywhere in the last one
        valid = torch.arange(shape.tail) >= torch.randint(0, shape.tail, (rows, 1), generator=generator)
        valid[-1] = torch.rand(shape.tail, generator=generator) < 0.7

    keep = torch.zeros(rows, heads, prompt, dtype=torch.bool)
    layer = RaggedLayer()
    if shape.counts is not None:
        for row, counts in enumerate(shape.counts):
            for head, count in enumerate(counts):
                keep[row, head, torch.randperm(prompt, generator=generator)[:count]] = True
        layer.append(keys[:, :, :prompt], values[:, :, :prompt], torch.arange(prompt).expand(rows, -1))
        layer.cut(layer.held([prompt] * rows), [keep])
    stored = keys.clone(), values.clone()
    if valid is not None:
        for tensor in stored:
            tensor[:, :, prompt:].masked_fill_(~valid[:, None, :, None], torch.nan)
    for start in range(0, shape.tail, 6):  # some columns at a time, so that there is slack behind them
        columns = slice(prompt + start, prompt + min(start + 6, shape.tail))
        layer.append(
            stored[0][:, :, columns],
            stored[1][:, :, columns],
            torch.arange(columns.start, columns.stop).expand(rows, -1),
            None if valid is None else valid[:, columns.start - prompt : columns.stop - prompt],
        )

    places = torch.arange(total)
    visible = (places <= places[total - shape.q :, None]).repeat(rows, heads, 1, 1)  # [B, H_kv, q, total]
    visible[..., :prompt] &= keep[:, :, None]
    if valid is not None:
        visible[..., prompt:] &= valid[:, None, None]
    expected = dense(query, keys, values, visible, size**-0.5)
    return Case(layer, query, expected, size**-0.5)


def dense(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """`[B, H, q, D]` float64, zeros where nothing is visible; `visible [B, H_kv, q, n]`."""
    group = query.shape[1] // keys.shape[1]
    keys, values, visible = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values, visible))
    scores = query.double() @ keys.double().transpose(2, 3) * scaling
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0) @ values.double()


def rms_error(ours: Tensor, expected: Tensor) -> float:
    error = (ours.double() - expected).square().mean().sqrt()
    return float(error / expected.square().mean().sqrt())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("path", PATH_PARAMETERS)
def test_paths_agree_with_dense_attention(path: str, shape: Shape, dtype: torch.dtype) -> None:
    case = make(shape, dtype)
    ours = PATHS[path](case.query, case.layer, case.scaling)
    assert ours.shape == case.query.shape
    assert ours.dtype == dtype
    assert rms_error(ours, case.expected) < TOLERANCE[dtype]
    assert ours[case.expected == 0].eq(0).all()


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    rows, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tail = draw(st.integers(1, 40))
    cell = st.integers(0, LENGTH)
    row = st.lists(cell, min_size=heads, max_size=heads)
    return Shape(
        counts=draw(st.none() | st.lists(row, min_size=rows, max_size=rows)),
        tail=tail,
        q=draw(st.integers(1, tail)),
        group=draw(st.integers(1, 8)),
        size=draw(st.sampled_from([32, 33, 64, 80, 127])),
        padding=draw(st.booleans()),
        rows=rows,
        kv_heads=heads,
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes(), seed=st.integers(0, 999), elements=st.sampled_from([1, 500, 2**24]))
def test_paths_agree_on_random_shapes(shape: Shape, seed: int, elements: int) -> None:
    case = make(shape, torch.float64, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "_BLOCK_ELEMENTS", elements)
        for attend_path in PATHS.values():
            ours = attend_path(case.query, case.layer, case.scaling)
            torch.testing.assert_close(ours, case.expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("elements", [1, 200, 1000])
@pytest.mark.parametrize("path", ["padded", "cells"])
@pytest.mark.parametrize("name", ["ragged, many queries", "ragged, padding", "no prefix, padding"])
def test_blocks_of_queries_change_nothing(name: str, path: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SHAPES[name], torch.float64)
    blocks = []
    monkeypatch.setattr(joint, "_BLOCK_ELEMENTS", elements)
    inner = joint.attend_pieces

    def spy(query: Tensor, *args: Any) -> Tensor:
        blocks.append(query.shape[-2])
        return inner(query, *args)

    monkeypatch.setattr(f"kvkeep.attention.{path}.attend_pieces", spy)
    ours = PATHS[path](case.query, case.layer, case.scaling)
    assert max(blocks) < case.query.shape[2]
    torch.testing.assert_close(ours, case.expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_p85_padding_of_a_rectangle_has_no_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere short heads are filled up with zeros, which take part in the softmax."""
    case = make(SHAPES["heads of 3 and 9 entries"], dtype)
    before = PATHS["padded"](case.query, case.layer, case.scaling)
    padded_prefix = case.layer.padded_prefix
    filled = []

    def with_large_padding(first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values, positions, valid = padded_prefix(first, last)
        large = min(1e30, torch.finfo(dtype).max)
        filled.append(int((~valid).sum()))
        return (*(tensor.masked_fill(~valid[..., None], large) for tensor in (keys, values)), positions, valid)  # type: ignore[return-value]

    monkeypatch.setattr(case.layer, "padded_prefix", with_large_padding)
    after = PATHS["padded"](case.query, case.layer, case.scaling)
    assert filled == [6]
    assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("path", PATH_PARAMETERS)
def test_p85_padding_in_the_tail_has_no_weight(path: str, dtype: torch.dtype) -> None:
    case = make(SHAPES["ragged, padding"], dtype)
    before = PATHS[path](case.query, case.layer, case.scaling)
    tail = case.layer.tail
    assert tail is not None
    assert tail.valid is not None
    large = min(1e30, torch.finfo(dtype).max)
    tail.keys.masked_fill_(~tail.valid[:, None, :, None], large)
    tail.values.masked_fill_(~tail.valid[:, None, :, None], large)
    assert torch.equal(before, PATHS[path](case.query, case.layer, case.scaling))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("path", PATH_PARAMETERS)
def test_one_cells_values_do_not_reach_another(path: str, dtype: torch.dtype) -> None:
    """A weight of zero does not stop an infinite value, so a short cell must not be filled up with its neighbour's."""
    case = make(SHAPES["heads of 3 and 9 entries"], dtype)
    before = PATHS[path](case.query, case.layer, case.scaling)
    assert case.layer.prefix is not None
    case.layer.prefix.values[3:] = torch.inf
    after = PATHS[path](case.query, case.layer, case.scaling)
    assert torch.equal(before[:, 0], after[:, 0])
    assert after[:, 1].isinf().all()


@pytest.mark.parametrize("path", PATH_PARAMETERS)
def test_a_nan_that_is_seen_is_shown(path: str) -> None:
    """Padding is the only reason for zeros; an error of the model must not be hidden behind them."""
    case = make(SHAPES["ragged, padding"], torch.float32)
    assert case.layer.prefix is not None
    case.layer.prefix.keys[0] = torch.nan
    ours = PATHS[path](case.query, case.layer, case.scaling)
    group = SHAPES["ragged, padding"].group
    assert ours[0, :group].isnan().all()
    assert ours[1:].isfinite().all()


@pytest.mark.parametrize("path", PATH_PARAMETERS)
def test_p01_large_keys_are_finite_in_float16(path: str) -> None:
    """A dot product beyond 65504 overflows float16 before it is scaled."""
    case = make(SHAPES["ragged, many queries"], torch.float16, spread=60.0)
    assert case.layer.prefix is not None
    assert (case.query[0, 0].double() @ case.layer.prefix.keys[:13].double().T).abs().max() > 65504
    ours = PATHS[path](case.query, case.layer, case.scaling)
    assert ours.isfinite().all()
    assert rms_error(ours, case.expected) < TOLERANCE[torch.float16]


def test_slack_is_not_read_after_a_rewind() -> None:
    case = make(SHAPES["decode"], torch.float64)
    before = {path: run(case.query, case.layer, case.scaling) for path, run in PATHS.items()}
    future = torch.full((1, 3, 5, 64), torch.nan, dtype=torch.float64)
    case.layer.append(future, future, torch.arange(5)[None])
    case.layer.rewind(1)
    for path, run in PATHS.items():
        assert torch.equal(before[path], run(case.query, case.layer, case.scaling))


@pytest.mark.parametrize("path", ["padded", "cells"])
def test_queries_need_their_own_keys(path: str) -> None:
    case = make(SHAPES["decode"], torch.float32)
    with pytest.raises(RuntimeError, match="appended"):
        PATHS[path](case.query.repeat(1, 1, 2, 1), case.layer, case.scaling)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("length", "group", "size"), [(1, 3, 64), (2, 1, 32), (41, 8, 33), (100, 3, 64), (63, 2, 256)])
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_prompt_agrees_with_dense_attention(
    length: int, group: int, size: int, spread: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, length, size, generator=generator).to(dtype) for heads in (2 * group, 2, 2)
    )
    query, keys = query * spread, keys * spread
    visible = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 2, -1, -1)
    expected = dense(query, keys, values, visible, size**-0.5)
    ours = attend_prompt(query, keys, values, size**-0.5)
    assert ours.dtype == dtype
    # A score of 30,000 is off by 0.002 in float32, whatever the dtype of the keys.
    assert rms_error(ours, expected) < max(TOLERANCE[dtype], 0 if spread == 1 else 5e-5)


def seen_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    called: list[str] = []

    def spy(name: str, path: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: called.append(name) or path(*args)  # type: ignore[func-returns-value]

    monkeypatch.setattr(dispatch, "PATHS", {name: spy(name, path) for name, path in PATHS.items()})
    return called


@pytest.mark.parametrize("name", PATH_PARAMETERS)
def test_the_environment_selects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SHAPES["decode"], torch.float32)
    called = seen_by(monkeypatch)
    monkeypatch.setenv(VARIABLE, name)
    attend(case.query, case.layer, case.scaling)
    assert called == [name]


@pytest.mark.parametrize(("shape", "expected"), [("decode", "cells"), ("all kept", "padded"), ("no prefix", "padded")])
def test_the_layer_selects(shape: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SHAPES[shape], torch.float32)
    called = seen_by(monkeypatch)
    monkeypatch.setattr(native, "suits", lambda query, layer: False)
    monkeypatch.delenv(VARIABLE, raising=False)
    attend(case.query, case.layer, case.scaling)
    assert called == [expected]


def test_an_unknown_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SHAPES["decode"], torch.float32)
    monkeypatch.setenv(VARIABLE, "paded")
    with pytest.raises(UnsupportedError, match=r"'paded'; did you mean 'padded'.*cells, native, padded, reference"):
        attend(case.query, case.layer, case.scaling)
