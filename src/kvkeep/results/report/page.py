"""Writes the report: one HTML page that fetches nothing, `table.md` and `results.parquet`."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvkeep.errors import ResultsError
from kvkeep.results.appending import CLAIMS, Run, read_run
from kvkeep.results.claims import Verdict, judge, load_claims
from kvkeep.results.frame import PARQUET, write_parquet
from kvkeep.results.log import read_rows
from kvkeep.results.metrics import COST, METRICS, QUALITY, Metric, metric_named
from kvkeep.results.report.charts import curve, policies_left_out, y_unit
from kvkeep.results.report.heat import head_maps, needle_maps
from kvkeep.results.report.numbers import interval_text, n_text, number_text
from kvkeep.results.report.predictions import choose, script_json
from kvkeep.results.report.rendering import environment, style_sheet, text_of
from kvkeep.results.report.styles import Style, styles_of
from kvkeep.results.report.tables import Block, CostRow, blocks, costs, markdown, protocols_of
from kvkeep.results.rows import FULL, PROTOCOLS, SCHEMA_VERSION, Row
from kvkeep.results.statistics import FEW
from kvkeep.results.summary import budget_label, budgets_of, bytes_label, group, points, policies_of
from kvkeep.whole_files import write_whole

_HERE = "kvkeep.results.report"

PAGE = "index.html"
TABLE = "table.md"

# Characters: a page that can be mailed, and how much of it the predictions take.
PAGE_CHARACTERS, LEAST_PREDICTIONS, MOST_PREDICTIONS = 2_500_000, 100_000, 800_000

SCORE = METRICS["score"]
_CURVES = [metric for metric in QUALITY if metric is not SCORE]
_COST_CURVES = [METRICS[name] for name in ("peak_bytes", "time_to_first_token_s", "decode_tokens_per_s")]


@dataclass(frozen=True)
class Figure:
    """A chart and what filters know of it.

    Attributes:
        title: above the chart.
        detail: beside the title.
        protocol: of the rows.
        family: index of the tasks' family; empty for all of them.
        svg: the drawing; empty where no policy has all tasks.
        left_out: policies that it does not show, and why.
    """

    title: str
    detail: str
    protocol: str
    family: str
    svg: Markup
    left_out: list[str]


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Write the report of a run into its folder: `index.html`, `table.md` and `results.parquet`.

    The page is one file that fetches nothing; the same rows give the same page. Claims are those of the folder's
    `claims.toml`; they are judged only if `run.json` says that they were declared before the run, and are called
    exploratory otherwise.

    Returns:
        The page.

    Raises:
        ResultsError: no run in the folder, no rows, rows of several models.
    """
    folder = Path(folder)
    run, rows = read_run(folder), read_rows(folder)
    if not rows:
        raise ResultsError(
            expected=f"rows in {folder}", received="none", remedy="run the benchmark first; what is done counts"
        )
    models = sorted({(row.model, row.model_sha256) for row in rows})
    if len(models) > 1:
        raise ResultsError(
            expected="rows of one model",
            received=", ".join(f"{name} ({sha[:12]})" for name, sha in models),
            remedy="one folder for each model: means over models say nothing",
        )
    rows.sort(key=lambda row: (row.task, row.length, row.sample, row.turn))
    verdicts = _verdicts(folder, run, rows)
    write_parquet(rows, folder)
    table, cost_table = blocks(rows), costs(rows)
    title = f"Results of {rows[0].model}"
    write_whole(folder / TABLE, markdown(title, budgets_of(rows), table, cost_table, _remarks(rows, verdicts)))
    write_whole(folder / PAGE, _render(run, rows, verdicts, table, cost_table))
    return folder / PAGE


def _render(
    run: Run, rows: Sequence[Row], verdicts: Sequence[Verdict], table: Sequence[Block], cost_table: Sequence[CostRow]
) -> str:
    policies = policies_of(rows)
    styles = styles_of(policies)
    tasks = {task: index for index, task in enumerate(sorted({row.task for row in rows}))}
    families = {family: index for index, family in enumerate(sorted({row.family for row in rows}))}
    heads, scales = head_maps(rows)
    needles = needle_maps(rows)
    script = text_of(_HERE, "page.js")
    page = environment(_HERE, bytes=bytes_label, budget=budget_label).get_template("page.html")
    values = dict(
        css=style_sheet(),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        rows=rows,
        contexts=len({(row.task, row.cluster) for row in rows}),
        policies=policies,
        styles=styles,
        tasks=tasks,
        families=families,
        family_of={row.task: families[row.family] for row in rows},
        protocols={name: PROTOCOLS[name] for name in protocols_of(rows)},
        budgets=budgets_of(rows),
        verdicts=verdicts,
        verdict_cells=[_verdict_cells(verdict) for verdict in verdicts],
        score_figures=_figures(rows, [SCORE], styles, families, by_family=True),
        fidelity_figures=_figures(rows, _CURVES, styles, families),
        cost_figures=_figures(rows, _COST_CURVES, styles, families),
        blocks=table,
        table_metrics=[metric for metric in QUALITY if any(block.metric is metric for block in table)],
        costs=cost_table,
        cost_metrics=COST,
        needles=needles,
        needle_budgets=_ordered_budgets(rows, [figure.budget for figure in needles]),
        heads=heads,
        head_budgets=_ordered_budgets(rows, [figure.budget for figure in heads]),
        scales=scales,
        depth=_depth_text,
        seeds=_union(rows, "seeds"),
        versions=_union(rows, "versions"),
        providers=sorted({row.provider for row in rows if row.provider}),
        settings=json.dumps(run.settings, indent=2, ensure_ascii=False),
        run=run,
        few=FEW,
        schema_version=SCHEMA_VERSION,
        parquet=PARQUET,
        markdown=TABLE,
    )
    room = PAGE_CHARACTERS - len(page.render(values, predictions=Markup("[]"), prediction_count=1))
    limit = min(max(room, LEAST_PREDICTIONS), MOST_PREDICTIONS)
    predictions = choose(rows, {name: style.index for name, style in styles.items()}, tasks, limit)
    return page.render(values, predictions=script_json(predictions), prediction_count=len(predictions))


