from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from results.fake import CLAIMS, row

from kvkeep.errors import ResultsError
from kvkeep.results import Fidelity, Memory, Row
from kvkeep.results.claims import Claim, judge, load_claims

BUDGET = {"bytes": 1_000_000}


def claim(**changes: Any) -> Claim:
    fields: dict[str, Any] = {
        "name": "a claim",
        "metric": "score",
        "policy": "ours",
        "against": ("peer", "other"),
        "tasks": ("t",),
        "lengths": (),
        "protocol": "query-agnostic",
        "budget": BUDGET,
        "contexts": 10,
    }
    return Claim(**(fields | changes))


def cell(policy: str, scores: list[float], held: int = 1000, **changes: Any) -> list[Row]:
    memory = Memory(held_bytes=held, full_bytes=4000, fraction=held / 4000, peak_bytes=4000, payload_bytes=held)
    fixed = {"policy": policy, "memory": memory, "task": "t", "budget": BUDGET}
    return [
        row(**({"sample": f"t/{i}", "cluster": f"t/{i}", "score": score} | fixed | changes))
        for i, score in enumerate(scores)
    ]


GOOD, BAD = [1.0] * 12, [0.0] * 9 + [1.0] * 3


def test_a_win_and_a_loss() -> None:
    rows = [*cell("ours", GOOD), *cell("peer", BAD), *cell("other", GOOD)]
    win, tie = judge([claim()], rows, declared=True)
    assert (win.outcome, win.against, win.exploratory) == ("win", "peer", False)
    assert win.paired is not None
    assert win.p_holm == pytest.approx(2 * win.paired.p_value)
    assert tie.outcome == "not shown"
    (loss,) = judge([claim(policy="peer", against=("ours",))], rows, declared=True)
    assert loss.outcome == "loss"


def test_a_win_needs_its_threshold() -> None:
    rows = [*cell("ours", GOOD), *cell("peer", BAD)]
    (verdict,) = judge([claim(against=("peer",), threshold=0.8)], rows, declared=True)
    assert verdict.outcome == "not shown"
    assert "below the declared 0.8" in verdict.reason


def test_lower_is_better_where_it_is() -> None:
    rows = [
        row(
            policy=policy, sample=f"t/{i}", cluster=f"t/{i}", task="t", budget=BUDGET, fidelity=Fidelity(kl=kl + i / 99)
        )
        for policy, kl in (("ours", 0.1), ("peer", 0.5))
        for i in range(12)
    ]
    (verdict,) = judge([claim(metric="kl", against=("peer",))], rows, declared=True)
    assert verdict.outcome == "win"
    assert verdict.paired is not None
    assert verdict.paired.difference.mean == pytest.approx(-0.4)


def test_a_claim_that_was_not_declared_is_exploratory() -> None:
    (verdict,) = judge([claim(against=("peer",))], [*cell("ours", GOOD), *cell("peer", BAD)], declared=False)
    assert (verdict.outcome, verdict.exploratory) == ("win", True)


def test_unequal_bytes_are_not_judged_unless_the_claim_says_so() -> None:
    rows = [*cell("ours", GOOD, held=1011), *cell("peer", BAD)]
    (verdict,) = judge([claim(against=("peer",))], rows, declared=True)
    assert verdict.outcome == "not judged"
    assert "1,011 bytes of ours and 1,000 bytes of peer" in verdict.reason
    (verdict,) = judge([claim(against=("peer",), equal_bytes=False)], rows, declared=True)
    assert verdict.outcome == "win"


def test_what_a_run_does_not_bear_is_not_judged() -> None:
    rows = [*cell("ours", GOOD), *cell("peer", BAD)]
    few, missing = judge([claim(against=("peer", "absent"), contexts=13)], rows, declared=True)
    assert (few.outcome, few.reason) == ("not judged", "12 contexts shared, 13 were declared")
    assert missing.reason == "no rows of absent for t"
    _, length = judge(
        [claim(against=("peer",), lengths=(1024,)), claim(against=("peer",), lengths=(64,))], rows, declared=True
    )
    assert "length 64" in length.reason
    apart = [*cell("ours", GOOD), *cell("peer", BAD, sample="elsewhere", cluster="elsewhere")[:1]]
    (verdict,) = judge([claim(against=("peer",))], apart, declared=True)
    assert verdict.reason == "the two share no context"


