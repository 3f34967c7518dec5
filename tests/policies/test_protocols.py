"""What every composed policy does for its parts: protection within the budget, and a look at the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.policies import (
    Allocator,
    Chunks,
    Full,
    KNorm,
    Policy,
    PromptPolicy,
    Scorer,
    Selector,
    SnapKV,
    StreamingLLM,
    Threshold,
    TopK,
    Uniform,
    parse_policy,
)
from kvkeep.testing import random_observation


@dataclass(frozen=True)
class Both(Scorer):
    """Protects sinks and a window."""

    sinks: int = 4
    window: int = 10
    name: ClassVar[str] = "both"

    def protects(self, observation):
        return self.sinks, self.window

    def score(self, observation):
        return observation.zeros()


def protected(policy, **options):
    """Positions that a first prompt of 40 keeps for sure, how many it may be, and notes."""
    judgement = policy.judge(random_observation(length=40, **options))
    assert (judgement.protected == judgement.protected[:, :1]).all()
    return judgement.protected[0, 0].nonzero()[:, 0].tolist(), judgement.protects, judgement.notes


BOTH = Policy(Both(), Uniform(), TopK())


def test_own_protection_takes_half_of_the_budget_at_most():
    assert protected(BOTH, budget=28) == ([0, 1, 2, 3, *range(30, 40)], 14, ())
    positions, most, notes = protected(BOTH, budget=12)
    assert positions == [0, 1, 2, 3, 38, 39]  # sinks first
    assert most == 6
    assert notes == ("both: 4 sinks and a window of 10 shrank to 4 and 2, half of the 12 entries per cell",)
    assert protected(BOTH, budget=6)[0] == [0, 1, 2]
    assert protected(BOTH, budget=1)[0] == []
    assert protected(BOTH, budget=40)[2] == ()


def test_the_callers_protection_comes_before():
    positions, most, notes = protected(BOTH, budget=12, protect=[(10, 19)])
    assert positions == [0, 1, 2, *range(10, 19)]  # 9 of 12 are the caller's, 3 are left
    assert most == 12
    assert "shrank to 3 and 0" in notes[0]
    assert protected(BOTH, budget=12, protect=[(10, 22)])[0] == list(range(10, 22))


def test_a_part_of_its_own_protection_comes_from_the_allocator():
    assert protected(Policy(StreamingLLM(sinks=2), Threshold(floor=3), TopK()), budget=20)[0] == [0, 1, 37, 38, 39]
    assert protected(Policy(SnapKV(window=4), Threshold(floor=3), TopK()), budget=20)[0] == [36, 37, 38, 39]


def test_more_protection_than_the_budget_is_refused():
    parse_policy("knorm").judge(random_observation(budget=5, protect=[(3, 8)]))
    with pytest.raises(BudgetError, match=r"at most 5 protected entries per cell.*received 6 .* in layer 7"):
        parse_policy("knorm").judge(random_observation(budget=5, protect=[(3, 9)], layer=7, layers=8))


def test_what_the_caller_protects_may_be_gone():
    """All layers reckon with the positions that the caller names, whatever they still hold of them."""
    observation = random_observation(length=80, ragged=True, budget=20, protect=[(0, 12)])
    judgement = parse_policy("knorm").judge(observation)
    assert judgement.protects == 12
    assert int(judgement.pinned.max()) < 12
    alone = parse_policy("knorm").judge(replace(observation, protected_positions=None))
    assert alone.protects == int(judgement.pinned.max())


@dataclass(frozen=True)
class Given(Scorer):
    """Scores made by a function."""

    make: object = None
    name: ClassVar[str] = "given"

    def score(self, observation):
        return self.make(observation)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: o.zeros().half(), r"float32 scores of shape \(1, 2, 64\) from given; received torch.float16"),
        (lambda o: o.zeros()[:, 0], r"received torch.float32 of shape \(1, 64\) in layer 0"),
        (lambda o: o.zeros() / 0, "finite scores from given; received 128 scores that are NaN or infinite in layer 0"),
        (lambda o: o.zeros() - torch.inf, "NaN or infinite"),
    ],
)
def test_bad_scores_are_refused(make, message):
    with pytest.raises(PolicyError, match=message):
        Policy(Given(make), Uniform(), TopK()).judge(random_observation())


def test_scores_of_missing_entries_do_not_matter():
    observation = random_observation(ragged=True)
    mark = Given(lambda o: o.zeros().masked_fill(~o.valid, torch.nan))
    for selector in (TopK(), Chunks(5), Chunks(5, fill=True)):
        policy = Policy(mark, Uniform(), selector)
        (mask,) = policy.choose([policy.judge(observation)])
        assert (mask <= observation.valid).all()
        assert mask.any()


def test_full_keeps_everything():
    observation = random_observation(ragged=True, budget=3)
    assert torch.equal(Full().choose([Full().judge(observation)])[0], observation.valid)
    assert Full() == Full()
    assert isinstance(Full(), PromptPolicy)
    assert isinstance(Policy(KNorm(), Uniform(), TopK()), PromptPolicy)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_part_without_a_name_is_called_after_its_class():
    class MyScorer(Scorer):
        def score(self, observation):
            return observation.zeros().half()

    with pytest.raises(PolicyError, match=r"float32 scores of shape .* from my-scorer"):
        Policy(MyScorer(), Uniform(), TopK()).judge(random_observation())

    class Cautious(MyScorer):
        def protects(self, observation):
            return 4, 10

        def score(self, observation):
            return observation.zeros()

    notes = Policy(Cautious(), Uniform(), TopK()).judge(random_observation(length=40, budget=12)).notes
    assert notes[0].startswith("cautious: 4 sinks")


@pytest.mark.parametrize("base", [Scorer, Allocator, Selector])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("MyScorer", "my-scorer"),
        ("H2O", "h2o"),
        ("TOVAPlus", "tova-plus"),
        ("Top2Scorer", "top2-scorer"),
        ("_Mine", "mine"),
        ("My_Own", "my_own"),
    ],
)
def test_names_of_classes(base, kind, name):
    assert type(kind, (base,), {}).name == name
    assert type(kind, (base,), {"name": "given"}).name == "given"


def test_declared_names_are_inherited():
    assert type("My", (SnapKV,), {}).name == "snapkv"
