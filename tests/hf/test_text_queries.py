"""Queries that wait for the end of their text: the last ones that a policy wants, however they came."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.hf.text_queries import TextQueries

HEADS, SIZE = 3, 2


def naive(pieces, row, wanted):
    """Queries `[H, Q, D]` and positions of a row, token by token."""
    kept = [
        (queries[row, :, column], int(positions[row, column]))
        for queries, positions, valid in pieces
        for column in range(queries.shape[2])
        if valid is None or valid[row, column]
    ]
    kept = kept if wanted is None else kept[max(0, len(kept) - wanted) :]
    stacked = torch.stack([query for query, _ in kept], dim=1) if kept else torch.zeros(HEADS, 0, SIZE)
    return stacked, [position for _, position in kept]


@given(
    wanted=st.none() | st.integers(0, 7),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    padded=st.booleans(),
    rows=st.permutations([0, 1]),
    seed=st.integers(0, 1000),
)
def test_the_last_ones_of_each_row_are_held(wanted, widths, padded, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    seen, pieces, start = TextQueries(wanted), [], 0
    for width in widths:
        queries = torch.randn(2, HEADS, width, SIZE, generator=generator)
        positions = torch.arange(start, start + width).expand(2, -1)
        valid = torch.rand(2, width, generator=generator) < 0.7 if padded else None
        pieces.append((queries, positions, valid))
        seen.add(queries, positions, valid)
        start += width
        fork = seen.copy()
        seen.forget_old(leave_shape=True)
        fork.clear()  # must not reach what it was copied from
    seen.select(torch.tensor(rows))
    for row, former in enumerate(rows):
        queries, positions = seen.of_rows(row, row + 1)
        expected, places = naive(pieces, former, wanted)
        assert positions.dtype == torch.int64
        if padded:  # how far back they are held is counted in columns, padding included
            count, columns = positions.shape[1], torch.cat([valid[former] for _, _, valid in pieces])
            least = int(columns[0 if wanted is None else max(0, len(columns) - wanted) :].sum())
            assert least <= count <= len(places)
            expected, places = expected[:, expected.shape[1] - count :], places[len(places) - count :]
        assert positions[0].tolist() == places
        assert torch.equal(queries[0], expected)


@given(wanted=st.integers(0, 9), widths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_no_more_memory_is_held_than_is_wanted(wanted, widths):
    seen = TextQueries(wanted)
    for width in widths:
        seen.add(torch.zeros(1, HEADS, width, SIZE), torch.zeros(1, width, dtype=torch.int32), None)
        seen.forget_old()
    held = sum(tensor.untyped_storage().nbytes() for tensor in seen.tensors())
    assert held == min(wanted, sum(widths)) * (HEADS * SIZE * 4 + 4)
