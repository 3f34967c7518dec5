"""The examples in README and docs run, and the table of policies is the registry's."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from pathlib import Path

import pytest

from kvkeep.policies import part_types
from kvkeep.policies.registry import available_policies

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
POLICIES_PAGE = ROOT / "docs" / "policies.md"


def examples(page: Path) -> str:
    """All Python blocks of a page as one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


@pytest.mark.real
@pytest.mark.parametrize("page", [p for p in PAGES if "import kvkeep" in examples(p)], ids=lambda p: p.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        # The pages use the name that all supported versions of transformers take; the newest warns at it.
        warnings.filterwarnings("ignore", message=".*past_key_values.* is deprecated", category=FutureWarning)
        exec(compile(examples(page), str(page), "exec"), {"__name__": "example"})


def policies_page() -> str:
    """The generated part of docs/policies.md."""
    lines = ["| policy | what it does | options | paper |", "|---|---|---|---|"]
    for entry in available_policies().values():
        options = ", ".join(f"`{name}={value}`" for name, value in entry.options().items())
        lines.append(f"| `{entry.name}` | {entry.summary} | {options or '-'} | {entry.paper or '-'} |")
    lines += ["", "| part | what it does | options |", "|---|---|---|"]
    for name, part in part_types().items():
        summary = (part.__doc__ or "").split("\n")[0].rstrip(".")
        options = ", ".join(f"`{f.name}={f.default}`" for f in dataclasses.fields(part))
        lines.append(f"| `{name}` | {summary} | {options or '-'} |")
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
