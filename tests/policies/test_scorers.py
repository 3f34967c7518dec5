"""Each scorer against its formula, written out in float64 with loops over heads, queries and entries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.policies import (
    FRC,
    H2O,
    TOVA,
    ExpectedAttention,
    Finch,
    KeyDiff,
    KNorm,
    Policy,
    Random,
    SnapKV,
    StreamingLLM,
    TopK,
    Uniform,
    parse_policy,
)
from kvkeep.testing import gathered, random_observation

TEXTS = {
    "prompt": {"length": 43},
    "ragged": {"length": 60, "ragged": True},
    "batch": {"length": 48, "ragged": True, "batch": 2, "heads": 6, "kv_heads": 3},
    "one-kv-head": {"length": 21, "heads": 3, "kv_heads": 1},
}


@pytest.fixture(params=TEXTS, name="observation")
def _observation(request) -> Observation:
    return random_observation(**TEXTS[request.param], seed=11, budget=16)


# --- the naive side ---------------------------------------------------------------------------------------------------


class Cell:
    """What one (row, KV head) holds, as lists: keys, values, positions; and the query heads that read it."""

    def __init__(self, o: Observation, row: int, head: int) -> None:
        held = o.valid[row, head]
        self.keys, self.values = o.keys[row, head][held].double(), o.values[row, head][held].double()
        self.positions = o.positions[row, head][held].tolist()
        self.held = held
        group = o.queries.shape[1] // o.keys.shape[1]
        self.queries = o.queries[row, head * group : (head + 1) * group].double()  # [G, Q, D]
        self.query_positions = o.query_positions[row].tolist()
        self.scaling = o.scaling
        self.length = o.length

    def attention(self, window: int) -> list[list[list[float]]]:
        """By query head and query of the last `window`: the softmax over what the query sees."""
        rows = []
        for queries in self.queries:
            rows.append([])
            for at, query in list(zip(self.query_positions, queries, strict=True))[-window:]:
                weights = [
                    math.exp(float(query @ key) * self.scaling) if position <= at else 0.0
                    for key, position in zip(self.keys, self.positions, strict=True)
                ]
                rows[-1].append([w / sum(weights) for w in weights])
        return rows

    def mean_attention(self, window: int) -> list[float]:
        """Mean over the group's heads and the last `window` queries."""
        rows = [row for head in self.attention(window) for row in head]
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def cells(o: Observation) -> list[list[Cell]]:
    return [[Cell(o, row, head) for head in range(o.keys.shape[1])] for row in range(o.keys.shape[0])]


