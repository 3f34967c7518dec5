"""The scripts in `benchmarks/`: that they can be imported and answer `--help`, and that each says what it must reach.

Nothing is measured here. Types, and with them names that were changed elsewhere, are checked by mypy.
"""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
OTHER_ENVIRONMENT = "kvpress_worker"  # imports kvpress, and is started by the scripts, not by people
THRESHOLDS = {"must_reach", "at_most", "exactly"}

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="a source distribution has no benchmarks")


def is_script(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text(encoding="utf-8") and path.stem != OTHER_ENVIRONMENT


SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if is_script(path))
SHARED = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in {*SCRIPTS, OTHER_ENVIRONMENT})


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of `benchmarks/`, and leaves no trace of it: neither modules nor variables of the environment."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


def claims() -> dict[str, dict[str, Any]]:
    return tomllib.loads((FOLDER / "claims.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_answers_help(name, imported, monkeypatch, capsys):
    script = imported(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    assert f"usage: {name}.py" in capsys.readouterr().out


@pytest.mark.parametrize("name", SHARED)
def test_what_scripts_share_can_be_imported(name, imported):
    assert imported(name).__doc__


def test_every_script_says_what_it_must_reach_and_every_claim_has_a_script(imported):
    by_themselves = {name for name in SCRIPTS if hasattr(imported(name), "MUST_REACH")}
    assert by_themselves == {"gpu_decode", "ruler_rows"}  # as the head of claims.toml says
    assert set(claims()) == set(SCRIPTS) - by_themselves


@pytest.mark.parametrize("name", sorted(claims()) if FOLDER.is_dir() else [])
def test_a_claim_is_complete_and_has_no_word_that_nobody_reads(name, imported):
    table = claims()[name]
    assert {"cell", "runs"} < set(table) <= {"cell", "runs"} | THRESHOLDS
    claim = imported("harness").Claim.read(name)
    assert claim.runs >= 1
    for thresholds in THRESHOLDS & set(table):
        for ratio, number in getattr(claim, thresholds).items():
            assert claim.holds(ratio, number) is True
