"""Compactor against its formulas, written out in float64 with loops over chunks, heads and entries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvkeep.errors import PolicyError
from kvkeep.observation import Observation, attention
from kvkeep.policies import Compactor, parse_policy
from kvkeep.testing import check_policy, gathered, random_observation


@pytest.mark.parametrize(
    "name",
    ["compactor", "compactor+ada", "compactor+threshold", "compactor[chunk=5,sinks=0,recent=0,blending=0.5,sketch=3]"],
)
def test_it_keeps_the_contract(name):
    assert check_policy(name) == []


def scored(scorer: Compactor, o: Observation) -> Tensor:
    return scorer.score(gathered(o, scorer.needs()))


# --- the naive side ---------------------------------------------------------------------------------------------------


def unrotated(o: Observation, row: int, head: int, slot: int) -> list[float]:
    """A key before its rotation: two halves turned back by the position's angles."""
    key, position = o.keys[row, head, slot].tolist(), int(o.positions[row, head, slot])
    half = len(key) // 2
    first, second = [], []
    for i in range(half):
        angle = position * 10_000.0 ** (-2 * i / len(key))
        first.append(key[i] * math.cos(angle) + key[half + i] * math.sin(angle))
        second.append(key[half + i] * math.cos(angle) - key[i] * math.sin(angle))
    return first + second


def naive_leverage(scorer: Compactor, o: Observation, row: int, head: int, slots: list[int]) -> list[float]:
    """The hat matrix's diagonal, of the whole matrix."""
    x = torch.tensor([unrotated(o, row, head, slot) for slot in slots], dtype=torch.float64)
    x = x - x.mean(0)
    if scorer.sketch < x.shape[1]:
        x = x @ scorer._projection(o.layer, o.keys.shape[1], x.shape[1])[head].double()
    hat = x @ torch.linalg.inv(x.T @ x + scorer.ridge * torch.eye(x.shape[1], dtype=torch.float64)) @ x.T
    return hat.diagonal().tolist()


