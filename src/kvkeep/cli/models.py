"""`kvkeep models`: which models are known by name, and fetching them."""

from __future__ import annotations

from typing import Any

from cyclopts import App
from rich.table import Table
from rich.text import Text

from kvkeep.cli.loading import fetch as fetch_with_progress
from kvkeep.cli.options import Json
from kvkeep.cli.output import print_json, size, stdout
from kvkeep.errors import ModelFileError
from kvkeep.hf.embedded import KNOWN_MODELS, kvkeep_home, model_folder, read_manifest

models = App(name="models", help="List the models that kvkeep knows by name, or fetch one.")


@models.default
def show_models(*, json: Json = False) -> None:
    """List the models that kvkeep knows by name: fetched or not, sizes, licence.

    They are fetched on first use, or with `kvkeep models fetch NAME`, into the folder that KVKEEP_HOME names.
    """
    rows = [_describe(name) for name in KNOWN_MODELS]
    if json:
        print_json({"schema_version": 1, "home": str(kvkeep_home()), "models": rows})
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        state = f"fetched, {size(row['disk_bytes'])} on disk" if row["fetched"] else "not fetched"
        facts = f"{row['download_megabytes']} MB to download; {row['licence']}; "
        table.add_row(
            Text(row["name"], style="bold"),
            Text(f"{row['summary']}\n{facts}").append(state, style="green" if row["fetched"] else "dim"),
        )
    console = stdout()
    console.print(table)
    console.print()
    console.print(f"folder: {kvkeep_home() / 'models'}", soft_wrap=True)


@models.command
def fetch(*names: str) -> None:
    """Fetch models by name; nothing is downloaded of those that are whole already.

    Args:
        names: As `kvkeep models` lists them.
    """
    for name in names:
        folder = fetch_with_progress(name)
        stdout().print(str(folder), soft_wrap=True)


def _describe(name: str) -> dict[str, Any]:
    record, folder = KNOWN_MODELS[name], model_folder(name)
    try:
        manifest = read_manifest(folder)
    except ModelFileError:  # damaged: fetching replaces it
        manifest = None
    return {
        "name": name,
        "summary": record.summary,
        "licence": record.licence,
        "chat": record.chat,
        "download_megabytes": record.megabytes,
        "fetched": manifest is not None,
        "disk_bytes": sum(file["bytes"] for file in manifest["files"].values()) if manifest else 0,
    }
