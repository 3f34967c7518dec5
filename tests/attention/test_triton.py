"""The Triton kernels: results, in processes of their own (see triton_cases.py); whether they compile; the choice."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.attention import attend, dispatch, triton_decode, varlen
from kvkeep.attention.dispatch import VARIABLE
from kvkeep.errors import UnsupportedError

from .test_parity import SHAPES, make

CASES = Path(__file__).with_name("triton_cases.py")
ROOT = CASES.parents[2]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def outcome(*command: str, **variables: str) -> str:
    """What a new process prints, which must succeed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", VARIABLE)}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@needs_triton
def test_results_in_the_interpreter() -> None:
    assert " passed" in outcome("-m", "pytest", "-p", "no:cacheprovider", "-v", str(CASES), TRITON_INTERPRET="1")


@pytest.mark.slow
@needs_triton
@needs_gpu
def test_results_on_the_gpu() -> None:
    assert " passed" in outcome("-m", "pytest", "-p", "no:cacheprovider", "-v", str(CASES))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("generation", "dtype", "size", "joins", "padding"),
    [(80, "bf16", 128, True, True), (90, "bf16", 64, True, False), (90, "fp16", 80, False, False)],
)
def test_the_kernels_compile_for_gpus(
    generation: int,
    dtype: str,
    size: int,
    joins: bool,
    padding: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The interpreter knows no types and no limits of a GPU; Triton's compiler does, and needs none to be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvkeep.attention import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    torch_type = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    columns = triton_decode._power_of_two(size)
    constants: dict[str, Any] = {
        "SIZE": size,
        "COLUMNS": columns,
        "ROWS": 16,
        "ENTRIES": triton_decode._block_entries(torch_type, columns),
        "FACTOR": triton_kernels.factor(torch_type),
        "PARTS": triton_decode._JOINED,
    }
    if not joins:
        constants["lse"] = None
    if not padding:
        constants["tail_valid"] = None
    types = dict.fromkeys(("query", "output", "keys", "values", "tail_keys", "tail_values"), f"*{dtype}")
    types |= {"offsets": "*i32", "tail_valid": "*u8", "parts": "*fp32", "lse": "*fp32", "scale": "fp32"}

    def binary(kernel: Any, **own_types: str) -> Any:
        known = types | own_types
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
        source = ASTSource(kernel, signature, {name: constants[name] for name in names if name in constants})
        return triton.compile(
            source, target=GPUTarget("cuda", generation, 32), options={"num_stages": 2, "enable_fp_fusion": True}
        )

    attending = binary(triton_kernels.attend_part, output="*fp32" if joins else f"*{dtype}")
    assert attending.asm["cubin"]
    assert attending.metadata.shared <= 99 * 2**10  # what the smallest of these GPUs have
    if joins:
        assert binary(triton_kernels.join_parts).asm["cubin"]


def test_triton_is_not_imported_for_the_cpu() -> None:
    outcome(
        "-c",
        "import sys, torch\n"
        "from kvkeep.attention import attend\n"
        "from kvkeep.store import RaggedLayer\n"
        "layer = RaggedLayer()\n"
        "layer.append(torch.ones(1, 2, 7, 64), torch.ones(1, 2, 7, 64), torch.arange(7)[None])\n"
        "attend(torch.ones(1, 6, 1, 64), layer, 0.125)\n"
        "assert 'triton' not in sys.modules",
    )


@pytest.mark.parametrize(
    ("name", "expected"), [("triton", "Triton and a GPU of compute capability 8.0"), ("varlen", "varlen_attn")]
)
def test_a_path_of_gpus_is_refused_on_the_cpu(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SHAPES["decode"], torch.float16)
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(UnsupportedError, match=f"{expected}.*float16 of size 64 on cpu; unset {VARIABLE}"):
        attend(case.query, case.layer, case.scaling)


@pytest.mark.parametrize("path", [triton_decode.attend, varlen.attend])
def test_there_is_no_other_way_around_it(path: Any) -> None:
    case = make(SHAPES["decode"], torch.float16)
    with pytest.raises(RuntimeError, match="for this layer"):
        path(case.query, case.layer, case.scaling)


def test_without_triton_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "_kernels", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_decode, "_gpu", lambda index: (9, 132))
    assert not triton_decode.is_available()
    assert not triton_decode._can_run_on(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("suiting", "expected"),
    [(("triton", "varlen"), "triton"), (("varlen",), "varlen"), ((), "cells")],
)
def test_a_gpu_selects(suiting: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SHAPES["decode"], torch.float16)
    called: list[str] = []
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(dispatch.native, "suits", lambda query, layer: False)
    monkeypatch.setattr(triton_decode, "suits", lambda query, layer: "triton" in suiting)
    monkeypatch.setattr(varlen, "suits", lambda query, layer: "varlen" in suiting)
    spies = {name: lambda *args, name=name: called.append(name) for name in dispatch.PATHS}
    monkeypatch.setattr(dispatch, "PATHS", spies)
    attend(case.query, case.layer, case.scaling)
    assert called == [expected]


@pytest.mark.parametrize("entries", [1, 500, 8 * 2048, 8 * 8192 + 3, 8 * 32768, 64 * 131072])
def test_parts_keep_a_gpu_busy_and_are_worth_joining(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiprocessors = 132
    monkeypatch.setattr(triton_decode, "_gpu", lambda index: (9, multiprocessors))
    chunk = triton_decode._chunk(entries, torch.device("cuda", 0))
    assert chunk % 128 == 0  # a whole number of blocks
    programs = entries / chunk
    assert programs <= 4 * multiprocessors
    assert programs >= 2 * multiprocessors or chunk == 128
