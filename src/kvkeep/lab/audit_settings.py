"""What an audit's numbers hang on, and how its rows are named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvkeep.errors import ResultsError
from kvkeep.results import FULL, Key, row_key
from kvkeep.tasks.protocols import CONTINUATION, Sample, Turn

# What a row's protocol says of each of the audit's; the third is told apart by its option `ranking`.
PROTOCOLS = {"hidden": "query-agnostic", "visible": "query-aware", "document": "query-aware"}
# Beside the ways of STORAGES: the cache that a prompt of its own filled, weighed.
OWN = "own-prefill"


@dataclass(frozen=True)
class AuditSettings:
    """What an audit's numbers hang on, as they go into `run.json`.

    Attributes:
        model: name, folder or hub id.
        policies: as on the command line.
        ratios: compression ratios, above 0.
        tasks: names.
        length: tokens of a sample, template and answer included.
        samples: of each task.
        seed: of the samples.
        dtype: of the model.
        max_new_tokens: at most so many for each answer; 0 leaves it to the task.
        task_options: such as `haystack`.

    Raises:
        ResultsError: nothing to audit, or a ratio that removes nothing.
    """

    model: str
    policies: tuple[str, ...]
    ratios: tuple[float, ...]
    tasks: tuple[str, ...]
    length: int = 1024
    samples: int = 4
    seed: int = 0
    dtype: str = "auto"
    max_new_tokens: int = 0
    task_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.policies or FULL in self.policies or self.samples < 1:
            raise ResultsError(
                expected="at least one policy that evicts, and one sample",
                received=f"policies {', '.join(self.policies) or 'none'}; {self.samples} samples",
                remedy="the full cache is always measured beside them",
            )
        if not self.ratios or not all(0 < ratio < 1 for ratio in self.ratios):
            raise ResultsError(
                expected="compression ratios above 0 and below 1",
                received=f"{self.ratios}",
                remedy="for example 0.75, which removes three entries of four",
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        record = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {"audit": 1, **record}


def protocols_of(turn: Turn) -> tuple[str, ...]:
    """Those that make sense for a turn."""
    if turn.continues:
        return ()  # what went before is another answer in each cache
    return ("hidden",) if turn.metric == CONTINUATION else tuple(PROTOCOLS)


def family_of(storage: str, protocol: str) -> str:
    """Rows of one family are comparable: stored alike, and ranked by the same rows."""
    return f"{storage}+document-rows" if protocol == "document" else storage


def audit_key(sample: Sample, index: int, storage: str, protocol: str, policy: str, ratio: float) -> Key:
    """The key of a row."""
    named = f"{family_of(storage, protocol)}/{sample.key}"
    return row_key(named, index, policy, {"compression_ratio": ratio}, PROTOCOLS[protocol])
