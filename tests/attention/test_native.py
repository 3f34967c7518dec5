"""The compiled attention: what is its own, beside the parity that all paths are tested for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkeep.attention import attend, cells, native, reference
from kvkeep.attention.dispatch import VARIABLE
from kvkeep.errors import UnsupportedError
from kvkeep.store import RaggedLayer

from .paths import needs_native
from .test_parity import SHAPES, TOLERANCE, make, rms_error

INSTRUCTION_SETS = native.instruction_sets()


@pytest.fixture
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer_of(
    counts: list[list[int]],
    tail: int,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    padding: bool = False,
) -> RaggedLayer:
    """A layer of the given entries a cell, with some columns behind them."""
    generator = torch.Generator().manual_seed(seed)
    rows, heads, longest = len(counts), len(counts[0]), max(map(max, counts))

    def random(length: int) -> torch.Tensor:
        return torch.randn(rows, heads, length, size, generator=generator).to(dtype)

    layer = RaggedLayer()
    if longest:
        layer.append(random(longest), random(longest), torch.arange(longest).expand(rows, -1))
        mask = torch.arange(longest) < torch.tensor(counts)[..., None]
        layer.cut(layer.held([longest] * rows), [mask])
    valid = torch.rand(rows, tail, generator=generator) < 0.8 if padding else None
    if valid is not None:
        valid[:, -1] = True
    layer.append(random(tail), random(tail), torch.arange(longest, longest + tail).expand(rows, -1), valid)
    return layer


@needs_native
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_instruction_set_agrees_with_dense_attention(
    instruction_set: str, shape: object, dtype: torch.dtype
) -> None:
    case = make(shape, dtype)  # type: ignore[arg-type]
    ours = native.attend(case.query, case.layer, case.scaling, instruction_set=instruction_set)
    assert rms_error(ours, case.expected) < TOLERANCE[dtype]


@needs_native
def test_an_unknown_instruction_set_is_refused() -> None:
    case = make(SHAPES["decode"], torch.float32)
    with pytest.raises(ValueError, match="unknown instruction set mmx"):
        native.attend(case.query, case.layer, case.scaling, instruction_set="mmx")


@needs_native
@pytest.mark.usefixtures("poisoned", "_restored_threads")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_work_that_is_divided_gives_the_same(data: st.DataObject) -> None:
    """Long cells come in parts that several threads compute and the last one joins."""
    rows, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    counts = [[data.draw(st.integers(0, 1500)) for _ in range(heads)] for _ in range(rows)]
    group, size = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([32, 64, 72, 80, 96, 128, 256]))
    tail = data.draw(st.integers(1, 300))
    queries = data.draw(st.integers(1, min(tail, 40)))
    seed, padding = data.draw(st.integers(0, 999)), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    layer = layer_of(counts, tail, size, dtype, seed, padding)
    query = torch.randn(rows, heads * group, queries, size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = reference.attend(query.double(), layer, size**-0.5)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert rms_error(native.attend(query, layer, size**-0.5), expected) < TOLERANCE[dtype]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_half_precision_number_comes_back_as_it_was(instruction_set: str, dtype: torch.dtype) -> None:
    """The attention over one entry is its value."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = numbers.view(1, -1, 1, 64)
    layer = RaggedLayer()
    layer.append(torch.zeros_like(values), values.clone(), torch.zeros(1, 1))
    query = torch.zeros_like(values)
    ours = native.attend(query, layer, 1.0, instruction_set=instruction_set).reshape(-1)
    finite = numbers.isfinite()
    assert torch.equal(ours[finite], numbers[finite])  # but for the sign of zero, which a sum loses
    assert torch.equal(ours.isnan(), numbers.isnan())
    assert torch.equal(ours[numbers.isinf()], numbers[numbers.isinf()])


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """The mean of two entries, as torch rounds it."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-26, 16, (1, 64, 2, 64), generator=generator)
    values = (torch.randn(1, 64, 2, 64, generator=generator) * 2.0**exponents).to(dtype)
    layer = RaggedLayer()
    layer.append(torch.zeros_like(values), values, torch.arange(2)[None])
    ours = native.attend(torch.zeros(1, 64, 1, 64, dtype=dtype), layer, 1.0)
    assert torch.equal(ours[:, :, 0], ((values[:, :, 0].float() + values[:, :, 1].float()) / 2).to(dtype))


@needs_native
@pytest.mark.usefixtures("_restored_threads")
def test_threads_of_its_own_do_without_an_openmp_runtime() -> None:
    layer = layer_of([[2000, 500, 1300]], 3)
    query = torch.randn(1, 9, 1, 64)
    torch.set_num_threads(3)
    expected = native.attend(query, layer, 0.125)
    native._compiled().use_runtime(0)
    try:
        assert torch.equal(native.attend(query, layer, 0.125), expected)
    finally:
        native._compiled().use_runtime(native._gomp_parallel())


@needs_native
def test_there_is_one_openmp_runtime() -> None:
    """A second one would have threads of its own, which spin while the other's work."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list a process's libraries")
    torch.randn(300, 300) @ torch.randn(300, 300)
    native.attend(torch.randn(1, 9, 1, 64), layer_of([[2000, 500, 1300]], 3), 0.125)
    libraries = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    runtimes = [library for library in libraries if any(name in library for name in ("gomp", "iomp5", "libomp"))]
    assert len(runtimes) == 1


