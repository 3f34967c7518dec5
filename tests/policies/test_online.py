"""Online policies against what their papers say, and how a cap is divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.policies import (
    OnlineH2O,
    OnlineRandom,
    OnlineStreamingLLM,
    OnlineTOVA,
    StaticPolicy,
    available_policies,
    parse_policy,
    parse_prompt_policy,
    policy_string,
)
from kvkeep.policies.online import Arrivals, Cells, Geometry, OnlinePolicy, State, split_cap
from kvkeep.policies.online_random import scrambled

CELLS = Cells(1, 2, 8, 8, torch.float32, torch.device("cpu"))  # 64 bytes an entry


def arrivals(positions: list[int], heads: int = 2, layer: int = 0) -> Arrivals:
    at = torch.tensor([positions])
    none = torch.zeros(1, heads, len(positions), 8)
    return Arrivals(none, none, at + 1, none, none, at, layer)


@dataclass(frozen=True)
class Remembering(StaticPolicy):
    """Has a memory of some bytes."""

    numbers: int = 40

    def protects(self, entries: int) -> tuple[int, int]:
        return 4, 8

    def begin(self, cells: Cells) -> State:
        return {"memory": torch.zeros(cells.rows, cells.kv_heads, self.numbers, device=cells.device)}

    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        return arrivals.leaving_positions[:, None].float().expand(-1, 2, -1), state


@pytest.mark.parametrize(
    ("policy", "entries", "expected"),
    [
        (OnlineStreamingLLM(), 32, Geometry(4, 8, 20)),
        (OnlineStreamingLLM(sinks=0), 2, Geometry(0, 1, 1)),
        (OnlineRandom(window=5), 32, Geometry(4, 5, 23)),
        (OnlineTOVA(), 32, Geometry(0, 1, 31)),
        (OnlineH2O(), 32, Geometry(0, 16, 16)),
        (OnlineH2O(recent=0.0), 32, Geometry(0, 1, 31)),
        (Remembering(40), 32, Geometry(4, 8, 17, 3)),  # 160 bytes a head are two entries and a half
        (Remembering(32), 32, Geometry(4, 8, 18, 2)),
    ],
)
def test_a_cap_is_divided(policy: OnlinePolicy, entries: int, expected: Geometry) -> None:
    assert split_cap(policy, entries, CELLS) == expected
    assert expected.entries == entries


def test_a_cap_without_a_slot_is_refused_with_all_numbers() -> None:
    with pytest.raises(BudgetError) as error:
        split_cap(Remembering(40), 15, CELLS, protect=[(0, 6), (5, 7)])
    for part in ("15", "4 sinks", "window of 8", "3 for the policy's memory", "3 protected positions", "-3"):
        assert part in str(error.value)
    [needed] = [int(word) for word in str(error.value.remedy).split() if word.isdigit()]
    assert split_cap(Remembering(40), needed, CELLS, protect=[(0, 7)]).slots == 4
    with pytest.raises(BudgetError):
        split_cap(Remembering(40), needed - 1, CELLS, protect=[(0, 7)])


@given(spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5), sinks=st.integers(0, 9))
def test_protected_positions_are_counted_once_and_beyond_the_sinks(spans: list[tuple[int, int]], sinks: int) -> None:
    covered = {position for span in spans for position in range(*span) if position >= sinks}
    policy, taken = OnlineStreamingLLM(sinks=sinks), sinks + 25 + len(covered)  # the window is a quarter of 100
    if taken < 100:
        assert split_cap(policy, 100, CELLS, spans).slots == 75 - sinks
    else:
        with pytest.raises(BudgetError, match=f" {len(covered)} protected positions"):
            split_cap(policy, 100, CELLS, spans)


def test_streaming_llm_prefers_the_later() -> None:
    priorities, _ = OnlineStreamingLLM().priorities(arrivals([3, 7, 2**24 - 1]), {})
    assert priorities.tolist() == [[[3.0, 7.0, 2.0**24 - 1]] * 2]


def test_random_priorities_belong_to_seed_layer_head_and_position() -> None:
    many, _ = OnlineRandom().priorities(arrivals(list(range(4000))), {})
    assert many.dtype == torch.float32
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(float(many.mean()) - 0.5) < 0.02
    assert abs(float(many.var()) - 1 / 12) < 0.005
    one, _ = OnlineRandom().priorities(arrivals([1234]), {})
    assert torch.equal(one[..., 0], many[..., 1234])
    rows = [many[0, 0], many[0, 1]]
    rows += [OnlineRandom(seed=seed).priorities(arrivals(list(range(4000))), {})[0][0, 0] for seed in (1, -1, 2**80)]
    rows += [OnlineRandom().priorities(arrivals(list(range(4000)), layer=1), {})[0][0, 0]]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows))
    assert correlation.abs().max() < 0.08  # five deviations of 1/sqrt(4000)


def test_scrambled_numbers_are_the_published_ones() -> None:
    """Values of MurmurHash3's 32-bit finaliser."""
    assert scrambled(torch.tensor([0, 1, 2**32 - 1])).tolist() == [0, 0x514E28B7, 0x81F16F39]


def test_tova_goes_by_the_last_query_over_all_heads() -> None:
    attention = torch.rand(1, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    priorities = OnlineTOVA().observe(torch.rand(1, 2, 5), attention)
    torch.testing.assert_close(priorities, attention[:, :, 2].mean(1, keepdim=True).expand(1, 2, 5))


def test_h2o_adds_up() -> None:
    attention = torch.rand(1, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    before = torch.rand(1, 2, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(OnlineH2O().observe(before, attention), before + attention.sum(2))


@pytest.mark.parametrize(
    "text",
    ["online-tova", "online-streaming-llm[sinks=0]", "online-h2o[recent=0.25]", "online-random[window=7,seed=3]"],
)
def test_texts_and_policies_are_two_forms_of_the_same(text: str) -> None:
    policy = parse_policy(text)
    assert isinstance(policy, OnlinePolicy)
    assert policy_string(policy) == text
    assert parse_policy(policy) is policy
    with pytest.raises(PolicyError, match="at every step"):
        parse_prompt_policy(text)
    with pytest.raises(PolicyError, match="exchangeable"):
        parse_policy(f"{text}+ada")


def test_kinds_are_listed_apart() -> None:
    online: Mapping[str, object] = available_policies("online")
    assert set(online) >= {"online-streaming-llm", "online-tova", "online-h2o", "online-random"}
    assert not set(online) & set(available_policies())
    assert {entry.kind for entry in available_policies("online").values()} == {"online"}
    assert {entry.kind for entry in available_policies("prompt").values()} == {"prompt"}


@pytest.mark.parametrize("text", ["online-random[window=0]", "online-random[sinks=-1]", "online-h2o[recent=1]"])
def test_options_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        parse_policy(text)
