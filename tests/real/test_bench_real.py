"""The benchmark on a real model: the full cache finds a needle, and a policy that sees the question keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep import Budget, load_model
from kvkeep.bench.runner import run
from kvkeep.bench.settings import Settings
from kvkeep.results import read_rows
from kvkeep.tasks.registry import task

pytestmark = pytest.mark.real


def test_a_needle_is_found(tmp_path: Path) -> None:
    settings = Settings(
        model="smollm2-135m",
        tasks=("ruler/niah_single_1",),
        lengths=(512,),
        samples=2,
        policies=("snapkv",),
        budgets=(Budget(compression_ratio=0.5),),
        protocols=("query-aware",),
        max_new_tokens=16,
        stop_at_line=True,
    )
    folder = run(settings, [task("ruler/niah_single_1")], tmp_path, loaded=load_model("smollm2-135m"))
    rows = list(read_rows(folder))
    assert [row.policy for row in rows] == ["full", "snapkv"] * 2
    for row in rows:
        assert row.score == 1
        share = row.kept_needle_share
        assert share is not None
        assert share == 1 if row.policy == "full" else 0.5 < share < 1
        assert row.memory.fraction < (1.1 if row.policy == "full" else 0.55)
        assert row.fidelity.reference_logprob is not None
        assert row.fidelity.reference_logprob > -1
