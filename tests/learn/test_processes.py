"""A run that several processes share comes to the numbers of one process: data parallel, and sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
import torch

from kvkeep import load_model
from kvkeep.learn import LearnError, finetune
from kvkeep.learn.processes import Processes

from .test_finetune import run

OPTIONS = {"sequences": 8, "batch": 4, "learning_rate": 1e-3, "scorer_rate": 0.01, "evaluate_every": 1}

CHILD = """
import sys
from pathlib import Path

from learn.test_processes import OPTIONS, run, sharded, stopped_behind

out = Path(sys.argv[1])
run(out / "data parallel", **OPTIONS)
sharded()
with stopped_behind(1):
    run(out / "sharded", checkpoint_every=1, **OPTIONS)
run(out / "sharded", checkpoint_every=1, **OPTIONS)
"""


def sharded():
    """FSDP on CPUs: torch can, but accelerate leaves CPUs out when it reads how it was launched."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from kvkeep.learn import processes

    def make(cpu):
        made = Accelerator(cpu=cpu)
        for state in (AcceleratorState._shared_state, PartialState._shared_state):
            state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        return made

    processes.Accelerator = make


@contextmanager
def stopped_behind(step):
    """Runs end with the checkpoint of this step, in every process."""
    save = finetune._Run.save

    def stopping(self):
        save(self)
        if self.step == step:
            raise KeyboardInterrupt

    finetune._Run.save = stopping
    with suppress(KeyboardInterrupt):
        yield
        raise AssertionError("it was not stopped")
    finetune._Run.save = save


def rows(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(not torch.distributed.is_available() or os.name != "posix", reason="a torch without processes")
def test_two_processes_are_one(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", "src", os.environ.get("PYTHONPATH", "")])}
    (tmp_path / "child.py").write_text(CHILD, encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*launch, str(tmp_path / "child.py"), str(tmp_path)],
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    alone = run(tmp_path / "alone", **OPTIONS)
    expected = rows(tmp_path / "alone")
    for kind in ("data parallel", "sharded"):
        found = rows(tmp_path / kind)
        assert [row["key"] for row in found] == [row["key"] for row in expected]
        for ours, theirs in zip(found, expected, strict=True):
            numbers = [name for name, value in theirs.items() if isinstance(value, float) and name != "seconds"]
            assert "kl" in numbers
            for name in numbers:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), (kind, theirs["key"], name)
        theirs, _ = load_model(alone.model)
        ours, _ = load_model(tmp_path / kind / "model")
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_sequences_that_cannot_be_shared_are_refused(monkeypatch):
    monkeypatch.setattr("kvkeep.learn.processes.Accelerator.num_processes", 4)
    with pytest.raises(LearnError, match="--batch 8"):
        Processes(torch.device("cpu"), 5, 40)
    with pytest.raises(LearnError, match="42 sequences"):
        Processes(torch.device("cpu"), 8, 42)
