"""`kvkeep audit`: what policies' caches really weigh, and what their answers are worth when memory is enforced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvkeep.cli.bench import Ratios, progress_of_rows
from kvkeep.cli.loading import load
from kvkeep.cli.options import Count, Device, Dtype, Json, ModelName, Texts, packages
from kvkeep.cli.output import print_json, size, stdout

if TYPE_CHECKING:
    from kvkeep.lab.audit import Summary
    from kvkeep.lab.audit_contrasts import Contrast
    from kvkeep.lab.audit_tables import StorageMean

_POLICIES = ("snapkv", "adasnapkv", "snapkv+threshold")
_TASKS = ("continuation", "niah")
_PROTOCOLS = {
    "hidden": "Question hidden when the text was cut",
    "visible": "Question visible when the text was cut",
    "document": "Question in the text that was cut, ranking by the rows of the document",
}


def audit(
    *,
    model: ModelName,
    out: Path,
    policy: Texts = _POLICIES,
    compression_ratio: Ratios = (0.75,),
    length: Count = 1024,
    task: Texts = _TASKS,
    samples: Count = 4,
    seed: int = 0,
    max_new_tokens: int = 0,
    haystack: str | None = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Weigh what policies' caches really hold, and score one selection in every way of storing it.

    The ways: not enforced (each layer as wide as its widest cell, as uniform tensors are), capped (no cell above the
    average), ragged (each cell what the policy gave it), and masked (nothing deleted). Scored are the divergence from
    the full cache on real text, and a question about one fact that was hidden when the text was cut, visible, or
    visible but without a say in the ranking. What enforcement costs and a visible question is worth comes with 95 %
    intervals over contexts. An audit that was killed goes on when the same command is given again.

    Args:
        out: Folder of the results, rows as `kvkeep bench` writes them.
        policy: What decides; repeat it for several. Those that let heads compete are the interesting ones.
        compression_ratio: Fraction of the entries to remove; repeat it for several; 0.75 by default.
        length: Tokens of a text, question, answer and chat template included.
        task: What is asked, such as ruler/niah_single_2; repeat it for several. By default a real text that goes on
            (continuation), and one fact in prose (niah).
        samples: Texts of each task.
        seed: Of the samples.
        max_new_tokens: At most so many for each answer; 0 leaves it to the task.
        haystack: A text file, or a folder of them; the held-out public-domain messages otherwise.
    """
    from kvkeep.bench.worker import versions
    from kvkeep.hf.models import model_sha256
    from kvkeep.hf.prompting import Prompting
    from kvkeep.policies import parse_policy, policy_string
    from kvkeep.results import read_rows
    from kvkeep.tasks.registry import available_tasks, expand
    from kvkeep.tasks.registry import task as make_task

    with packages("intervals are computed with", "bench"):
        from kvkeep.lab.audit import Auditor, AuditSettings, summarise
        from kvkeep.lab.audit import audit as run
    options = {} if haystack is None else {"haystack": haystack}
    known = {name: available_tasks()[name].options() for name in expand(task)}
    tasks = [make_task(name, **{k: v for k, v in options.items() if k in taken}) for name, taken in known.items()]
    settings = AuditSettings(
        model=model,
        policies=tuple(dict.fromkeys(policy_string(parse_policy(name)) for name in policy)),
        ratios=tuple(dict.fromkeys(compression_ratio)),
        tasks=tuple(one.name for one in tasks),
        length=length,
        samples=samples,
        seed=seed,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        task_options=options,
    )
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    auditor = Auditor(
        loaded,
        tokenizer,
        settings,
        Prompting(tokenizer),
        identity=(model, model_sha256(loaded)),
        versions=versions(loaded),
    )
    with progress_of_rows() as on_rows:
        folder = run(settings, tasks, out.expanduser(), auditor, on_rows)
    rows = read_rows(folder)
    found = summarise(rows)
    if json:
        print_json({"schema_version": 1, "folder": str(folder), "rows": len(rows), **found.to_dict()})
        return
    _print(found)
    stdout().print(f"\n{len(rows):,} rows in {folder}", soft_wrap=True)