@needs_native
def test_queries_may_be_a_view_of_the_models_projection() -> None:
    """A model makes `[B, q, H, D]` and transposes it."""
    layer = layer_of([[40, 7], [12, 33]], 6)
    flat = torch.randn(2, 5, 6 * 64)
    query = flat.view(2, 5, 6, 64).transpose(1, 2)
    torch.testing.assert_close(
        native.attend(query, layer, 0.125), reference.attend(query.contiguous(), layer, 0.125), rtol=0, atol=2e-6
    )
    strided = torch.randn(2, 6, 5, 128)[..., ::2]
    torch.testing.assert_close(
        native.attend(strided, layer, 0.125), reference.attend(strided.contiguous(), layer, 0.125), rtol=0, atol=2e-6
    )


@needs_native
def test_the_output_needs_no_copy_for_the_model() -> None:
    ours = native.attend(torch.randn(1, 6, 5, 64), layer_of([[40, 7]], 6), 0.125)
    assert ours.transpose(1, 2).is_contiguous()


@needs_native
@pytest.mark.parametrize("kind", ["another dtype", "another size of values", "a view of keys"])
def test_what_it_cannot_read_goes_another_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    layer = RaggedLayer()
    keys, values, query = torch.randn(1, 2, 7, 64), torch.randn(1, 2, 7, 64), torch.randn(1, 6, 1, 64)
    layer.append(keys, values, torch.arange(7)[None])
    assert layer.tail is not None
    if kind == "another dtype":
        query = query.double()
    elif kind == "another size of values":
        layer.tail.values = torch.randn(1, 2, 7, 32)
    else:
        layer.tail.keys = torch.randn(1, 2, 64, 7).transpose(2, 3)
    assert not native.can_attend(query, layer)
    torch.testing.assert_close(attend(query, layer, 0.125), reference.attend(query, layer, 0.125), rtol=0, atol=2e-6)
    monkeypatch.setenv(VARIABLE, "native")
    with pytest.raises(UnsupportedError, match=f"unset {VARIABLE}"):
        attend(query, layer, 0.125)


@needs_native
def test_many_queries_go_to_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    layer = layer_of([[40, 7]], 300)
    assert native.suits(torch.randn(1, 6, 20, 64), layer)
    assert not native.suits(torch.randn(1, 6, 299, 64), layer)


def test_without_the_compiled_code_it_works_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(native, "_module", lambda: None)
    native._warn_once.cache_clear()
    layer, query = layer_of([[40, 7]], 3), torch.randn(1, 6, 1, 64)
    assert native.instruction_sets() == []
    with pytest.warns(UserWarning, match="without its compiled attention"):
        first = attend(query, layer, 0.125)
    assert torch.equal(first, cells.attend(query, layer, 0.125))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(attend(query, layer, 0.125), first)
    monkeypatch.setenv(VARIABLE, "native")
    with pytest.raises(UnsupportedError, match="C\\+\\+ compiler"):
        attend(query, layer, 0.125)