def moving(values: list[float], width: int, pool: str = "avg") -> list[float]:
    """Over `width` neighbours, the divisor always `width`."""
    windows = [values[max(0, i - width // 2) : i + width // 2 + 1] for i in range(len(values))]
    return [max(w) if pool == "max" else sum(w) / width for w in windows]


def assert_scores(scores: Tensor, o: Observation, expected: list[list[list[float]]], tolerance: float = 2e-5) -> None:
    assert scores.dtype == torch.float32
    assert scores.shape == o.valid.shape
    for row, heads in enumerate(expected):
        for head, values in enumerate(heads):
            found = scores[row, head][o.valid[row, head]].double()
            torch.testing.assert_close(found, torch.tensor(values).double(), rtol=tolerance, atol=1e-7)


def scored(scorer, o: Observation) -> Tensor:
    """What the policy would score, of what it declared."""
    return scorer.score(gathered(o, scorer.needs()))


# --- attention from the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scorer", [SnapKV(window=6, kernel=5), SnapKV(window=3, kernel=1), SnapKV(6, 3, "max")], ids=str
)
def test_snapkv(observation, scorer):
    judgement = Policy(scorer, Uniform(), TopK()).judge(gathered(observation, scorer.needs()))
    expected = []
    for row in cells(observation):
        expected.append([])
        for cell in row:
            attention = cell.mean_attention(scorer.window)
            window = [p >= observation.length - scorer.window for p in cell.positions]
            pooled = moving(
                [0.0 if w else a for a, w in zip(attention, window, strict=True)], scorer.kernel, scorer.pool
            )
            expected[-1].append(pooled)
    assert_scores(judgement.scores, observation, expected)
    assert torch.equal(judgement.protected, observation.recent(scorer.window))


def test_tova(observation):
    expected = []
    for row in cells(observation):
        by_position: dict[int, float] = {}
        for cell in row:
            for position, value in zip(cell.positions, cell.mean_attention(1), strict=True):
                by_position[position] = by_position.get(position, 0.0) + value / len(row)
        expected.append([[by_position[p] for p in cell.positions] for cell in row])
    assert_scores(scored(TOVA(), observation), observation, expected)
    assert TOVA().protects(observation) == (0, 1)


def test_h2o(observation):
    expected = []
    for row in cells(observation):
        expected.append([])
        for cell in row:
            heads = cell.attention(10**6)
            columns = zip(*[r for head in heads for r in head], strict=True)
            expected[-1].append([sum(column) / len(heads) for column in columns])
    assert_scores(scored(H2O(), observation), observation, expected)
    assert H2O(0.25).protects(observation) == (0, 4)


@pytest.mark.parametrize("question", [None, (-8, 0), (100, 110)])
def test_finch(observation, question):
    length = observation.length
    if question == (-8, 0):
        question = (length - 8, length)
    window = 8 if question and question[0] < length else 5
    observation = replace(observation, question=question)
    expected = []
    for row in cells(observation):
        expected.append([])
        for cell in row:
            total = [0.0] * len(cell.positions)
            heads = cell.attention(window)
            for w, at in enumerate(cell.query_positions[-window:]):
                visible = sum(p <= at for p in cell.positions)
                for head in heads:
                    for i, value in enumerate(head[w]):
                        total[i] += value * visible / len(heads) / min(window, len(cell.query_positions))
            expected[-1].append(total)
    assert_scores(scored(Finch(window=5), observation), observation, expected)
    assert Finch(window=5).protects(observation) == (0, window)


def test_finch_counts_entries_that_get_no_attention():
    """A softmax in float32 gives an exact zero to what is far behind; it was visible all the same."""
    observation = random_observation(length=20)
    observation = replace(observation, keys=observation.keys * 1000)
    rows = gathered(observation, Finch().needs()).attention_rows(4)
    assert (rows[..., :16] == 0).any()
    expected = (rows * torch.tensor([17.0, 18.0, 19.0, 20.0])[:, None]).mean(2)
    torch.testing.assert_close(scored(Finch(window=4), observation), expected)


# --- keys and values alone --------------------------------------------------------------------------------------------


def test_knorm(observation):
    expected = [
        [[-math.sqrt(sum(float(x) ** 2 for x in k)) for k in cell.keys] for cell in row] for row in cells(observation)
    ]
    assert_scores(scored(KNorm(), observation), observation, expected)


def test_keydiff(observation):
    expected = []
    for row in cells(observation):
        expected.append([])
        for cell in row:
            units = [k / math.sqrt(float(k @ k)) for k in cell.keys]
            anchor = sum(units) / len(units)
            size = math.sqrt(float(anchor @ anchor))
            expected[-1].append([-float(unit @ anchor) / size for unit in units])
    assert_scores(scored(KeyDiff(), observation), observation, expected)


def test_streaming_llm(observation):
    expected = [[[float(p) for p in cell.positions] for cell in row] for row in cells(observation)]
    assert_scores(scored(StreamingLLM(), observation), observation, expected)
    whole = random_observation(length=30, budget=10)
    mask = parse_policy("streaming-llm[sinks=3]").choose([parse_policy("streaming-llm[sinks=3]").judge(whole)])[0]
    assert mask[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, *range(23, 30)]


def test_random():
    long, short = random_observation(length=90, kv_heads=4), random_observation(length=20, kv_heads=4)
    scores = scored(Random(), long)
    assert torch.equal(scores[..., :20], scored(Random(), short))  # a position keeps its score
    assert scores.unique().numel() == scores.numel()
    assert 0 <= scores.min() <= scores.max() < 1
    assert scores.mean() == pytest.approx(0.5, abs=0.06)
    assert not torch.equal(scores, scored(Random(seed=1), long))
    everywhere = [scored(Random(), replace(long, layer=layer))[0, head] for layer in range(4) for head in range(4)]
    assert len(torch.stack(everywhere).unique(dim=0)) == 16  # no head draws what another draws in another layer
    assert torch.equal(scores, scored(Random(), replace(long, keys=long.keys.half())))
    ragged = random_observation(length=90, kv_heads=4, ragged=True)
    found, places = scored(Random(), ragged), ragged.positions
    assert torch.equal(found[ragged.valid], scores.gather(2, places)[ragged.valid])


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
def test_small_seeds_are_used_as_they_are(seed):
    observation = random_observation(length=9, kv_heads=2)
    for head in range(2):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + observation.layer * 1009 + head)
        assert torch.equal(scored(Random(seed), observation)[0, head], torch.rand(9, generator=generator))


def test_every_whole_number_is_a_seed():
    observation = random_observation(length=30)
    scores = [scored(Random(seed), observation) for seed in (0, 1, -1, -(10**20), 10**20, 10**20 + 1)]
    assert len(torch.stack(scores).unique(dim=0)) == 6
    assert parse_policy("random[seed=-1]") == Policy(Random(-1), Uniform(), TopK())


# --- expected attention -----------------------------------------------------------------------------------------------


def naive_expected_attention(o: Observation, scorer: ExpectedAttention) -> list[list[list[float]]]:
    """Section 3 of the paper, one future position and one entry at a time."""
    size = o.queries.shape[-1]
    half = size // 2

    def rotation(position: int) -> Tensor:
        matrix = torch.zeros(size, size, dtype=torch.float64)
        for i in range(half):
            angle = position * 10_000.0 ** (-2 * i / size)
            matrix[i, i] = matrix[i + half, i + half] = math.cos(angle)
            matrix[i, i + half], matrix[i + half, i] = -math.sin(angle), math.sin(angle)
        return matrix

    ahead = sum(rotation(o.length + t) for t in range(scorer.future)) / scorer.future
    expected = []
    for row in cells(o):
        expected.append([])
        for cell in row:
            total = [0.0] * len(cell.positions)
            for queries in cell.queries:
                sample = [
                    rotation(at).T @ query
                    for at, query in zip(cell.query_positions, queries, strict=True)
                    if at >= scorer.sinks
                ]
                mean = sum(sample) / len(sample)
                covariance = sum(torch.outer(q - mean, q - mean) for q in sample) / len(sample)
                mean, covariance = ahead @ mean, ahead @ covariance @ ahead.T
                weights = []
                for key, position in zip(cell.keys, cell.positions, strict=True):
                    logit = float(mean @ key) * o.scaling
                    if scorer.covariance:
                        logit += float(key @ covariance @ key) * o.scaling**2 / 2
                    weights.append(0.0 if position < scorer.sinks else math.exp(logit))
                for i, weight in enumerate(weights):
                    total[i] += weight / sum(weights) / len(cell.queries)
            if scorer.value_norm:
                norms = [math.sqrt(float(v @ v)) for v in cell.values]
                total = [(t + scorer.epsilon) * n for t, n in zip(total, norms, strict=True)]
            expected[-1].append(total)
    return expected


@pytest.mark.parametrize(
    "scorer",
    [
        ExpectedAttention(future=16),
        ExpectedAttention(future=5, sinks=0, covariance=False),
        ExpectedAttention(future=16, sinks=2, value_norm=False),
        ExpectedAttention(future=16, epsilon=0.05),
    ],
    ids=str,
)
def test_expected_attention(observation, scorer):
    assert_scores(scored(scorer, observation), observation, naive_expected_attention(observation, scorer), 2e-4)
    assert scorer.protects(observation) == (scorer.sinks, 0)


def test_a_text_of_nothing_but_sinks():
    scores = scored(ExpectedAttention(), random_observation(length=3))
    assert torch.isfinite(scores).all()
    assert (scores > 0).all()


# --- FRC --------------------------------------------------------------------------------------------------------------


def naive_frc(o: Observation, scorer: FRC, width: int) -> list[list[list[float]]]:
    """The formula of the paper, section 5, with features of positions that a head no longer holds at zero."""
    expected = []
    for row in cells(o):
        local, mean, strongest = {}, {}, {}
        for cell in row:
            recent = dict(zip(cell.positions, cell.mean_attention(scorer.window), strict=True))
            whole = dict(zip(cell.positions, cell.mean_attention(scorer.queries), strict=True))
            for position in cell.positions:
                local[position] = local.get(position, 0.0) + recent[position] / len(row)
                mean[position] = mean.get(position, 0.0) + whole[position] / len(row)
                strongest[position] = max(strongest.get(position, 0.0), whole[position])
        dense = [moving([mean[p] for p in cell.positions], width) for cell in row]
        largest = max(map(max, dense))
        expected.append(
            [
                [
                    scorer.local * local[p] / max(local.values())
                    + scorer.density * d / largest
                    + scorer.max_head * strongest[p] / max(strongest.values())
                    for p, d in zip(cell.positions, density, strict=True)
                ]
                for cell, density in zip(row, dense, strict=True)
            ]
        )
    return expected


@pytest.mark.parametrize("scorer", [FRC(), FRC(queries=9, window=4, local=0.2, density=0.7, max_head=0.1)], ids=str)
def test_frc(observation, scorer):
    assert_scores(scored(scorer, observation), observation, naive_frc(observation, scorer, width=3))


@pytest.mark.parametrize(
    ("length", "width"),
    [(1, 3), (127, 3), (128, 5), (256, 9), (512, 17), (1000, 31), (1023, 31), (1024, 33), (4096, 33), (8192, 33)],
)
def test_the_width_of_frcs_density(length, width):
    """One entry gets all the attention of the last query: the density is a box around it."""
    observation = random_observation(length=length, heads=1, kv_heads=1, queries=1, head_size=2)
    middle = length // 2
    keys = torch.zeros(1, 1, length, 2)
    keys[0, 0, middle, 0] = 200.0
    spike = replace(observation, keys=keys, queries=torch.tensor([1.0, 0.0]).view(1, 1, 1, 2))
    scores = FRC(local=0.0, density=1.0, max_head=0.0).score(spike)[0, 0]
    box = list(range(max(0, middle - width // 2), min(length, middle + width // 2 + 1)))
    assert (scores > 0.99).nonzero()[:, 0].tolist() == box
    assert scores.sum() == pytest.approx(
        len(box)
    )  # flat: the divisor is the width at every place, nothing else remains


@pytest.mark.parametrize("length", [128, 1000])
def test_frc_at_greater_widths(length):
    observation = random_observation(length=length, heads=2, kv_heads=2, head_size=4, queries=6)
    width = {128: 5, 1000: 31}[length]
    assert_scores(scored(FRC(), observation), observation, naive_frc(observation, FRC(), width))


@pytest.mark.parametrize(
    ("length", "ratio", "chunks"),
    [
        (4096, 0.75, 51),
        (4096, 0.80, 40),
        (4096, 0.83, 34),
        (4096, 0.88, 24),
        (8192, 0.75, 102),
        (8192, 0.80, 81),
        (8192, 0.83, 69),
        (8192, 0.88, 49),
    ],
)
def test_frc_keeps_as_many_chunks_as_the_paper(length, ratio, chunks):
    from kvkeep.budget import ratio_to_entries

    observation = random_observation(length=length, head_size=2, queries=64, budget=ratio_to_entries(length, ratio))
    policy = parse_policy("frc")
    (mask,) = policy.choose([policy.judge(observation)])
    assert torch.equal(mask[:, 0], mask[:, 1])
    kept = mask[0, 0].nonzero()[:, 0]
    taken, sizes = (kept // 20).unique(return_counts=True)
    last = (length - 1) // 20
    assert sizes.tolist() == [20 if chunk != last else length - 20 * last for chunk in taken.tolist()]
    assert len(taken) == chunks
    assert len(kept) <= observation.budget