def test_other_cells_have_no_part_in_it() -> None:
    rows = [*cell("ours", GOOD), *cell("peer", BAD)]
    noise = [
        *cell("peer", GOOD, protocol="query-aware"),
        *cell("peer", GOOD, budget={"bytes": 2_000_000}),
        *cell("peer", GOOD, task="u"),
    ]
    assert judge([claim(against=("peer",))], rows + noise, declared=True) == judge(
        [claim(against=("peer",))], rows, declared=True
    )


@pytest.mark.parametrize(
    ("written", "in_rows"),
    [
        ("kvzip+threshold[floor=32]", "contour"),
        ("SnapKV[kernel=7, window=32]", "snapkv"),
        ("snapkv+chunks", "chunkkv"),
        ("snapkv", "snapkv[window=32]"),
        ("a-plugin-that-is-gone", "a-plugin-that-is-gone"),
    ],
)
def test_policies_are_matched_by_what_they_are(written: str, in_rows: str) -> None:
    rows = [*cell(in_rows, GOOD), *cell("random", BAD)]
    (verdict,) = judge([claim(policy=written, against=("random[seed=0]",))], rows, declared=True)
    assert verdict.outcome == "win", verdict.reason


def test_other_options_are_another_policy() -> None:
    rows = [*cell("snapkv[window=64]", GOOD), *cell("random", BAD)]
    (verdict,) = judge([claim(policy="snapkv", against=("random",))], rows, declared=True)
    assert verdict.reason == "no rows of snapkv for t"


def test_opponents_that_cannot_be_judged_soften_nothing() -> None:
    rows = [*cell("ours", GOOD), *cell("peer", BAD), *cell("other", BAD, held=3000)]
    alone, of_two = (judge([claim(against=names)], rows, declared=True)[0] for names in (("peer",), ("peer", "other")))
    assert alone.p_holm is not None
    assert of_two.p_holm == pytest.approx(2 * alone.p_holm)


def test_a_claims_file(tmp_path: Path) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(CLAIMS)
    first, second = load_claims(path)
    assert first.against == ("snapkv", "random[seed=0]")
    assert first.budget == {"compression_ratio": 0.9}
    assert (first.threshold, first.seed, first.equal_bytes, first.lengths) == (0.0, 0, True, (4096, 1024))
    assert (second.equal_bytes, second.lengths) == (False, ())


@pytest.mark.parametrize(
    ("old", "new", "received"),
    [
        ("contexts = 10\n", "", "contexts = None"),
        ("contexts = 10", "contexts = 1", "contexts 1"),
        ("contexts = 100", "contexts = true", "contexts = True"),
        ("contexts = 10", "contexts = 10\nn = 3", "unknown fields: n"),
        ('metric = "score"', 'metric = "scores"', "'scores'"),
        ('protocol = "query-agnostic"', 'protocol = "agnostic"', "'agnostic'"),
        ("compression_ratio = 0.9 }", "compression_ratio = 9 }", "budget that is none"),
        ('"random[seed=0]"', '"snapkv"', "against"),
        ('"random[seed=0]"', '"snapkv[window=32]"', "twice the same"),
        ('"random[seed=0]"', '"contour"', "the policy itself"),
        ('["snapkv", "random[seed=0]"]', "[3]", "against = [3]"),
        ('"a policy that was not run"', '"kvzip with a threshold is ahead of its peers"', "comes twice"),
        ("[claim.cell]", "[claim.room]", "without its [claim.cell]"),
        ("[[claim]]", "[[claims]]", "claims"),
        ("=", "==", "Invalid"),
    ],
)
def test_a_claims_file_that_is_wrong(tmp_path: Path, old: str, new: str, received: str) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(CLAIMS.replace(old, new))
    with pytest.raises(ResultsError) as error:
        load_claims(path)
    assert received in str(error.value)


def test_no_claims_file(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="No such file"):
        load_claims(tmp_path / "none.toml")
