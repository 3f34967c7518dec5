"""What needs an extra says which one, where it is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_the_harness_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval" or name.startswith("kvkeep.lm_eval")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install \"kvkeep\[lm-eval\]\""):
        importlib.import_module("kvkeep.lm_eval")
