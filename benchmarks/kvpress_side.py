"""The other end of kvpress_worker.py: starts it in kvpress's own environment and asks it, so that sides take turns.

kvpress 0.5.5 stops before transformers 5.3, so it cannot live in kvkeep's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import Milliseconds
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvkeep.hf.embedded import model_folder

VARIABLE = "KVPRESS_PYTHON"
RECIPE = "tests/fixtures/kvpress/make.py"
VERSION = "0.5.5"
PAUSE = 0.01  # seconds before a run: a process that has just answered lets its threads spin for a while


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--kvpress`."""
    parser.add_argument(
        "--kvpress",
        metavar="PYTHON",
        default=os.environ.get(VARIABLE),
        help=f"python of the environment that has kvpress {VERSION} (or {VARIABLE}); {RECIPE} says how it is made",
    )


class Kvpress:
    """kvpress at work in another process, one request at a time."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, complaints: Path) -> None:
        self._process, self._folder, self._complaints = process, folder, complaints
        self._files = 0

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; see `kvpress_worker.Worker` for what there is."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"kvpress's side ended at {do!r}:\n{self._complaints.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, do: str, **more: Any) -> Milliseconds:
        """Send a request; the milliseconds that it took by kvpress's own clock."""
        return Milliseconds(self.ask(do, **more)["ms"])

    def hand_over(self, tensors: Mapping[str, Tensor]) -> str:
        """A file with these tensors, to be named in a request."""
        path = self._new_file()
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
        return path

    def result(self, do: str, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Send a request; the tensors that it gave back, and its answer."""
        path = self._new_file()
        answer = self.ask(do, save=path, **more)
        return load_file(path), answer

    def _new_file(self) -> str:
        self._files += 1
        return str(self._folder / f"{self._files}.safetensors")


@contextmanager
def kvpress_side(options: argparse.Namespace) -> Iterator[Kvpress]:
    """kvpress with SmolLM2's weights (which kvkeep has fetched) and as many threads as this side."""
    python = options.kvpress
    if not python or not Path(python).exists():
        raise SystemExit(
            f"kvpress {VERSION} is measured in an environment of its own, since it stops before transformers 5.3.\n"
            f"expected: its python, as --kvpress PATH or in {VARIABLE}\n"
            f"received: {python or 'neither'}{' (no such file)' if python else ''}\n"
            f"remedy:   make the environment as {RECIPE} says, and name its bin/python"
        )
    with tempfile.TemporaryDirectory() as folder:
        complaints = Path(folder) / "stderr.txt"
        command = [python, str(Path(__file__).with_name("kvpress_worker.py"))]
        command += [str(model_folder("smollm2-135m")), str(torch.get_num_threads())]
        # What this side was told of where packages are must not reach the other environment.
        surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with complaints.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=surroundings,
            )
        try:
            side = Kvpress(process, Path(folder), complaints)
            about = side.ask("hello")
            described = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
            print(f"the other side: {described}, {about['threads']} threads")
            if about["versions"]["kvpress"] != VERSION:
                raise SystemExit(f"the claim is about kvpress {VERSION}; nothing is reported")
            yield side
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
