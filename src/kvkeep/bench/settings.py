"""What a run measures: everything that its numbers hang on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

from kvkeep.budget import Budget
from kvkeep.errors import ResultsError
from kvkeep.hf.sampling import Sampling
from kvkeep.policies import parse_policy
from kvkeep.policies.online import OnlinePolicy

Protocol = Literal["query-agnostic", "query-aware"]


@lru_cache(maxsize=256)
def is_online(policy: str) -> bool:
    """Whether the policy of that name holds its cap at every step, also while it generates."""
    return isinstance(parse_policy(policy), OnlinePolicy)


@dataclass(frozen=True)
class Settings:
    """A run's settings, as they go into `run.json`.

    Attributes:
        model: name, folder or hub id.
        tasks: names of tasks, after `expand`.
        lengths: in tokens, template and answer included.
        samples: of each task and length.
        policies: as on the command line; `full` is always run, since others are judged against it.
        budgets: each policy but `full` is run at each of them, online policies at those in entries or bytes.
        protocols: was the question hidden or visible when entries were evicted.
        seed: of the samples.
        dtype: of the model.
        max_new_tokens: at most so many for each answer; 0 leaves it to the task.
        stop_at_line: answers end at the first line break behind a word, unless several things are asked for.
        fidelity: also measure the log-probability of the reference answer, and KL and top-1 agreement along it.
        template: use the model's chat template.
        task_options: for all tasks that know them, such as `haystack`.
        sampling: how the tokens of answers are drawn; None takes the likeliest.
        rollouts: answers to each question, each drawn with random numbers of its own.
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
    sampling: Sampling | None = None
    rollouts: int = 1

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
        missing = [policy for policy in self.policies if policy not in {cut[0] for cut in self.cuts}]
        if missing:
            raise ResultsError(
                expected=f"entries or bytes as a budget for {', '.join(missing)}, which holds its cap at every step",
                received=", ".join(map(str, self.budgets)),
                remedy="for example --entries 512 beside the ratios of other policies",
            )
        if self.rollouts < 1 or (self.rollouts > 1 and self.sampling is None):
            raise ResultsError(
                expected="at least one rollout, and sampling for several: the likeliest tokens are always the same",
                received=f"{self.rollouts} rollouts, {'no sampling' if self.sampling is None else self.sampling}",
                remedy="for example rollouts=4, sampling=Sampling(temperature=0.6, top_p=0.95, top_k=20)",
            )

    @property
    def cuts(self) -> list[tuple[str, Budget]]:
        """Every policy with every budget, the full cache first.

        A policy that holds a cap at every step has no ratio: it would depend on the length of a text that goes on.
        """
        full = ("full", Budget(compression_ratio=0.0))
        others = [(policy, budget) for policy in self.policies if policy != "full" for budget in self.budgets]
        return [full, *(cut for cut in others if not (is_online(cut[0]) and cut[1].compression_ratio is not None))]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it. Sampling is left out where there is none, so that runs from before it was there go on."""
        record = dict(vars(self))
        del record["sampling"], record["rollouts"]
        if self.sampling is not None:
            record |= {"sampling": asdict(self.sampling), "rollouts": self.rollouts}
        record["budgets"] = [budget.describe() for budget in self.budgets]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}
