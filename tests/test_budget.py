"""Budgets: one rounding rule; bytes that hold as much as they can and never more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.budget import OFFSET_BYTES, POSITION_BYTES, Budget, LayerShape, parse_bytes, ratio_to_entries
from kvkeep.errors import BudgetError


@pytest.mark.parametrize(
    ("length", "ratio", "entries"),
    [
        (100, 0.8, 20),  # 100 * (1 - 0.8) is 19.999999999999996
        (1000, 0.9, 100),
        (100, 0.9, 10),
        (1000, 0.8, 200),
        (10, 0.0, 10),
        (237, 0.5, 118),
        (237, 0.75, 59),
        (4096, 0.88, 491),
        (8192, 0.83, 1392),
        (3, 0.99, 1),
        (1, 0.5, 1),
    ],
)
def test_a_ratio_rounds_down_and_leaves_at_least_one(length, ratio, entries):
    assert ratio_to_entries(length, ratio) == entries
    assert Budget(compression_ratio=ratio).entries_per_cell([length], []) == [entries]


@given(length=st.integers(1, 10**6), percent=st.integers(0, 99))
def test_a_ratio_in_percent_rounds_as_whole_numbers_do(length, percent):
    assert ratio_to_entries(length, percent / 100) == max(1, length * (100 - percent) // 100)


def test_entries_are_kept_from_each_row_as_far_as_it_has_them():
    budget = Budget(entries=64)
    assert budget.entries_per_cell([10, 64, 1000], [LayerShape(2, 128)]) == [10, 64, 64]


def test_rows_have_budgets_of_their_own():
    assert Budget(compression_ratio=0.75).entries_per_cell([100, 10, 1], []) == [25, 2, 1]


def held(shapes: list[LayerShape], lengths: list[int], entries: list[int]) -> int:
    """Bytes of K, V, positions and offsets, counted entry by entry."""
    total = 0
    for shape in shapes:
        for length, kept in zip(lengths, entries, strict=True):
            assert kept <= length
            total += kept * shape.kv_heads * (shape.entry_bytes + POSITION_BYTES)
        total += (len(lengths) * shape.kv_heads + 1) * OFFSET_BYTES
    return total


@given(
    shapes=st.lists(st.builds(LayerShape, st.integers(1, 8), st.sampled_from([32, 256, 1024])), min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    room=st.integers(0, 10**7),
    reserved=st.integers(0, 10**5),
)
def test_bytes_are_never_exceeded_and_never_wasted(shapes, lengths, room, reserved):
    limit = held(shapes, lengths, [1] * len(lengths)) + reserved + room
    entries = Budget(bytes=limit).entries_per_cell(lengths, shapes, reserved)
    assert held(shapes, lengths, entries) + reserved <= limit
    cap = max(entries)
    assert entries == [min(cap, length) for length in lengths]
    more = [min(cap + 1, length) for length in lengths]
    assert more == entries or held(shapes, lengths, more) + reserved > limit


def test_bytes_at_the_edge():
    shapes, lengths = [LayerShape(kv_heads=3, entry_bytes=512)] * 30, [2048]
    exact = held(shapes, lengths, [100])
    assert Budget(bytes=exact).entries_per_cell(lengths, shapes) == [100]
    assert Budget(bytes=exact - 1).entries_per_cell(lengths, shapes) == [99]
    assert Budget(bytes=exact + 10).entries_per_cell(lengths, shapes, reserved_bytes=10) == [100]
    assert Budget(bytes=10**12).entries_per_cell(lengths, shapes) == [2048]


def test_bytes_that_hold_less_than_one_entry_per_cell():
    shapes = [LayerShape(kv_heads=2, entry_bytes=64)] * 2
    least = held(shapes, [50], [1])
    with pytest.raises(BudgetError, match=f"at least {least + 7} bytes.*received bytes={least + 6}"):
        Budget(bytes=least + 6).entries_per_cell([50], shapes, reserved_bytes=7)


def test_what_a_layer_costs():
    shape = LayerShape(kv_heads=3, entry_bytes=512)
    assert shape.bytes_for(rows=2, entries=0) == 7 * OFFSET_BYTES
    assert shape.bytes_for(rows=2, entries=5) == 2 * 3 * 5 * (512 + POSITION_BYTES) + 7 * OFFSET_BYTES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "received none of them"),
        ({"entries": 3, "bytes": 4}, "exactly one of .* received entries=3, bytes=4"),
        ({"compression_ratio": 1.0}, "0 <= ratio < 1; received 1.0"),
        ({"compression_ratio": -0.1}, "received -0.1"),
        ({"compression_ratio": math.nan}, "received nan"),
        ({"compression_ratio": "0.5"}, "a number for compression_ratio; received '0.5' of type str"),
        ({"entries": 0}, "a whole number of entries, at least 1; received 0"),
        ({"entries": 2.5}, "received 2.5"),
        ({"entries": True}, "received True of type bool"),
        ({"bytes": -1}, "a whole number of bytes"),
        ({"bytes": math.inf}, "received inf"),
        ({"bytes": math.nan}, "received nan"),
        ({"bytes": "64MiB"}, "parse_bytes"),
    ],
)
def test_what_is_no_budget_is_refused(fields, message):
    with pytest.raises(BudgetError, match=message):
        Budget(**fields)


def test_budgets_are_plain_values():
    assert Budget(entries=64).describe() == {"entries": 64}
    assert str(Budget(compression_ratio=0.75)) == "compression_ratio=0.75"
    assert Budget(entries=np.int64(64)) == Budget(entries=64.0) == Budget(entries=64)
    assert type(Budget(entries=np.int64(64)).entries) is int
    assert hash(Budget(bytes=5)) == hash(Budget(bytes=5))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("100000", 100_000),
        (100_000, 100_000),
        ("64MiB", 64 * 2**20),
        (" 64 mib ", 64 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("1.005GB", 1_005_000_000),  # in binary fractions one byte less
        (".5KiB", 512),
        ("7B", 7),
        ("2kB", 2000),
        ("1GiB", 2**30),
    ],
)
def test_bytes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "64 Mib/s", "-3", "1e9", "3 parsecs", "5.", "1_000", "nan"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(BudgetError, match=r"64MiB, 1\.5GB or 100000"):
        parse_bytes(text)
