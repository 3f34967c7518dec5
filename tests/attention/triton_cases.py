"""The Triton kernels against dense attention, on a GPU or in Triton's interpreter.

Whether Triton interprets is settled when it is imported, by a variable that no other test should meet. So
test_triton.py runs this file in a process of its own, once for each way; pytest does not collect it by itself. To run
it alone: `TRITON_INTERPRET=1 pytest tests/attention/triton_cases.py`.

The interpreter takes a twentieth of a second for each program, so shapes are small here.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import attend, triton_decode
from kvkeep.attention.dispatch import VARIABLE
from kvkeep.store import RaggedLayer

from .test_parity import LENGTH, TOLERANCE, Case, Shape, make, rms_error

pytestmark = pytest.mark.usefixtures("poisoned", "_small_blocks")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The interpreter cuts results off at bfloat16, where GPUs round them.
ALLOWED = TOLERANCE | ({torch.bfloat16: 6e-3} if DEVICE.type == "cpu" else {})

SHAPES = {
    "decode": Shape([[5, 11, 37]], tail=1, q=1),
    "one entry each": Shape([[1], [1]], tail=1, q=1, group=1, size=32),
    "empty cells": Shape([[0, 7], [1, 0]], tail=3, q=1, group=2, size=33),
    "nothing kept, padding": Shape([[0], [0]], tail=5, q=2, group=1, size=80, padding=True),
    "a group of 8": Shape([[LENGTH, 20]], tail=21, q=1, group=8, size=128),
    "large head": Shape([[31, 4]], tail=5, q=1, group=6, size=256),
    "padding": Shape([[13], [2], [20]], tail=17, q=1, group=5, size=96, padding=True),
    "several queries": Shape([[13, 30]], tail=6, q=4, group=3, size=72),
    "no prefix": Shape(None, tail=23, q=1, group=2),
}


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 entries at a time: the short cells of these tests take several blocks."""
    monkeypatch.setattr(triton_decode, "_BLOCK_ELEMENTS", dict.fromkeys(DTYPES, 1))


def moved(layer: RaggedLayer, device: torch.device) -> RaggedLayer:
    """The layer itself with its tensors, slack included, on another device."""
    for name in ("prefix", "tail"):
        part = getattr(layer, name)
        if part is not None:
            fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
            tensors = {n: value.to(device) for n, value in fields.items() if isinstance(value, Tensor)}
            setattr(layer, name, dataclasses.replace(part, **tensors))
    return layer


def on_device(shape: Shape, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> Case:
    case = make(shape, dtype, seed, spread)
    return dataclasses.replace(
        case, layer=moved(case.layer, DEVICE), query=case.query.to(DEVICE), expected=case.expected.to(DEVICE)
    )


def run(case: Case, parts: int | None = 2) -> Tensor:
    return triton_decode.attend(case.query, case.layer, case.scaling, parts=parts)


@pytest.mark.parametrize(
    ("dtype", "parts"),
    [(torch.float32, 1), (torch.float32, 5), (torch.float16, 2), (torch.bfloat16, 1), (torch.bfloat16, 2)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_agrees_with_dense_attention(shape: Shape, dtype: torch.dtype, parts: int) -> None:
    case = on_device(shape, dtype)
    ours = run(case, parts)
    assert ours.shape == case.query.shape
    assert ours.dtype == dtype
    assert rms_error(ours, case.expected) < ALLOWED[dtype]
    assert ours[case.expected == 0].eq(0).all()


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    rows, heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]))
    tail = draw(st.integers(1, 40))
    row = st.lists(st.integers(0, LENGTH), min_size=heads, max_size=heads)
    return Shape(
        counts=draw(st.none() | st.lists(row, min_size=rows, max_size=rows)),
        tail=tail,
        q=min(tail, draw(st.sampled_from([1, 1, 1, 2, 3]))),
        group=draw(st.integers(1, 8)),
        size=draw(st.sampled_from([32, 33, 64, 80, 96, 127, 128, 256])),
        padding=draw(st.booleans()),
        rows=rows,
        kv_heads=heads,
    )


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes(),
    dtype=st.sampled_from(DTYPES),
    parts=st.sampled_from([1, 1, 2, 5, None]),
    seed=st.integers(0, 999),
)
def test_it_agrees_on_random_shapes(shape: Shape, dtype: torch.dtype, parts: int | None, seed: int) -> None:
    case = on_device(shape, dtype, seed)
    ours = run(case, parts)
    assert ours.isfinite().all()
    difference = (ours.double() - case.expected).abs().max() / case.expected.square().mean().sqrt().clamp(min=1e-3)
    assert difference < 20 * ALLOWED[dtype]


def test_more_queries_than_one_tile() -> None:
    """24 queries of 3 heads are 72 rows, of which a program has 64."""
    case = on_device(Shape([[9]], tail=30, q=24, group=3, size=32), torch.float32)
    assert rms_error(run(case, 1), case.expected) < TOLERANCE[torch.float32]


