"""`kvkeep demo`: one table that shows what kvkeep does."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvkeep.cli.options import Count, Device, Dtype, Json, ModelName, Texts, writable, write_text
from kvkeep.cli.output import print_json, stderr, stdout

if TYPE_CHECKING:
    from kvkeep.demo import DemoRow


def demo(
    *,
    model: ModelName = "smollm2-135m",
    policy: Texts = (),
    compression_ratio: Annotated[tuple[float, ...], Parameter(negative="", show_default=False)] = (),
    questions: Count = 8,
    max_new_tokens: Count = 16,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    out: Path | None = None,
    json: Json = False,
) -> None:
    """Compress a document of about 2,000 tokens with several policies, and ask questions of each small cache.

    The questions are hidden when the cache is cut. Takes some minutes on two CPU cores.

    Args:
        policy: Repeat it for several; seven by default.
        compression_ratio: Fraction of entries to remove; repeat it for several; 0.5 and 0.75 by default.
        questions: How many of the document's twelve questions are asked.
        max_new_tokens: At most so many for each answer.
        out: Also write the results, answers included, to this JSON file.
    """
    target = None if out is None else writable(out, "--out")

    from kvkeep import demo as demonstration
    from kvkeep.budget import Budget
    from kvkeep.cli.loading import load
    from kvkeep.data import load_demo
    from kvkeep.hf.models import model_sha256
    from kvkeep.hf.sources import dtype_name
    from kvkeep.policies import parse_policy

    policies = policy or demonstration.POLICIES
    ratios = compression_ratio or demonstration.RATIOS
    for name in policies:
        parse_policy(name)  # an unknown one is refused before the work begins
    for ratio in ratios:
        Budget(compression_ratio=ratio)
    document = load_demo()
    asked = demonstration.spread(document.questions, questions)
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    columns = (
        TextColumn("{task.description}", justify="left"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("full", total=demonstration.steps(len(asked), policies, ratios))
        rows = list(
            demonstration.run_demo(
                loaded,
                tokenizer,
                document,
                policies,
                ratios,
                questions=questions,
                max_new_tokens=max_new_tokens,
                on_step=lambda what: progress.update(task, advance=1, description=f"{what:18}"),
            )
        )
    record: dict[str, Any] = {
        "schema_version": 1,
        "model": model,
        "model_sha256": model_sha256(loaded),
        "dtype": dtype_name(loaded.dtype),
        "protocol": "query-agnostic",
        "document": document.title,
        "questions": [{"question": q.question, "answers": q.answers} for q in asked],
        "rows": [row.to_dict() for row in rows],
    }
    if target is not None:
        write_text(target, json_format.dumps(record, indent=2, ensure_ascii=False) + "\n", "--out")
    if json:
        print_json(record)
        return
    output = stdout()
    output.print(
        f"{document.title}: {rows[0].prompt_tokens:,} tokens; questions asked: {rows[0].questions}, all unknown when "
        f"the cache was cut (query-agnostic); {model}, {record['dtype']}.\n"
    )
    output.print(_table(rows))
    output.print(
        "\nratio: share of the entries that was removed. held: bytes of the cut cache, its bookkeeping included, and "
        "their share of the full cache. peak: the most held at once. KL: divergence from the full cache's predictions, "
        "in nats for each token of the reference answers."
    )


def _table(rows: list[DemoRow]) -> Table:
    """Ten columns within 80 letters, for names of up to 18."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\npolicy", overflow="fold")
    headings = (
        "\nratio",
        "\nright",
        "entries\nkept",
        "held\nMiB",
        "of\nfull",
        "peak\nMiB",
        "prefill\ns",
        "\ntok/s",
        "\nKL",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            f"{row.compression_ratio:.2f}",
            f"{row.right}/{row.questions}",
            f"{row.entries:,}",
            f"{row.held_bytes / 2**20:.1f}",
            f"{row.fraction:.0%}" if row.fraction > 0.995 else f"{row.fraction:.1%}",
            f"{row.peak_bytes / 2**20:.1f}",
            f"{row.prefill_s:.1f}",
            f"{row.decode_tokens_per_s:.1f}",
            f"{row.kl:.3f}",
        )
    return table
