"""The audit of a policy: what its caches really weigh, and what its answers are worth when the memory is enforced.

The same ranking is stored in every way of `STORAGES`. Each is weighed on its storages, and scored on real text (`KL`)
and on a question about one fact, so that bytes and score stand side by side. Questions are asked under three protocols:

hidden      the text is cut before the question is known
visible     the text is cut when the question has been read, and its queries rank
document    the text is cut when the question has been read, and only the document's queries rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvkeep.errors import TaskError
from kvkeep.lab.audit_measuring import Auditor, Prompts
from kvkeep.lab.audit_settings import AuditSettings
from kvkeep.lab.audit_tables import Summary, summarise
from kvkeep.results import ResultLog
from kvkeep.tasks.protocols import Sample, Task

__all__ = ["AuditSettings", "Auditor", "Prompts", "Summary", "audit", "summarise"]


def audit(
    settings: AuditSettings,
    tasks: Sequence[Task],
    folder: str | Path,
    auditor: Auditor,
    on_rows: Callable[[int, int, str], None] = lambda done, total, task: None,
) -> Path:
    """Measure what is missing in a folder; a killed audit goes on.

    Args:
        settings: of the audit; a folder that has rows already must have the same ones.
        tasks: that the settings name.
        folder: of the results.
        auditor: measures.
        on_rows: told after each row how many there are, how many there will be, and the task.

    Returns:
        The folder.

    Raises:
        ResultsError: another run's folder.
        TaskError: a length that is too small for a task and the template.
    """
    with ResultLog(folder, settings.to_dict()) as log:
        samples = [sample for task in tasks for sample in _samples(task, settings, auditor)]
        total = sum(len(auditor.keys(sample)) for sample in samples)
        on_rows(len(log), total, "")
        for sample in samples:
            for row in auditor.rows(sample, lambda key: key not in log):
                log.append(row)
                on_rows(len(log), total, row.task)
    return Path(folder)


def _samples(task: Task, settings: AuditSettings, auditor: Auditor) -> Iterator[Sample]:
    room = settings.length - auditor.prompts.overhead
    if room < 1:
        raise TaskError(
            expected=f"a length above the {auditor.prompts.overhead} tokens of the chat template",
            received=f"{settings.length}",
            remedy="ask for more tokens",
        )
    samples = task.samples(auditor.tokenizer, length=room, count=settings.samples, seed=settings.seed)
    return (replace(sample, length=settings.length) for sample in samples)
