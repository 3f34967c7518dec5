"""Selectors against naive ones, on cells that hold different entries."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.policies import Chunks, TopK, Uniform
from kvkeep.policies.allocators import Ada

from .judgements import judgement, random_judgements


def kept_positions(j, mask):
    """By head, positions that a mask keeps; missing slots may not be kept."""
    assert not (mask & ~j.valid).any()
    return [j.positions[0, head][mask[0, head]].tolist() for head in range(mask.shape[1])]


def entries_of(j):
    """By head, {position: score} of the entries held, and the protected positions."""
    cells, pinned = [], []
    for head in range(j.valid.shape[1]):
        valid = j.valid[0, head]
        positions, scores = j.positions[0, head][valid].tolist(), j.scores[0, head][valid].tolist()
        cells.append(dict(zip(positions, scores, strict=True)))
        pinned.append(set(j.positions[0, head][valid & j.protected[0, head]].tolist()))
    return cells, pinned


def naive_top(candidates, scores, count):
    return set(sorted(candidates, key=lambda p: (-scores[p], p))[:count])


def naive_chunks(j, counts, length, shared, fill):
    """ChunkKV as its docstring tells it, entry by entry."""
    cells, pinned = entries_of(j)
    free = [{p: s for p, s in cell.items() if p not in pins} for cell, pins in zip(cells, pinned, strict=True)]

    def order(owners):
        members: dict[int, list[float]] = {}
        for owner in owners:
            for position, score in free[owner].items():
                members.setdefault(position // length, []).append(score)
        means = {c: Fraction(sum(map(Fraction, values)), len(values)) for c, values in members.items()}
        return sorted(means, key=lambda c: (-means[c], c))

    kept = []
    for head, (cell, pins) in enumerate(zip(cells, pinned, strict=True)):
        chunks = order(range(len(cells)) if shared else [head])
        room = int(counts[0, head]) - len(pins)
        mine, took = set(pins), False
        for chunk in chunks:
            members = [p for p in free[head] if p // length == chunk]
            if len(members) > room:
                break
            room -= len(members)
            mine.update(members)
            took = took or bool(members)
        if not took:
            best = next((c for c in chunks if any(p // length == c for p in free[head])), None)
            mine |= naive_top([p for p in free[head] if p // length == best], free[head], room)
        if fill:
            mine |= naive_top(set(cell) - mine, cell, int(counts[0, head]) - len(mine))
        kept.append(sorted(mine))
    return kept


@given(
    judgements=random_judgements(),
    allocator=st.sampled_from([Uniform(), Ada(0.0), Ada(0.3)]),
    length=st.integers(1, 9),
    shared=st.booleans(),
    fill=st.booleans(),
)
def test_chunks(judgements, allocator, length, shared, fill):
    (j,) = judgements
    (counts,) = allocator.allocate(judgements)
    mask = Chunks(length, shared, fill).select(j, counts)
    assert kept_positions(j, mask) == naive_chunks(j, counts, length, shared, fill)
    assert (mask.sum(-1) <= counts).all()
    assert not fill or torch.equal(mask.sum(-1), counts)
    assert (mask | ~j.protected).all()
    assert mask.any()


@given(judgements=random_judgements(), allocator=st.sampled_from([Uniform(), Ada(0.0), Ada(0.3)]))
def test_topk(judgements, allocator):
    (j,) = judgements
    (counts,) = allocator.allocate(judgements)
    cells, pinned = entries_of(j)
    expected = []
    for head, (cell, pins) in enumerate(zip(cells, pinned, strict=True)):
        best = naive_top(set(cell) - pins, cell, int(counts[0, head]) - len(pins))
        expected.append(sorted(pins | best))
    assert kept_positions(j, TopK().select(j, counts)) == expected


def test_ties_keep_the_lower_positions():
    j = judgement([[1.0] * 6, [2.0, 1.0, 1.0, 2.0, 1.0, 1.0]], budget=3)
    assert kept_positions(j, TopK().select(j, torch.tensor([[3, 3]]))) == [[0, 1, 2], [0, 1, 3]]
    assert kept_positions(j, Chunks(2, shared=False).select(j, torch.tensor([[4, 4]]))) == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_the_last_chunk_is_judged_by_its_own_length():
    j = judgement([[1.0] * 20 + [2.0] * 3], budget=22)
    assert kept_positions(j, Chunks(20).select(j, torch.tensor([[22]]))) == [[20, 21, 22]]
    assert kept_positions(j, Chunks(20).select(j, torch.tensor([[23]]))) == [list(range(23))]
    assert kept_positions(j, Chunks(20, fill=True).select(j, torch.tensor([[5]]))) == [[0, 1, 20, 21, 22]]


def test_a_budget_below_one_chunk_takes_the_best_of_the_best():
    j = judgement([[0.0] * 20 + [1.0, 3.0, 2.0, *[0.5] * 17]], budget=2)
    assert kept_positions(j, Chunks(20).select(j, torch.tensor([[2]]))) == [[21, 22]]


def test_a_cell_without_the_shared_chunk_takes_the_best_that_it_holds():
    j = judgement([[9.0, 9.0], [1.0, 2.0]], held=[[0, 1], [5, 6]], budget=1, length=8)
    assert kept_positions(j, Chunks(4).select(j, torch.tensor([[1, 1]]))) == [[0], [6]]
