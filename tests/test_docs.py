"""The examples in README and docs run, and the table of policies is the registry's."""

from __future__ import annotations

import os
import re
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvkeep.policies import (
    available_policies,
    options_of,
    parse_policy,
    part_types,
    policy_string,
    registry,
    summary_of,
)

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
POLICIES_PAGE = ROOT / "docs" / "policies.md"


def blocks(page: Path, kind: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def examples(page: Path) -> str:
    """All Python blocks of a page as one program."""
    return "\n".join(blocks(page, "python"))


def run(code: str, page: Path, module: dict[str, Any]) -> None:
    """As a file of its own, without this file's `from __future__`."""
    exec(compile(code, str(page), "exec", dont_inherit=True), module)


def pages_with_examples() -> list[Any]:
    """Those that load a model by its name take a while."""
    pages = [page for page in PAGES if "import kvkeep" in examples(page)]
    slow = {page: "load_model" in examples(page) for page in pages}
    return [pytest.param(p, marks=[pytest.mark.real] if slow[p] else [], id=p.name) for p in pages]


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages may register policies."""
    monkeypatch.setattr(registry, "_policies", dict(registry._policies))
    monkeypatch.setattr(registry, "_parts", dict(registry._parts))


def test_the_readme_counts_and_names_the_policies_and_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [*available_policies("prompt"), *available_policies("online")]
    assert f"**{len(names)} policies," in readme
    assert [name for name in names if f"`{name}`" not in readme] == []
    assert [page.name for page in PAGES if page.parent.name == "docs" and f"(docs/{page.name})" not in readme] == []


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("page", pages_with_examples())
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        # The pages use the name that all supported versions of transformers take; the newest warns at it.
        warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated", category=FutureWarning)
        run(examples(page), page, {"__name__": "example"})


def test_the_entry_point_of_the_page_on_own_policies_leads_to_its_policy(
    clean_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block is the module, the TOML block installs it."""
    page = ROOT / "docs" / "own-policy.md"
    module = ModuleType("my_policies")
    monkeypatch.setitem(sys.modules, "my_policies", module)
    run(blocks(page, "python")[0], page, module.__dict__)
    points = tomllib.loads(blocks(page, "toml")[0])["project"]["entry-points"]
    installed = [
        EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in points[registry.ENTRY_POINTS].items()
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: installed)
    monkeypatch.setattr(registry, "_plugins_are_in", False)
    policy = parse_policy("value-aware[window=8]")
    assert policy_string(policy) == "value-aware[window=8]"
    assert available_policies()["value-aware"].summary.startswith("Attention from the end of the text")


def policies_page() -> str:
    """The generated part of docs/policies.md."""
    lines = ["| policy | what it does | options | paper |", "|---|---|---|---|"]
    for entry in available_policies().values():
        options = ", ".join(f"`{name}={value}`" for name, value in entry.options().items())
        lines.append(f"| `{entry.name}` | {entry.summary} | {options or '-'} | {entry.paper or '-'} |")
    lines += ["", "| online policy | what it does | options | paper |", "|---|---|---|---|"]
    for entry in available_policies("online").values():
        options = ", ".join(f"`{name}={value}`" for name, value in entry.options().items())
        lines.append(f"| `{entry.name}` | {entry.summary} | {options or '-'} | {entry.paper or '-'} |")
    lines += ["", "| part | what it does | options |", "|---|---|---|"]
    for name, part in part_types().items():
        options = ", ".join(f"`{option}={value}`" for option, value in options_of(part()).items())
        lines.append(f"| `{name}` | {summary_of(part)} | {options or '-'} |")
    return "\n".join(lines)


def test_the_table_of_policies_is_the_registry() -> None:
    text = POLICIES_PAGE.read_text(encoding="utf-8")
    start, end = "<!-- generated: begin -->\n", "\n<!-- generated: end -->"
    before, _, rest = text.partition(start)
    current, _, after = rest.partition(end)
    if os.environ.get("KVKEEP_UPDATE_DOCS"):
        POLICIES_PAGE.write_text(before + start + policies_page() + end + after, encoding="utf-8")
        return
    assert current == policies_page(), "run KVKEEP_UPDATE_DOCS=1 pytest tests/test_docs.py"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
