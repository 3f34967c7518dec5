"""What a program sees: each feature against its formula, written out with loops; and a context that nothing changes."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.errors import PolicyError
from kvkeep.evolve.context import FEATURES, QUERIES, SCALARS, PrefillContext, contexts_of
from kvkeep.observation import Observation
from kvkeep.testing import random_observation

from ..policies.test_scorers import Cell, cells, moving

PAGE = Path(__file__).parents[2] / "docs" / "evolve.md"

TEXTS = {
    "prompt": {"length": 90},
    "short": {"length": 7, "budget": 3},
    "one-token": {"length": 1, "budget": 1},
    "ragged": {"length": 150, "ragged": True},
    "question": {"length": 70, "question": (60, 70)},
    "batch": {"length": 88, "ragged": True, "batch": 2, "heads": 6, "kv_heads": 3},
    "one-kv-head": {"length": 130, "heads": 3, "kv_heads": 1},
    "half": {"length": 66, "dtype": torch.float16},
}


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def plain_key(cell: Cell, position: int) -> list[float]:
    """The key that a cell holds at a position, turned back by the angles of ordinary rotary positions."""
    key = cell.keys[cell.positions.index(position)].tolist()
    half = len(key) // 2
    plain = [0.0] * len(key)
    for i in range(half):
        angle = -position * 10_000.0 ** (-2 * i / len(key))
        plain[i] = key[i] * math.cos(angle) - key[half + i] * math.sin(angle)
        plain[half + i] = key[i] * math.sin(angle) + key[half + i] * math.cos(angle)
    return plain


def naive(o: Observation, row: list[Cell], queries: int = QUERIES) -> dict[str, list[float]]:
    """The features of one row, as docs/evolve.md defines them."""
    heads = range(len(row))
    positions = sorted({position for cell in row for position in cell.positions})
    wide = [dict(zip(cell.positions, cell.mean_attention(queries), strict=True)) for cell in row]
    near = [dict(zip(cell.positions, cell.mean_attention(32), strict=True)) for cell in row]
    a = {p: [wide[g].get(p, 0.0) for g in heads] for p in positions}
    average = {p: mean(a[p]) for p in positions}
    width = max(3, min(33, 2 * (o.length // 64) + 1))
    chunks = {c: mean(average[p] for p in positions if p // 20 == c) for c in {p // 20 for p in positions}}

    def norm(vectors: str, p: int) -> float:
        return mean(
            math.hypot(*getattr(cell, vectors)[cell.positions.index(p)].tolist()) for cell in row if p in cell.positions
        )

    def change(cell: Cell, p: int) -> float:
        before = [q for q in cell.positions if q < p]
        return math.dist(plain_key(cell, p), plain_key(cell, before[-1])) if before else 0.0

    start, end = o.question or (0, 0)
    return {
        "local_attention": [mean(near[g].get(p, 0.0) for g in heads) for p in positions],
        "global_attention": [average[p] for p in positions],
        "neighbor_attn_density": moving([average[p] for p in positions], width),
        "max_head_attention": [max(a[p]) for p in positions],
        "head_consistency": [
            1 - math.sqrt(mean((x - average[p]) ** 2 for x in a[p])) / average[p] if average[p] else 1.0
            for p in positions
        ],
        "head_concentration": [max(a[p]) / sum(a[p]) if sum(a[p]) else 0.0 for p in positions],
        "key_norm": [norm("keys", p) for p in positions],
        "key_change_norm": [mean(change(cell, p) for cell in row if p in cell.positions) for p in positions],
        "chunk_attention_mean": [chunks[p // 20] for p in positions],
        "chunk_rank": [
            sum(m < chunks[p // 20] for m in chunks.values()) / (len(chunks) - 1) if len(chunks) > 1 else 1.0
            for p in positions
        ],
        "position": [float(p) for p in positions],
        "relative_position": [p / (o.length - 1) if o.length > 1 else 0.0 for p in positions],
        "recency": [(o.length - 1 - p) / o.length for p in positions],
        "sink_mask": [float(p < 4) for p in positions],
        "recent_mask": [float(p >= o.length - 32) for p in positions],
        "question_mask": [float(start <= p < end) for p in positions],
        "value_norm": [norm("values", p) for p in positions],
    }


@pytest.mark.parametrize("text", TEXTS)
def test_features_are_their_formulas(text):
    observation = random_observation(**TEXTS[text], seed=3, layer=1, layers=2)
    rows = cells(observation)
    contexts = contexts_of(observation)
    assert len(contexts) == len(rows)
    for context, row in zip(contexts, rows, strict=True):
        expected = naive(observation, row)
        assert list(expected) == list(FEATURES)
        for name, values in expected.items():
            found = getattr(context, name)
            np.testing.assert_allclose(found, values, rtol=2e-4, atol=2e-6, err_msg=name)
        assert len(expected["position"]) == context.L
        assert min(observation.budget, context.L) == context.K
        assert (context.H, context.layer) == (observation.queries.shape[1], 1)
        assert min(64, observation.queries.shape[2]) == context.Q


def test_fewer_queries_may_be_asked_for():
    observation = random_observation(length=60)
    [context] = contexts_of(observation, queries=8)
    [row] = cells(observation)
    np.testing.assert_allclose(context.global_attention, naive(observation, row, 8)["global_attention"], rtol=2e-4)
    assert context.Q == 8


def test_where_no_head_looks_heads_are_consistent_and_not_concentrated():
    """The last position is hidden from all queries but one; with one query before it, from all."""
    observation = random_observation(length=12)
    before = replace(
        observation, queries=observation.queries[:, :, :-1], query_positions=observation.query_positions[:, :-1]
    )
    [context] = contexts_of(before)
    assert context.global_attention[-1] == 0
    assert context.head_consistency[-1] == 1
    assert context.head_concentration[-1] == 0


def same(a: PrefillContext, b: PrefillContext) -> bool:
    ours, theirs = a.to_arrays(), b.to_arrays()
    return all(np.array_equal(ours[name], theirs[name]) for name in (*FEATURES, *SCALARS))


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 90),
    batch=st.integers(1, 2),
    kv_heads=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 90),
    ragged=st.booleans(),
    seed=st.integers(0, 100),
)
def test_missing_entries_and_other_rows_do_not_matter(length, batch, kv_heads, budget, ragged, seed):
    observation = random_observation(
        length=length, batch=batch, kv_heads=kv_heads, budget=min(budget, length), ragged=ragged, seed=seed
    )
    contexts = contexts_of(observation)
    missing = ~observation.valid
    poisoned = replace(
        observation,
        keys=observation.keys.masked_fill(missing[..., None], float("nan")),
        values=observation.values.masked_fill(missing[..., None], float("nan")),
        positions=observation.positions.masked_fill(missing, length - 1),
    )
    assert all(same(a, b) for a, b in zip(contexts, contexts_of(poisoned), strict=True))
    for row, context in enumerate(contexts):
        rows = slice(row, row + 1)
        tensors = {
            name: getattr(observation, name)[rows]
            for name in ("queries", "query_positions", "keys", "values", "positions", "valid")
        }
        [alone] = contexts_of(replace(observation, **tensors))
        for name in FEATURES:  # a product of one row may be rounded in another way than that of two
            np.testing.assert_allclose(getattr(alone, name), getattr(context, name), rtol=1e-4, atol=1e-6)
        held = observation.positions[row][observation.valid[row]].unique()
        assert context.position.tolist() == held.tolist()


def test_names_are_those_of_the_record_and_of_the_page():
    assert len(FEATURES) == 17
    assert tuple(f.name for f in dataclasses.fields(PrefillContext)) == FEATURES + SCALARS
    rows = re.findall(r"^\| `(\w+)` \|.*\| (published|formula ours|ours) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert tuple(name for name, _ in rows) == FEATURES


@pytest.fixture
def context() -> PrefillContext:
    return contexts_of(random_observation(length=50, question=(40, 50)))[0]


def test_a_context_cannot_be_changed(context):
    for one in (
        context,
        copy.deepcopy(context),
        pickle.loads(pickle.dumps(context)),
        context.restricted(np.arange(9), 3),
    ):
        for name in FEATURES:
            feature = getattr(one, name)
            assert feature.dtype == np.float32
            with pytest.raises(ValueError, match="read-only"):
                feature[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                feature.setflags(write=True)
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.K = 3


def test_a_context_does_not_change_with_the_arrays_that_it_was_made_of(context):
    arrays = {name: array.copy() for name, array in context.to_arrays().items()}
    made = PrefillContext.from_arrays(arrays)
    for array in arrays.values():
        array[...] = 7
    assert same(made, context)


def test_arrays_lead_back_to_the_context(context):
    file = io.BytesIO()
    np.savez(file, **context.to_arrays())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        assert same(PrefillContext.from_arrays(arrays), context)
    assert same(pickle.loads(pickle.dumps(context)), context)
    assert all(type(getattr(context, name)) is int for name in SCALARS)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"K": 0}, "1 <= K <= L"),
        ({"K": 51}, "1 <= K <= L"),
        ({"key_norm": np.zeros(49)}, r"shape \(49,\)"),
        ({"key_norm": np.zeros((50, 1))}, r"shape \(50, 1\)"),
        ({"recency": np.full(50, np.nan)}, "NaN or infinity"),
        ({"recency": np.full(50, np.inf)}, "NaN or infinity"),
    ],
)
def test_what_is_no_context_is_refused(context, change, complaint):
    with pytest.raises(PolicyError, match=complaint):
        PrefillContext.from_arrays(context.to_arrays() | change)


def test_a_missing_name_is_told(context):
    arrays = context.to_arrays()
    del arrays["recency"], arrays["H"]
    with pytest.raises(PolicyError, match="none of recency, H"):
        PrefillContext.from_arrays(arrays)


def test_a_restricted_context_is_a_part_of_it(context):
    indices = np.array([0, 7, 8, 30])
    part = context.restricted(indices, 2)
    assert (part.L, part.K, part.H, part.Q, part.layer) == (4, 2, context.H, context.Q, context.layer)
    for name in FEATURES:
        assert getattr(part, name).tolist() == getattr(context, name)[indices].tolist()


def test_what_is_missing_is_told():
    observation = random_observation(length=20)
    with pytest.raises(PolicyError, match="rotary"):
        contexts_of(replace(observation, rotary=None))
    none = replace(
        observation, queries=observation.queries[:, :, :0], query_positions=observation.query_positions[:, :0]
    )
    with pytest.raises(PolicyError, match="queries"):
        contexts_of(none)


def test_the_process_of_programs_needs_no_torch():
    code = "import sys, kvkeep.evolve.context, kvkeep.evolve.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