def test_more_parts_than_are_joined_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "_JOINED", 2)
    case = on_device(SHAPES["decode"], torch.float32)
    assert rms_error(run(case, 5), case.expected) < TOLERANCE[torch.float32]


def test_whole_blocks_as_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of the small blocks
    case = on_device(SHAPES["a group of 8"], torch.float16)
    assert rms_error(run(case, None), case.expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_has_no_weight(dtype: torch.dtype) -> None:
    case = on_device(SHAPES["padding"], dtype)
    before = run(case)
    tail = case.layer.tail
    assert tail is not None
    assert tail.valid is not None
    for part in (tail.keys, tail.values):
        part.masked_fill_(~tail.valid[:, None, :, None], torch.nan)
    assert torch.equal(before, run(case))


@pytest.mark.parametrize("parts", [1, 2])
def test_one_cells_values_do_not_reach_another(parts: int) -> None:
    case = on_device(SHAPES["decode"], torch.float32)
    before = run(case, parts)
    assert case.layer.prefix is not None
    case.layer.prefix.values[5:16] = torch.inf
    after = run(case, parts)
    assert torch.equal(before[:, :3], after[:, :3])
    assert torch.equal(before[:, 6:], after[:, 6:])
    assert after[:, 3:6].isinf().all()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_a_nan_that_is_seen_is_shown(kind: str, parts: int) -> None:
    case = on_device(SHAPES["padding"], torch.float32)
    getattr(case.layer.prefix, kind)[0] = torch.nan
    ours = run(case, parts)
    assert ours[0].isnan().all()
    assert ours[1:].isfinite().all()


def test_large_keys_are_finite_in_float16() -> None:
    """A dot product beyond 65504 overflows float16 before it is scaled."""
    case = on_device(SHAPES["a group of 8"], torch.float16, spread=60.0)
    assert case.layer.prefix is not None
    assert (case.query[0, :8, 0].double() @ case.layer.prefix.keys[:LENGTH].double().T).abs().max() > 65504
    ours = run(case)
    assert ours.isfinite().all()
    assert rms_error(ours, case.expected) < TOLERANCE[torch.float16]


def test_slack_is_not_read_after_a_rewind() -> None:
    case = on_device(SHAPES["decode"], torch.float32)
    before = run(case)
    future = torch.full((1, 3, 5, 64), torch.nan, device=DEVICE)
    case.layer.append(future, future, torch.arange(5, device=DEVICE)[None])
    case.layer.rewind(1)
    assert torch.equal(before, run(case))


def test_tensors_may_be_views_of_the_models_projections() -> None:
    """A model makes `[B, q, H, D]` and transposes it; the first tokens of a layer stay as they came."""
    layer = RaggedLayer()
    keys, values = (torch.randn(1, 20, 2, 64, device=DEVICE).transpose(1, 2) for _ in range(2))
    layer.append(keys, values, torch.arange(20, device=DEVICE)[None])
    assert layer.tail is not None
    assert not layer.tail.keys.is_contiguous()
    query = torch.randn(1, 2, 4, 64, device=DEVICE).transpose(1, 2)
    ours = triton_decode.attend(query, layer, 0.125)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(),
        keys.double().repeat_interleave(2, dim=1),
        values.double().repeat_interleave(2, dim=1),
        attn_mask=torch.ones(2, 20, dtype=torch.bool, device=DEVICE).tril(18),
        scale=0.125,
    )
    assert rms_error(ours, expected) < TOLERANCE[torch.float32]
    strided = torch.randn(1, 4, 2, 128, device=DEVICE)[..., ::2]
    assert torch.equal(
        triton_decode.attend(strided, layer, 0.125), triton_decode.attend(strided.contiguous(), layer, 0.125)
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_the_output_needs_no_copy_for_the_model(parts: int) -> None:
    case = on_device(SHAPES["several queries"], torch.float32)
    assert run(case, parts).transpose(1, 2).is_contiguous()


def test_queries_need_their_own_keys() -> None:
    case = on_device(SHAPES["decode"], torch.float32)
    with pytest.raises(RuntimeError, match="appended"):
        triton_decode.attend(case.query.repeat(1, 1, 2, 1), case.layer, case.scaling)


def test_the_environment_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    case = on_device(SHAPES["one entry each"], torch.float32)
    monkeypatch.setenv(VARIABLE, "triton")
    ours = attend(case.query, case.layer, case.scaling)
    assert torch.equal(ours, run(case, None))


def test_the_interpreter_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    case = make(SHAPES["decode"], torch.float32)
    assert not triton_decode.suits(case.query, case.layer)
    assert triton_decode.suits(case.query.to(DEVICE), moved(case.layer, DEVICE)) == (DEVICE.type == "cuda")