def naive_attention(scorer: Compactor, o: Observation, row: int, head: int, slots: list[int]) -> list[float | None]:
    """Sum over the queries of the entry's chunk, mean over the group; None where it has no queries."""
    group = o.queries.shape[1] // o.keys.shape[1]
    chunks: dict[int, list[int]] = {}
    for slot in slots:
        chunks.setdefault((int(o.positions[row, head, slot]) - scorer.sinks) // scorer.chunk, []).append(slot)
    asks: dict[int, list[int]] = {}
    for index, at in enumerate(o.query_positions[row].tolist()):
        if scorer.sinks <= at < o.length - scorer.recent:
            asks.setdefault((at - scorer.sinks) // scorer.chunk, []).append(index)
    found: dict[int, float | None] = dict.fromkeys(slots)
    for number, members in chunks.items():
        if number not in asks:
            continue
        keys = o.keys[row, head, members].double()
        total = torch.zeros(len(members), dtype=torch.float64)
        for member in range(group):
            queries = o.queries[row, head * group + member, asks[number]].double()
            total += (queries @ keys.T * o.scaling).softmax(-1).sum(0) / group
        norms = o.values[row, head, members].double().norm(dim=-1)
        found.update(zip(members, (total * norms).tolist(), strict=True))
    return [found[slot] for slot in slots]


def standard(values: list[float]) -> list[float]:
    x = torch.tensor(values, dtype=torch.float64)
    return ((x - x.mean()) / x.std()).tolist()


def naive(scorer: Compactor, o: Observation, row: int) -> list[list[tuple[int, float]]]:
    """By head the slots that are counted, and their scores."""
    blending = 1 - o.budget / o.length if scorer.blending is None else scorer.blending
    slots, attention, leverage = [], [], []
    for head in range(o.keys.shape[1]):
        held = [n for n in range(o.keys.shape[2]) if bool(o.valid[row, head, n])]
        mine = [n for n in held if scorer.sinks <= int(o.positions[row, head, n]) < o.length - scorer.recent]
        slots.append(mine)
        raw = naive_attention(scorer, o, row, head, mine)
        known = [0.0, *(x for x in raw if x is not None), 0.0]
        smoothed = iter(sum(known[i : i + 3]) / 3 for i in range(len(known) - 2))
        attention.append([None if x is None else next(smoothed) for x in raw])
        leverage.append(naive_leverage(scorer, o, row, head, mine))
    z_attention = iter(standard([x for head in attention for x in head if x is not None]))
    z_leverage = iter(standard([x for head in leverage for x in head]))
    return [
        [
            (slot, (0.0 if x is None else next(z_attention)) + blending * next(z_leverage))
            for slot, x in zip(mine, seen, strict=True)
        ]
        for mine, seen in zip(slots, attention, strict=True)
    ]


@pytest.mark.parametrize(
    "shape",
    [
        {"length": 61},
        {"length": 61, "head_size": 16, "layer": 2, "layers": 3},
        {"length": 72, "ragged": True, "batch": 2, "heads": 6, "kv_heads": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("scorer", [Compactor(chunk=9), Compactor(3, 2, chunk=20, sketch=4, blending=0.35)], ids=str)
def test_scores(shape, scorer):
    o = random_observation(**shape, budget=16, seed=5)
    scores = scored(scorer, o)
    assert scores.dtype == torch.float32
    for row in range(o.keys.shape[0]):
        expected = naive(scorer, o, row)
        highest = max(value for head in expected for _, value in head)
        for head, pairs in enumerate(expected):
            counted = [slot for slot, _ in pairs]
            ours = scores[row, head, counted].double()
            torch.testing.assert_close(ours, torch.tensor([v for _, v in pairs]).double(), rtol=1e-4, atol=1e-4)
            others = o.valid[row, head].clone()
            others[counted] = False
            torch.testing.assert_close(
                scores[row, head][others].double(), others[others].double() * highest, rtol=1e-4, atol=1e-4
            )


# --- what must hold besides -------------------------------------------------------------------------------------------


def test_attention_looks_both_ways_and_not_beyond_its_chunk():
    """An entry of the first half of a chunk is scored by queries behind and before it; other chunks do not matter."""
    o = random_observation(length=52, budget=20)
    scorer = Compactor(sinks=0, recent=0, chunk=26, blending=0.0)
    before = scored(scorer, o)
    for column, changes in ((10, True), (40, False)):
        queries = o.queries.clone()
        queries[:, :, column] += 3
        after = scored(scorer, replace(o, queries=queries))
        # z is taken over both chunks, and the last entry has a neighbour in the other one: within the first chunk,
        # what z leaves alone are ratios of differences.
        first, other = ((x[..., :25] - x[..., :1]) / (x[..., 5:6] - x[..., :1]) for x in (before, after))
        assert torch.allclose(first, other, rtol=1e-3, atol=1e-3) != changes


def test_the_same_seed_projects_alike_and_another_does_not():
    o = random_observation(length=80, budget=20, head_size=32)
    scores = {seed: scored(Compactor(sketch=6, seed=seed), o) for seed in (0, 0, 1)}
    assert torch.equal(scores[0], scored(Compactor(sketch=6), o))
    assert not torch.allclose(scores[0], scores[1])
    assert not torch.equal(*(Compactor()._projection(0, 2, 64)[head] for head in range(2)))


def test_keys_that_nothing_else_spans_stay():
    """One key in a direction of its own has leverage near one; leverage sees directions before rotation."""
    o = random_observation(length=64, budget=20, head_size=8)
    assert o.rotary is not None
    plain = torch.zeros(1, 2, 64, 8)
    plain[..., :4] = torch.randn(1, 2, 64, 4, generator=torch.Generator().manual_seed(0))
    plain[0, 0, 30, 6] = 5.0
    keys = o.rotary.rotate(plain, torch.arange(64)[None])
    scores = scored(Compactor(blending=1000.0), replace(o, keys=keys))
    assert int(scores[0, 0, 8:60].argmax()) + 8 == 30


def test_blocks_change_nothing(monkeypatch):
    o = random_observation(length=100, budget=30, batch=2, ragged=True)
    whole = scored(Compactor(chunk=40), o)
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", 100)
    torch.testing.assert_close(scored(Compactor(chunk=40), replace(o)), whole, rtol=1e-4, atol=1e-5)


def test_blending_follows_the_budget():
    few, many = (random_observation(length=60, budget=budget) for budget in (6, 54))
    assert torch.allclose(scored(Compactor(), few), scored(Compactor(blending=0.9), few))
    assert torch.allclose(scored(Compactor(), many), scored(Compactor(blending=0.1), many))
    assert parse_policy("compactor[blending=0.5]").scorer == Compactor(blending=0.5)


@pytest.mark.parametrize(
    "options", [{"sinks": -1}, {"recent": -1}, {"chunk": 0}, {"sketch": 0}, {"ridge": 0.0}], ids=str
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        Compactor(**options)
