from __future__ import annotations

import pytest
from results.fake import row, rows

from kvkeep.errors import ResultsError
from kvkeep.results import FULL
from kvkeep.results.metrics import METRICS, metric_named
from kvkeep.results.summary import budget_label, budgets_of, bytes_label, points, policies_of


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (("compression_ratio", 0.75), "75 % removed"),
        (("compression_ratio", 0.123), "12.3 % removed"),
        (("compression_ratio", 0.0), "nothing removed"),
        (("entries", 1024), "1,024 entries"),
        (("bytes", 1_500_000), "1.5 MB"),
    ],
)
def test_budgets_in_words(budget: tuple[str, float], text: str) -> None:
    assert budget_label(budget) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (23_456_789, "23.5 MB"), (1.5e9, "1.5 GB"), (4.2e12, "4,200 GB")],
)
def test_bytes_in_words(number: float, text: str) -> None:
    assert bytes_label(number) == text


def test_the_loosest_budget_comes_first_and_the_full_cache_has_none() -> None:
    given = [{"entries": 64}, {"compression_ratio": 0.9}, {"entries": 512}, {"compression_ratio": 0.5}]
    made = [row(budget=budget) for budget in given] + [row(policy=FULL, budget={"compression_ratio": 0})]
    assert budgets_of(made) == [
        ("compression_ratio", 0.5),
        ("compression_ratio", 0.9),
        ("entries", 512),
        ("entries", 64),
    ]
    assert policies_of([*made, row(policy="zzz")]) == ["snapkv", "zzz", FULL]


def test_a_policy_that_lacks_a_task_is_not_comparable() -> None:
    made = [row(policy=p, task=t, sample=f"{t}{i}", cluster=f"{t}{i}") for p in "ab" for t in "xy" for i in range(3)]
    made = [r for r in made if (r.policy, r.task) != ("b", "y")]
    whole, partial = points(made, METRICS["score"])
    assert (whole.policy, whole.missing) == ("a", ())
    assert (partial.policy, partial.missing) == ("b", (("y", 1024),))


def test_a_metric_takes_the_rows_that_have_it() -> None:
    made = list(rows(contexts=2, needles=False, lengths=[1024], protocols=["query-aware"]))
    kl = points(made, METRICS["kl"])
    assert {p.estimate.clusters for p in kl} == {2}
    assert FULL not in {p.policy for p in kl}
    score = points(made, METRICS["score"])
    assert score[-1].policy == FULL
    assert all(not p.missing for p in [*kl, *score])
    assert score[0].fraction == pytest.approx(score[0].held_bytes / (1024 * 90 * 256))


def test_an_unknown_metric() -> None:
    with pytest.raises(ResultsError, match="'score'"):
        metric_named("scores")
