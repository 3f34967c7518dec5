"""The scripts that the README promises: what can be checked without making an environment."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["scripts/test", "scripts/demo", "scripts/environment.sh", ".ci/run"])
def test_bash_can_read_them(name):
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def test_continuous_integration_can_run_its_script():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("words", [["--bogus"], ["--transformers"]])
def test_wrong_options_are_refused_before_anything_is_installed(words, tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "test"), *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "--transformers" in done.stderr


def test_an_old_python_is_refused(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    code = f". {ROOT / 'scripts' / 'environment.sh'}; find_python"
    done = subprocess.run(
        ["bash", "-c", code], env=os.environ | {"PYTHON": str(old)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs Python 3.11" in done.stderr


def test_every_dependency_is_pinned_to_one_version():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    names = {re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names <= pinned
    assert "torch==2.13.0" in pins  # without a local version, so that a CPU wheel serves where it is offered
