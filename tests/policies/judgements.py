"""Judgements made up for tests of allocators and selectors, with hypothesis or from plain lists."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from kvkeep.policies import Judgement


def judgement(scores, *, held=None, protected=None, budget, length=None, ordinal=0, layers=1, protects=0):
    """One row. `scores` and `held` are lists by head; `held` names the positions of the entries, all by default.

    Cells are padded to the longest, their missing slots filled with attractive scores that must not be seen.
    """
    held = held or [list(range(len(head))) for head in scores]
    width = max(map(len, held))
    table = torch.full((1, len(held), width), 1e9)
    positions = torch.zeros(1, len(held), width, dtype=torch.int64)
    valid = torch.zeros(1, len(held), width, dtype=torch.bool)
    pinned = torch.zeros_like(valid)
    for head, (values, places) in enumerate(zip(scores, held, strict=True)):
        table[0, head, : len(values)] = torch.tensor(values)
        positions[0, head, : len(places)] = torch.tensor(places)
        valid[0, head, : len(places)] = True
        if protected:
            pinned[0, head, : len(places)] = torch.tensor([p in protected for p in places])
    return Judgement(
        scores=table,
        positions=positions,
        valid=valid,
        protected=pinned,
        budget=budget,
        length=length or int(positions.max()) + 1,
        layer=ordinal,
        ordinal=ordinal,
        layers=layers,
        protects=protects,
    )


@st.composite
def random_judgements(draw, layers=1, max_length=30):
    """Layers of one row: cells with different entries, few distinct scores (so that ties are common), protection."""
    length = draw(st.integers(1, max_length))
    heads = draw(st.integers(1, 3))
    budget = draw(st.integers(1, length))
    protected = draw(st.sets(st.integers(0, length - 1), max_size=budget))
    made = []
    for ordinal in range(layers):
        held, scores = [], []
        for _ in range(heads):
            places = sorted(draw(st.sets(st.integers(0, length - 1), min_size=1)))
            held.append(places)
            scores.append([float(draw(st.integers(0, 5))) for _ in places])
        made.append(
            judgement(
                scores,
                held=held,
                protected=protected,
                budget=budget,
                length=length,
                ordinal=ordinal,
                layers=layers,
                protects=len(protected),
            )
        )
    return made