def _print(found: Summary) -> None:
    console = stdout()
    if found.weights:
        console.print(f"Bytes after a prompt of {found.weights[0].length:,} tokens, in MiB\n")
        console.print(_weights(found))
        full = found.weights[0]
        console.print(f"\nfull cache: {size(full.full_bytes)}; windows of sliding layers: {size(full.window_bytes)}\n")
    console.print("One ranking, stored in different ways (x nom.: bytes held / bytes that the ratio leaves)")
    for protocol, title in _PROTOCOLS.items():
        means = [one for one in found.stored if one.protocol == protocol]
        if means:
            console.print(f"\n{title}\n")
            console.print(_storages(means))
    if found.contrasts:
        console.print("\nDifferences on the same questions: points of the score, 95 % interval over contexts\n")
        console.print(_contrasts(found.contrasts))
        for remark in sorted({one.note for one in found.contrasts if one.note and one.metric == "score"}):
            console.print(f"note: {remark}")
    masking = found.masking
    if masking is not None:
        console.print(
            f"\nHidden by a mask or deleted: {masking.same_answers} of {masking.questions} answers in the same words, "
            f"divergences at most {masking.largest_kl_difference:.1g} apart, {masking.bytes_ratio:.1f} times the bytes."
        )


def _weights(found: Summary) -> Table:
    headings = ("nominal", "payload", "slack", "meta", "state", "held", "peak")
    table = _new_table(("ratio", *headings))
    for weight in found.weights:
        parts = ("nominal", "payload", "slack", "metadata", "state", "held", "peak")
        sizes = [f"{getattr(weight, f'{part}_bytes') / 2**20:.2f}" for part in parts]
        table.add_row(Text(weight.policy), f"{weight.ratio:g}", *sizes)
    return table


def _storages(means: Sequence[StorageMean]) -> Table:
    with_text = any(one.kl_text is not None for one in means)
    headings = ("MiB", "x nom.", "of full", *(("KL text",) if with_text else ()), "score", "KL")
    table = _new_table(("ratio", "stored", *headings))
    last: tuple[object, ...] = ()
    for one in means:
        place = (one.policy, one.ratio)
        shown = ("", "") if place == last else (one.policy, f"{one.ratio:g}")
        last = place
        table.add_row(
            *(Text(word) for word in shown),
            one.storage,
            f"{one.held_bytes / 2**20:.2f}",
            f"{one.times_nominal:.2f}",
            f"{one.fraction:.1%}",
            *((_number(one.kl_text),) if with_text else ()),
            _number(one.score, 2),
            _number(one.kl_answer),
        )
    return table


def _contrasts(found: Sequence[Contrast]) -> Table:
    from kvkeep.lab.audit_contrasts import CONTRASTS

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold")
    for heading in ("ratio", "what", "question", "points", "interval", "n"):
        table.add_column(heading, justify="left" if heading in ("what", "question") else "right", no_wrap=True)
    last: tuple[object, ...] = ()
    for one in found:
        if one.metric != "score":
            continue
        place = (one.policy, one.ratio)
        shown = ("", "") if place == last else (one.policy, f"{one.ratio:g}")
        last = place
        ends = "" if one.low is None or one.high is None else f"{100 * one.low:+.1f} to {100 * one.high:+.1f}"
        words = CONTRASTS[one.name].words
        asked = one.protocol if CONTRASTS[one.name].first[1] is None else ""
        table.add_row(*map(Text, shown), words, asked, f"{100 * one.mean:+.1f}", ends, f"{one.contexts}")
    return table


def _new_table(headings: tuple[str, ...]) -> Table:
    """`policy`, which folds, and other columns; numbers stand on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "stored" else "right", no_wrap=True)
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
