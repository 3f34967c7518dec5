"""A training run in a process of its own, which is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

needs_signals = pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL")

_CHILD = """
import sys
from importlib import import_module
from pathlib import Path

import_module(sys.argv[1]).run(Path(sys.argv[2]), sequences=400, on_progress=lambda p: print(p.step, flush=True))
"""


def run_until_killed(module: str, folder: Path, step: int) -> None:
    """Call the `run` of a test module with 400 sequences, and send SIGKILL when it tells of that step."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", "src", os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, module, str(folder)], stdout=subprocess.PIPE, text=True, env=env
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == step:
            child.send_signal(signal.SIGKILL)
            break
    child.stdout.close()
    assert child.wait(60) == -signal.SIGKILL