def _verdicts(folder: Path, run: Run, rows: Sequence[Row]) -> list[Verdict]:
    path = folder / CLAIMS
    if not path.exists():
        return []
    declared = hashlib.sha256(path.read_bytes()).hexdigest() == run.claims_sha256
    return judge(load_claims(path), rows, declared=declared)


def _figures(
    rows: Sequence[Row],
    metrics: Sequence[Metric],
    styles: Mapping[str, Style],
    families: Mapping[str, int],
    by_family: bool = False,
) -> list[Figure]:
    """One chart for each protocol and metric over all tasks, and over each family where there are several."""
    figures = []
    for protocol in protocols_of(rows):
        for metric in metrics:
            members = [row for row in rows if row.protocol == protocol and metric.of(row) is not None]
            parts: list[tuple[str, str, list[Row]]] = [("", "all tasks", members)] if members else []
            found = group(members, lambda row: row.family)
            if by_family and len(found) > 1:
                parts += [(str(families[name]), name, found[name]) for name in sorted(found)]
            for family, name, part in parts:
                figures.append(_figure(part, metric, styles, protocol, family, name if by_family else metric.label))
    return figures


def _figure(
    rows: Sequence[Row], metric: Metric, styles: Mapping[str, Style], protocol: str, family: str, title: str
) -> Figure:
    found = points(rows, metric)
    # Logarithmic axes: no place for a cache that holds nothing, nor for the full cache's divergence from itself.
    whole = [point for point in found if not point.missing and point.held_bytes > 0]
    whole = [point for point in whole if metric.name != "kl" or point.policy != FULL]
    contexts = len({(row.task, row.length, row.cluster) for row in rows})
    tasks, lengths = len({row.task for row in rows}), len({row.length for row in rows})
    detail = f"{protocol}, {tasks} task{'s' * (tasks > 1)}, {contexts} contexts"
    detail += f", {lengths} lengths" if lengths > 1 else ""
    unit = y_unit(whole, metric)[1] if whole else ""
    unit = f" ({unit})" if unit else ""
    svg = curve(whole, metric, styles, f"{metric.label}{unit}, {title}, {detail}") if whole else Markup("")
    title += unit if title == metric.label else ""
    return Figure(title, detail, protocol, family, svg, policies_left_out(found))


def _verdict_cells(verdict: Verdict) -> dict[str, str]:
    """The numbers of a verdict as they are printed."""
    paired, metric = verdict.paired, metric_named(verdict.claim.metric)
    label = metric.label + ("" if metric.higher_is_better else " (lower is better)")
    if paired is None:
        return {"metric": label}
    difference = paired.difference
    ours, theirs = verdict.held_bytes or (0.0, 0.0)
    cells = {
        "metric": label,
        "difference": number_text(difference.mean, None if metric.unit == "bytes" else metric),
        "interval": interval_text(difference, None if metric.unit == "bytes" else metric),
        "n": n_text(difference),
        "dropped": f"{paired.dropped_clusters} ({paired.dropped_rows} rows)",
        "p": f"{paired.p_value:.2g}{'' if paired.exact else ' (sampled)'}",
        "held": f"{bytes_label(ours)} / {bytes_label(theirs)}",
    }
    if verdict.p_holm is not None:
        cells["p_holm"] = f"{verdict.p_holm:.2g}"
    return cells


def _ordered_budgets(rows: Sequence[Row], found: Sequence[Any]) -> list[Any]:
    return [budget for budget in budgets_of(rows) if budget in found]


def _union(rows: Sequence[Row], name: str) -> dict[str, str]:
    """Each key with all its values."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for key, value in getattr(row, name).items():
            values.setdefault(key, set()).add(str(value))
    return {key: ", ".join(sorted(values[key])) for key in sorted(values)}


def _depth_text(depth: float) -> str:
    return f"{depth:g} %"


def _remarks(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> list[str]:
    remarks = [
        f"{len(rows)} rows, model {rows[0].model}, sha256 {rows[0].model_sha256}. Each cell: mean [95 % interval over "
        "contexts], n contexts, held bytes.",
        "Everything outside the claims is exploratory.",
    ]
    return remarks + [
        f"Claim {v.claim.name}: {v.claim.policy} against {v.against}: {v.outcome}"
        f"{' (exploratory: not declared before the run)' if v.exploratory else ''}: {v.reason}."
        for v in verdicts
    ]
