"""Attention of many tokens by `varlen_attn`: on the CPU with a naive function of its form, on a GPU with torch's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import varlen
from kvkeep.store import RaggedLayer

from .test_parity import SHAPES, TOLERANCE, make, rms_error, shapes
from .triton_cases import moved

pytestmark = pytest.mark.usefixtures("poisoned")

WITHOUT_PADDING = {name: shape for name, shape in SHAPES.items() if not shape.padding}
LAYOUTS = ("heads first", "queries first", "padded")


def naive_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,
    scale: float,
    window_size: tuple[int, int],
    layout: str = "heads first",
    corner: str = "lower right",
) -> tuple[Tensor, Tensor]:
    """Torch's function, sequence by sequence: outputs `[T_q, H, D]`, log-sum-exp in one of the layouts there are."""
    assert return_aux.lse
    assert window_size in ((-1, -1), (-1, 0))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert len(cu_seq_q) == len(cu_seq_k)
    assert query.shape[1] == key.shape[1] == value.shape[1] == 1
    lengths_q, lengths_k = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max(lengths_q), max(lengths_k)) == (max_q, max_k)
    assert (sum(lengths_q), sum(lengths_k)) == (len(query), len(key)) == (len(query), len(value))
    outputs, sums = [], []
    for q, k, v in zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True):
        scores = q[:, 0] @ k[:, 0].T * scale
        if window_size == (-1, 0):
            shift = len(k) - len(q) if corner == "lower right" else 0
            future = torch.arange(len(k)) > torch.arange(len(q))[:, None] + shift
            scores = scores.masked_fill(future, -torch.inf)
        outputs.append(scores.softmax(-1) @ v[:, 0] if len(k) else torch.zeros_like(q[:, 0]))
        sums.append(scores.logsumexp(-1) if len(k) else q.new_full((len(q),), torch.inf))
    lse = {
        "heads first": lambda: torch.cat(sums)[None],
        "queries first": lambda: torch.cat(sums)[:, None],
        "padded": lambda: torch.stack(sums)[:, None],  # all sequences have equally many queries
    }[layout]()
    return torch.cat(outputs)[:, None], lse


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", WITHOUT_PADDING.values(), ids=WITHOUT_PADDING)
def test_it_agrees_with_dense_attention(shape: Any, layout: str) -> None:
    case = make(shape, torch.float64)
    function = partial(naive_varlen_attn, layout=layout)
    ours = varlen.attend(case.query, case.layer, case.scaling, function=function)
    assert ours.shape == case.query.shape
    assert ours.dtype == torch.float64
    assert rms_error(ours, case.expected) < TOLERANCE[torch.float64]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes(), seed=st.integers(0, 999), corner=st.sampled_from(["lower right", "upper left"]))
def test_it_agrees_on_random_shapes(shape: Any, seed: int, corner: str) -> None:
    """Whichever corner a causal mask is aligned to."""
    case = make(replace(shape, padding=False), torch.float64, seed)
    function = partial(naive_varlen_attn, corner=corner)
    ours = varlen.attend(case.query, case.layer, case.scaling, function=function)
    torch.testing.assert_close(ours, case.expected, rtol=0, atol=1e-12)


def test_results_are_rounded_once() -> None:
    """Pieces in half precision are joined in float32."""
    case = make(SHAPES["ragged, many queries"], torch.bfloat16)

    def function(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, lse = naive_varlen_attn(query.float(), key.float(), value.float(), *args, **kwargs)
        return output.bfloat16(), lse

    ours = varlen.attend(case.query, case.layer, case.scaling, function=function)
    assert ours.dtype == torch.bfloat16
    assert rms_error(ours, case.expected) < 2 * TOLERANCE[torch.bfloat16]  # each piece was rounded, and the result


def test_a_nan_that_is_seen_is_shown() -> None:
    """Flash attention's log-sum-exp of a NaN is infinite, as that of nothing is."""
    case = make(SHAPES["ragged, many queries"], torch.float32)
    assert case.layer.prefix is not None
    case.layer.prefix.keys[0] = torch.nan

    def function(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, lse = naive_varlen_attn(*args, **kwargs)
        return output, lse.masked_fill(lse.isnan(), torch.inf)

    ours = varlen.attend(case.query, case.layer, case.scaling, function=function)
    group = SHAPES["ragged, many queries"].group
    assert ours[0, :group].isnan().all()
    assert ours[0, group:].isfinite().all()
    assert ours[1:].isfinite().all()


def on_meta(dtype: torch.dtype) -> tuple[Tensor, RaggedLayer]:
    case = make(SHAPES["ragged, many queries"], dtype)
    return case.query.to("meta"), moved(case.layer, torch.device("meta"))


def test_torchs_function_takes_the_call() -> None:
    """Without a GPU, torch goes through the call with tensors that have shapes and no numbers."""
    function = varlen._varlen_attn()
    if function is None:
        pytest.skip("this torch has no varlen_attn that takes a scale")
    query, layer = on_meta(torch.bfloat16)
    ours = varlen.attend(query, layer, 0.125, function=function)
    assert (ours.shape, ours.dtype, ours.device.type) == (query.shape, torch.bfloat16, "meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_agrees_on_a_gpu(dtype: torch.dtype) -> None:
    if varlen._varlen_attn() is None:
        pytest.skip("this torch has no varlen_attn that takes a scale")
    for name, shape in WITHOUT_PADDING.items():
        case = make(shape, dtype)
        query, layer = case.query.cuda(), moved(case.layer, torch.device("cuda"))
        assert varlen.can_attend(query, layer) == (shape.size % 8 == 0), name
        if shape.size % 8 == 0:
            ours = varlen.attend(query, layer, case.scaling).cpu()
            # Weights are rounded, then each piece, then the result.
            assert rms_error(ours, case.expected) < 3 * TOLERANCE[dtype], name
