"""Questions and answers that the page can be searched for, as JSON that cannot leave its script element."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kvkeep.results.rows import Row
from kvkeep.results.summary import BudgetKey, budget_key, budget_label, group

TEXT = 600  # characters of a question, a reference or a prediction


def choose(
    rows: Sequence[Row], policies: Mapping[str, int], tasks: Mapping[str, int], limit: int
) -> list[dict[str, Any]]:
    """Predictions to show: the first of each task, policy, budget and protocol, then the second of each, and so on.

    Args:
        rows: of one run.
        policies: index of each.
        tasks: index of each.
        limit: characters of JSON.
    """
    cells = list(group([row for row in rows if row.question or row.prediction], _cell).values())
    chosen: list[dict[str, Any]] = []
    used = 0
    for place in range(max(map(len, cells), default=0)):
        for cell in cells:
            if place < len(cell):
                record = _record(cell[place], policies, tasks)
                used += len(json.dumps(record, ensure_ascii=False))
                if used > limit:
                    return chosen
                chosen.append(record)
    return chosen


def script_json(value: Any) -> Markup:
    """JSON that is safe within `<script type="application/json">`: nothing in it can end the element or a line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _cell(row: Row) -> tuple[str, str, BudgetKey, str, int]:
    return row.task, row.policy, budget_key(row), row.protocol, row.length


def _record(row: Row, policies: Mapping[str, int], tasks: Mapping[str, int]) -> dict[str, Any]:
    return {
        "p": policies[row.policy],
        "t": tasks[row.task],
        "protocol": row.protocol,
        "head": f"{row.policy}, {budget_label(budget_key(row))}, {row.protocol}",
        "sample": f"{row.sample}, question {row.turn + 1}",
        "question": _short(row.question),
        "references": [_short(text) for text in row.references],
        "prediction": _short(row.prediction),
        "score": row.score,
    }


def _short(text: str) -> str:
    return text if len(text) <= TEXT else text[:TEXT] + " \N{HORIZONTAL ELLIPSIS}"
