"""`kvkeep policies`: what can stand after `--policy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from kvkeep.cli.options import Json
from kvkeep.cli.output import print_json, stdout


def policies(*, json: Json = False) -> None:
    """List every policy with its options and their defaults, the allocators and selectors to combine it with, and
    policies that are made of a file.

    "chunks" marks those that can cut a text chunk by chunk (`kvkeep run --chunk-tokens`), "online" those that hold a
    cap at every step, also while tokens are generated.

    The names are those of `--policy`, of Python and of results: snapkv, snapkv[window=64], snapkv[window=64]+ada.
    """
    record = _describe()
    if json:
        print_json({"schema_version": 1, **record})
        return
    console = stdout()
    for title, rows in (
        ("policies", record["policies"]),
        ("allocators: how the budget is shared over heads and layers", record["allocators"]),
        ("selectors: which entries a cell keeps", record["selectors"]),
        ("prefixes: policies that are made of a file", record["prefixes"]),
    ):
        console.print(Text(title, style="bold underline"))
        console.print(_table(rows))
        console.print()
    console.print("combine them: snapkv[window=64]+ada+chunks[length=20]")


def _describe() -> dict[str, list[dict[str, Any]]]:
    from kvkeep.policies import Allocator, OnlinePolicy, options_of, part_types, prefixes, summary_of
    from kvkeep.policies import available_policies as registered

    parts: dict[str, list[dict[str, Any]]] = {"allocators": [], "selectors": []}
    for name, kind in part_types().items():
        group = "allocators" if issubclass(kind, Allocator) else "selectors"
        parts[group].append({"name": name, "summary": summary_of(kind), "options": options_of(kind())})
    entries = [
        {
            "name": entry.name,
            "summary": entry.summary,
            "paper": entry.paper,
            "options": entry.options(),
            "kind": entry.kind,
            # A cap holds within a text, whatever chunks it comes in.
            "chunks": isinstance(entry.policy, OnlinePolicy) or not entry.policy.needs().whole_text,
        }
        for entry in (*registered().values(), *registered("online").values())
    ]
    made = [
        {"name": f"{prefix.name}:{prefix.placeholder}", "summary": prefix.summary, "options": {}}
        for prefix in prefixes().values()
    ]
    return {"policies": entries, **parts, "prefixes": made}


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        about = Text(row["summary"])
        facts = [Text(row["paper"], style="dim")] if row.get("paper") else []
        facts += [Text("online", style="magenta")] if row.get("kind") == "online" else []
        facts += [Text("chunks", style="green")] if row.get("chunks") else []
        facts += [Text(f"{name}={value}", style="cyan") for name, value in row["options"].items()]
        if facts:
            about.append("\n").append(Text("  ").join(facts))
        table.add_row(Text(row["name"], style="bold"), about)
    return table
