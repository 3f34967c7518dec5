"""The running contest against sets that are made anew for every query."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import PolicyError
from kvkeep.policies.running import departures, evict_at, first_takers, take_slot, take_slots


def visible(priorities: list[float], q: int, sinks: int, window: int, slots: int) -> set[int]:
    """What query q sees, from the definition: sinks, window, and the best of the others; the older of equal ones."""
    eligible = range(sinks, q - window + 1)
    best = sorted(eligible, key=lambda t: (-priorities[t], t))[:slots]
    return {t for t in range(q + 1) if t < sinks or q - window < t} | set(best)


cases = st.tuples(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(0, 5), st.integers(1, 6), st.integers(1, 6)
)


@given(cases)
def test_evict_at_is_what_every_query_sees(case: tuple[list[int], int, int, int]) -> None:
    """Of few different priorities, so that many are equal."""
    numbers, sinks, window, slots = case
    length = len(numbers)
    other = list(reversed(numbers))
    gone = evict_at(torch.tensor([numbers, other], dtype=torch.float32), sinks, window, slots)
    assert gone.dtype == torch.int64
    for row, priorities in enumerate((numbers, other)):
        ends = gone[row].tolist()
        for q in range(length):
            seen = {t for t in range(q + 1) if t < sinks or q < ends[t]}
            assert seen == visible(list(map(float, priorities)), q, sinks, window, slots)
            assert len(seen) == min(q + 1, sinks + window + slots)
        assert all(t + window <= end <= length or end == length for t, end in enumerate(ends))


@given(cases, st.integers(0, 40))
def test_a_contest_goes_on_where_it_stopped(case: tuple[list[int], int, int, int], cut: int) -> None:
    numbers, _, _, slots = case
    priorities = torch.tensor([numbers], dtype=torch.float32)
    cut = min(cut, len(numbers))
    whole = take_slots(priorities, slots)
    held: dict[int, int] = {}
    for token, slot in enumerate(whole[0, :cut].tolist()):
        if slot >= 0:
            held[slot] = token
    at = torch.tensor([[held[slot] for slot in range(len(held))]], dtype=torch.int64)
    rest = take_slots(priorities[:, cut:], slots, priorities.gather(1, at), at)
    assert torch.equal(torch.cat([whole[:, :cut], rest], dim=1), whole)
    if len(held) == slots and cut < len(numbers):
        assert take_slot(priorities[:, cut], priorities.gather(1, at), at).item() == whole[0, cut]


@given(cases)
def test_departures_and_first_takers_follow_the_slots(case: tuple[list[int], int, int, int]) -> None:
    numbers, _, _, slots = case
    taken = take_slots(torch.tensor([numbers], dtype=torch.float32), slots)
    order = taken[0].tolist()
    for j, slot in enumerate(order):
        later = [i for i in range(j + 1, len(order)) if order[i] == slot]
        expected = j if slot < 0 else (later[0] if later else len(order))
        assert departures(taken)[0, j] == expected
    firsts = [order.index(slot) if slot in order else len(order) for slot in range(slots)]
    assert first_takers(taken, slots)[0].tolist() == firsts


def test_protected_tokens_are_out_of_reach() -> None:
    """They come as +inf, and there are fewer of them than slots."""
    priorities = torch.tensor([[torch.inf, 1.0, 2.0, torch.inf, 3.0, 4.0]])
    assert take_slots(priorities, 3).tolist() == [[0, 1, 2, 1, 2, 2]]


@pytest.mark.parametrize("wrong", [{"sinks": -1}, {"window": 0}, {"slots": 0}])
def test_impossible_geometries_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(PolicyError, match=str(next(iter(wrong.values())))):
        evict_at(torch.zeros(1, 5), **({"sinks": 1, "window": 1, "slots": 1} | wrong))
    with pytest.raises(PolicyError, match="rows, S"):
        evict_at(torch.zeros(5), 1, 1, 1)
