"""`kvkeep.__all__` is the public namespace, and the package imports what is used, when it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvkeep


def test_all_is_the_public_namespace():
    assert kvkeep.__all__ == sorted(kvkeep.__all__)
    assert [name for name in dir(kvkeep) if not name.startswith("_")] == kvkeep.__all__
    for name in kvkeep.__all__:
        assert not isinstance(getattr(kvkeep, name), ModuleType), name


def test_type_checkers_see_the_same_names_from_the_same_places():
    tree = ast.parse(Path(kvkeep.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module.startswith("kvkeep.")]
    assert sorted(alias.name for node in imports for alias in node.names) == kvkeep.__all__
    for node in imports:
        home = __import__(node.module, fromlist=["_"])
        for alias in node.names:
            assert getattr(kvkeep, alias.name) is getattr(home, alias.name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="Cache"):
        kvkeep.Cache  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import kvkeep", ["torch", "transformers"]),
        ("import kvkeep; kvkeep.Budget, kvkeep.KvkeepError", ["torch", "transformers"]),
        ("import kvkeep.policies", ["transformers"]),
        (
            "import kvkeep; kvkeep.available_policies(), kvkeep.parse_policy('snapkv'), kvkeep.Observation",
            ["transformers"],
        ),
        ("import kvkeep.store, kvkeep.attention", ["transformers", "kvkeep.policies"]),
        ("from kvkeep.testing import check_policy; check_policy('knorm')", ["transformers"]),
    ],
)
def test_nothing_is_imported_that_is_not_used(statement, absent):
    code = f"import sys; {statement}; sys.exit(' '.join(set({absent!r}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
