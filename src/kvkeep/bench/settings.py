"""What a run measures: everything that its numbers hang on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvkeep.budget import Budget
from kvkeep.errors import ResultsError

Protocol = Literal["query-agnostic", "query-aware"]


@dataclass(frozen=True)
class Settings:
    """A run's settings, as they go into `run.json`.

    Attributes:
        model: name, folder or hub id.
        tasks: names of tasks, after `expand`.
        lengths: in tokens, template and answer included.
        samples: of each task and length.
        policies: as on the command line; `full` is always run, since others are judged against it.
        budgets: each policy but `full` is run at each of them.
        protocols: was the question hidden or visible when entries were evicted.
        seed: of the samples.
        dtype: of the model.
        max_new_tokens: at most so many for each answer; 0 leaves it to the task.
        stop_at_line: answers end at the first line break behind a word.
        fidelity: also measure the log-probability of the reference answer, and KL and top-1 agreement along it.
        template: use the model's chat template.
        task_options: for all tasks that know them, such as `haystack`.
    """

    model: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    policies: tuple[str, ...]
    budgets: tuple[Budget, ...]
    protocols: tuple[Protocol, ...] = ("query-agnostic",)
    seed: int = 0
    dtype: str = "auto"
    max_new_tokens: int = 0
    stop_at_line: bool = False
    fidelity: bool = True
    template: bool = True
    task_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tasks", "policies", "protocols"):
            if not getattr(self, name):
                raise ResultsError(expected=f"at least one of {name}", received="none", remedy=f"name {name} to run")
        if self.samples < 1 or (not self.budgets and set(self.policies) != {"full"}):
            raise ResultsError(
                expected="at least one sample and one budget",
                received=f"{self.samples} samples, {len(self.budgets)} budgets",
                remedy="for example samples=20, budgets=[Budget(compression_ratio=0.75)]",
            )

    @property
    def cuts(self) -> list[tuple[str, Budget]]:
        """Every policy with every budget, the full cache first."""
        full = ("full", Budget(compression_ratio=0.0))
        others = [(policy, budget) for policy in self.policies if policy != "full" for budget in self.budgets]
        return [full, *others]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        record = dict(vars(self))
        record["budgets"] = [budget.describe() for budget in self.budgets]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}
