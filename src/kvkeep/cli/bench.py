"""`kvkeep bench`: policies, budgets and tasks into a folder; and `kvkeep report`, which makes a page of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.table import Table
from rich.text import Text

from kvkeep.budget import Budget, parse_bytes
from kvkeep.cli.loading import load
from kvkeep.cli.options import Count, Device, Dtype, Flag, Json, ModelName, OptionError, Protocol, Texts, packages
from kvkeep.cli.output import print_json, progress_bar, stdout
from kvkeep.errors import near_names

Ratios = Annotated[tuple[float, ...], Parameter(negative="", show_default=False)]
Counts = Annotated[tuple[Annotated[int, Parameter(validator=Number(gte=1))], ...], Parameter(negative="")]


def bench(
    family: str,
    *,
    model: ModelName,
    out: Path,
    policy: Texts,
    length: Counts = (4096,),
    task: Texts = ("all",),
    compression_ratio: Ratios = (),
    entries: Counts = (),
    bytes: Texts = (),
    protocol: tuple[Protocol, ...] = ("query-agnostic",),
    samples: Count = 20,
    seed: int = 0,
    max_new_tokens: int = 0,
    stop_at_line: Flag = False,
    no_fidelity: Flag = False,
    no_template: Flag = False,
    haystack: str | None = None,
    wording: Literal["own", "compat"] = "own",
    data: Texts = (),
    claims: Path | None = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    executor: Literal["serial", "processes", "ray"] = "serial",
    workers: Count = 1,
    batch_rows: Count = 32,
    memory_limit: str | None = None,
    temperature: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    rollouts: Count = 1,
    json: Json = False,
) -> None:
    """Ask every policy, at every budget, the questions of a family of tasks, and write what came to a folder.

    Lists are repeated flags: --policy snapkv --policy frc --compression-ratio 0.5 --compression-ratio 0.75. The full
    cache is always run beside them. Each text is processed once for all policies and budgets. A run that was killed
    goes on when the same command is given again.

    Args:
        family: ruler, niah, key_value, multi_turn, continuation, published (with --data), or reasoning (with --task).
        out: Folder of the results; `kvkeep report` makes a page of it.
        policy: What decides; see `kvkeep policies`.
        length: Tokens of context, question, answer and chat template together.
        task: Of the family, such as niah_multikey_1; all by default. Of reasoning: small, aime25, math500, ...
        compression_ratio: A budget: fraction of the entries to remove.
        entries: A budget: entries that a cell keeps on average.
        bytes: A budget: bytes of the whole cache, such as 8MiB. The fair one for comparisons.
        protocol: Was the question hidden (query-agnostic) or visible (query-aware) when entries were evicted.
        samples: Contexts of each task and length.
        seed: Of the samples.
        max_new_tokens: At most so many for each answer; 0 leaves it to the task.
        stop_at_line: End answers at the first line break behind a word, unless several things are asked for.
        no_fidelity: Do without the log-probability of the reference answer and the divergence from the full cache.
        no_template: Do without the model's chat template.
        haystack: A text file, or a folder of them, to hide facts in.
        wording: compat takes RULER's own sentences from an installed lm-eval.
        data: Rows of a published set, or of a reasoning set: a .jsonl or .parquet file, or hub:OWNER/NAME:CONFIG:SPLIT.
        claims: A claims file to declare before the run; see docs/benchmark.md.
        executor: Where samples are measured; processes and ray load a model for each worker.
        workers: Of the executor.
        batch_rows: So many caches answer together; more of them want more memory.
        memory_limit: For the dense keys, values and queries of a text that all policies share, such as 8GiB. Where they
            need more, each policy reads the text by itself, which takes longer.
        temperature: Draw the tokens of answers at this temperature; left out, the likeliest is taken.
        top_p: Draw from the likeliest tokens whose probabilities add up to this.
        top_k: Draw from so many of the likeliest tokens; 0 for all.
        min_p: Draw from tokens at least so likely as this share of the likeliest.
        rollouts: Answers to each question, each with random numbers of its own, the same for all policies.
    """
    from kvkeep.bench.runner import run
    from kvkeep.bench.settings import Settings
    from kvkeep.hf.sampling import Sampling
    from kvkeep.policies import parse_policy, policy_string

    budgets = [Budget(compression_ratio=ratio) for ratio in compression_ratio]
    budgets += [Budget(entries=count) for count in entries]
    budgets += [Budget(bytes=parse_bytes(text)) for text in bytes]
    policies = tuple(dict.fromkeys(policy_string(parse_policy(name)) for name in policy))
    if not policies or (not budgets and policies != ("full",)):
        raise OptionError(
            expected="at least one --policy, and a budget for it",
            received=f"policies {', '.join(policies) or 'none'}; no budget" if not budgets else "no policy",
            remedy="for example --policy snapkv --policy frc --compression-ratio 0.5 --compression-ratio 0.75",
        )
    if temperature is None and (top_p, top_k, min_p, rollouts) != (1.0, 0, 0.0, 1):
        raise OptionError(
            expected="--temperature beside --top-p, --top-k, --min-p and --rollouts",
            received="none: the likeliest token is taken, which is always the same",
            remedy="for example --temperature 0.6 --top-p 0.95 --top-k 20 --rollouts 4",
        )
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    options = {"haystack": haystack, "wording": None if wording == "own" else wording}
    tasks = _tasks(family, task, data, {name: value for name, value in options.items() if value is not None})
    settings = Settings(
        model=model,
        tasks=tuple(one.name for one in tasks),
        lengths=length,
        samples=samples,
        policies=policies,
        budgets=tuple(dict.fromkeys(budgets)),
        protocols=tuple(dict.fromkeys(protocol)),
        seed=seed,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        stop_at_line=stop_at_line,
        fidelity=not no_fidelity,
        template=not no_template,
        task_options={**{k: v for k, v in options.items() if v is not None}, **({"data": list(data)} if data else {})},
        sampling=None if temperature is None else Sampling(temperature, top_p, top_k, min_p),
        rollouts=rollouts,
    )
    loaded = load(model, dtype=dtype, device=device)
    with progress_of_rows() as on_rows:
        folder = run(
            settings,
            tasks,
            out.expanduser(),
            loaded=loaded,
            device=device,
            executor=executor,
            workers=workers,
            batch_rows=batch_rows,
            memory_limit=limit,
            claims=claims,
            on_rows=on_rows,
        )
    from kvkeep.results import read_rows

    rows = list(read_rows(folder))
    if json:
        print_json({"schema_version": 1, "folder": str(folder), "rows": len(rows), "means": _means(rows)})
        return
    stdout().print(_table(_means(rows)))
    stdout().print(f"\n{len(rows):,} rows in {folder}; `kvkeep report {folder}` makes a page of them")


def report(folder: Path, *, json: Json = False) -> None:
    """Write index.html, results.parquet and table.md into a folder that `kvkeep bench` filled.

    Args:
        folder: Of the results.
    """
    with packages("a report is made with", "report"):
        from kvkeep.results.report import write_report
    page = write_report(folder.expanduser())
    if json:
        print_json({"schema_version": 1, "page": str(page)})
    else:
        stdout().print(str(page), soft_wrap=True)


def _tasks(family: str, names: tuple[str, ...], data: tuple[str, ...], options: dict[str, Any]) -> list[Any]:
    from kvkeep.tasks.registry import available_tasks, expand, task

    if family == "reasoning":
        return _reasoning_tasks(names, data)
    if family == "published":
        from kvkeep.tasks.loaders import published_tasks

        if not data:
            raise OptionError(
                expected="--data for published sets",
                received="none",
                remedy="for example --data hub:simonjegou/ruler:4096:test, or a .jsonl file",
            )
        only = None if "all" in names else names
        return [one for source in data for one in published_tasks(source, only=only)]
    chosen = expand([family if name == "all" else f"{family}/{name}" for name in names])
    known = {name: set(available_tasks()[name].options()) for name in chosen}
    unused = set(options) - set().union(*known.values())
    if unused:
        raise OptionError(
            expected=f"options that a task of {family} knows",
            received=", ".join(f"--{name}" for name in sorted(unused)),
            remedy="leave them out",
        )
    return [task(name, **{key: value for key, value in options.items() if key in known[name]}) for name in chosen]


def _reasoning_tasks(names: tuple[str, ...], data: tuple[str, ...]) -> list[Any]:
    from kvkeep.tasks.reasoning import SETS, ReasoningTask

    if "all" in names or (data and len(names) > 1) or len(data) > 1:
        raise OptionError(
            expected="the sets to run, and --data for one of them at most",
            received="none named" if "all" in names else f"{', '.join(names)} with {len(data)} files",
            remedy=f"--task small comes along; the hub has {', '.join(name for name in SETS if name != 'small')}",
        )
    for name in names:
        if name not in SETS:
            raise OptionError(expected="a set of problems", received=f"--task {name}", remedy=near_names(name, SETS))
    return [ReasoningTask(name, *data) for name in dict.fromkeys(names)]


@contextmanager
def progress_of_rows() -> Iterator[Callable[[int, int, str], None]]:
    """A bar with the time left, for a terminal."""
    with progress_bar("rows") as (bar, shown):
        yield lambda done, total, task: bar.update(shown, completed=done, total=total, description=task or "rows")


def _means(rows: list[Any]) -> list[dict[str, Any]]:
    """Mean score and divergence by protocol, policy and budget, over all tasks; in the order of the run."""
    from kvkeep.bench.rollouts import pass_at_1

    groups: dict[tuple[str, ...], list[Any]] = {}
    for row in rows:
        name, value = next(iter(row.budget.items()))
        groups.setdefault((row.protocol, row.policy, f"{name}={value:g}"), []).append(row)
    return [
        {
            "protocol": protocol,
            "policy": policy,
            "budget": budget,
            "contexts": len({row.cluster for row in group}),
            "score": _mean([row.score for row in group]),
            "pass_at_1": pass_at_1(group),
            "kl": _mean([row.fidelity.kl for row in group]),
            "held_bytes": _mean([row.memory.held_bytes for row in group]),
            "fraction": _mean([row.memory.fraction for row in group]),
        }
        for (protocol, policy, budget), group in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _table(means: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("protocol", "policy", "budget"):
        table.add_column(heading, overflow="fold")
    drawn = any(row["pass_at_1"] is not None for row in means)
    for heading in ("n", "score", *(["pass@1"] if drawn else []), "KL", "held MiB", "of full"):
        table.add_column(heading, justify="right", no_wrap=True)

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    for row in means:
        budget = row["budget"].replace("compression_ratio", "ratio")
        table.add_row(
            Text(row["protocol"].removeprefix("query-")),
            Text(row["policy"]),
            Text(budget),
            f"{row['contexts']}",
            shown(row["score"], "{:.3f}"),
            *([shown(row["pass_at_1"], "{:.3f}")] if drawn else []),
            shown(row["kl"], "{:.3f}"),
            shown((row["held_bytes"] or 0) / 2**20, "{:.1f}"),
            shown(row["fraction"], "{:.1%}"),
        )
    return table
