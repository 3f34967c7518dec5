"""What a policy sees: attention as a naive float64 softmax gives it, however it is cut into blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvkeep.errors import PolicyError
from kvkeep.observation import Needs, Rotary, SecondPass, attention, smooth
from kvkeep.testing import ordinary_rotary, random_observation

SHAPES = [
    {"length": 37},
    {"length": 37, "ragged": True},
    {"length": 53, "ragged": True, "batch": 3, "heads": 6, "kv_heads": 2},
    {"length": 29, "heads": 4, "kv_heads": 4, "batch": 2},
    {"length": 8, "heads": 3, "kv_heads": 1},
]


def naive_rows(observation, window):
    """`[B, H_kv, W, N]` float64, entry by entry."""
    batch, heads, count, _ = observation.queries.shape
    window = min(window, count)
    kv_heads, held = observation.keys.shape[1:3]
    rows = torch.zeros(batch, kv_heads, window, held, dtype=torch.float64)
    queries, keys = observation.queries.double(), observation.keys.double()
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for w in range(window):
                q = count - window + w
                at = observation.query_positions[b, q]
                weights = {
                    n: math.exp(float(queries[b, h, q] @ keys[b, g, n]) * observation.scaling)
                    for n in range(held)
                    if observation.valid[b, g, n] and observation.positions[b, g, n] <= at
                }
                for n, weight in weights.items():
                    rows[b, g, w, n] += weight / sum(weights.values()) / (heads // kv_heads)
    return rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [1, 5, 1000])
def test_attention_rows(shape, window):
    observation = random_observation(**shape, seed=4)
    rows = observation.attention_rows(window)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.double(), naive_rows(observation, window), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:3]))
    torch.testing.assert_close(observation.window_attention(window), rows.mean(2))


@pytest.mark.parametrize("elements", [1, 10**9])
def test_queries_whose_past_is_gone_look_at_nothing(monkeypatch, elements):
    """They are left over from an earlier chunk, and the entries before them were evicted; in some cells, here."""
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", elements)
    whole = random_observation(length=37, batch=2, seed=4)
    first = whole.positions < torch.tensor([0, 9])[:, None, None]
    gone = first & (torch.arange(whole.keys.shape[1]) == 0)[None, :, None]
    observation = replace(whole, valid=whole.valid & ~gone)
    count = observation.queries.shape[2]
    rows = observation.attention_rows(count)
    torch.testing.assert_close(rows.double(), naive_rows(observation, count), atol=1e-6, rtol=1e-5)
    assert (rows.sum(-1) == 0).any()
    torch.testing.assert_close(observation.window_attention(count), rows.mean(2))
    torch.testing.assert_close(observation.accumulated_attention(), rows.sum(2))
    assert observation.attention_peaks().isfinite().all()


@pytest.mark.parametrize("shape", [{"length": 75}, {"length": 300, "ragged": True}], ids=str)
def test_windows_are_the_same_whoever_asked_first(shape):
    windows = (1, 32, 33, 70)  # of one piece, and of several
    fresh = [random_observation(**shape, seed=4).window_attention(window) for window in windows]
    up, down = random_observation(**shape, seed=4), random_observation(**shape, seed=4)
    upwards = [up.window_attention(window) for window in windows]
    downwards = [down.window_attention(window) for window in reversed(windows)]
    for window, alone, first, last in zip(windows, fresh, upwards, reversed(downwards), strict=True):
        assert torch.equal(alone, first)
        assert torch.equal(alone, last)
        torch.testing.assert_close(alone, up.attention_rows(window).mean(2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accumulated_attention(shape):
    observation = random_observation(**shape, seed=5)
    expected = naive_rows(observation, 1000).sum(2)
    torch.testing.assert_close(observation.accumulated_attention().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("elements", [1, 100, 1000])
def test_blocks_change_nothing(monkeypatch, elements):
    shape = {"length": 40, "batch": 2, "ragged": True}
    whole = random_observation(**shape)
    expected = whole.attention_rows(7), whole.accumulated_attention()
    monkeypatch.setattr(attention, "_BLOCK_ELEMENTS", elements)
    cut = random_observation(**shape)
    blocks = list(cut._probabilities(0))
    assert max(block.numel() for block in blocks) <= max(elements, 2 * 4 * cut.keys.shape[2])
    assert len(blocks) > 1
    torch.testing.assert_close((cut.attention_rows(7), cut.accumulated_attention()), expected)


def test_a_longer_window_after_a_shorter_one():
    observation = random_observation(length=30)
    last = observation.attention_rows(3)
    assert torch.equal(observation.attention_rows(10)[:, :, -3:], last)
    assert observation.attention_rows(2).data_ptr() == observation.attention_rows(10)[:, :, -2:].data_ptr()


def test_half_precision_is_judged_in_float32():
    half = random_observation(length=30, dtype=torch.float16)
    same = replace(half, queries=half.queries.float(), keys=half.keys.float(), values=half.values.float())
    assert torch.equal(half.attention_rows(9), same.attention_rows(9))
    assert torch.equal(half.key_norms(), same.key_norms())
    long = replace(half, keys=half.keys * 0 + 30_000)
    torch.testing.assert_close(long.key_norms(), torch.full((1, 2, 30), 30_000 * 8**0.5))
    assert torch.isfinite(long.attention_rows(9)).all()


def test_queries_that_were_not_declared():
    observation = random_observation(queries=0)
    with pytest.raises(PolicyError, match=r"window of 5 without any query in layer 0.*Needs\(queries"):
        observation.attention_rows(5)


@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize("ragged", [False, True])
def test_heads_are_pooled_by_position(how, ragged):
    observation = random_observation(length=31, batch=2, kv_heads=4, ragged=ragged)
    summary = torch.rand(observation.valid.shape, generator=torch.Generator().manual_seed(1))
    poisoned = summary.masked_fill(~observation.valid, torch.nan)
    pooled = observation.pool_heads(poisoned, how)
    for b in range(2):
        by_position: dict[int, list[float]] = {}
        for g, n in observation.valid[b].nonzero().tolist():
            by_position.setdefault(int(observation.positions[b, g, n]), []).append(float(summary[b, g, n]))
        for g in range(4):
            for n in range(observation.keys.shape[2]):
                expected = 0.0
                if observation.valid[b, g, n]:
                    found = by_position[int(observation.positions[b, g, n])]
                    expected = sum(found) / 4 if how == "mean" else max(found)
                assert float(pooled[b, g, n]) == pytest.approx(expected, abs=1e-6)


def test_summaries_are_shared_where_only_protection_changes():
    observation = random_observation()
    rows = observation.attention_rows(5)
    twin = observation.with_protected(observation.valid)
    assert twin.attention_rows(5).data_ptr() == rows.data_ptr()
    other = replace(observation, keys=-observation.keys)
    assert not torch.equal(other.attention_rows(5), rows)


def test_recent_entries():
    observation = random_observation(length=50, budget=10, ragged=True)
    recent = observation.recent(3)
    assert (recent.sum(-1) == 3).all()
    assert observation.positions[recent].unique().tolist() == [47, 48, 49]
    assert observation.protected_or_none().sum() == 0


def test_needs_add_up():
    assert Needs(3) | Needs(5, rotary=True) == Needs(5, rotary=True)
    assert Needs(3, output_weight=True) | Needs(None) == Needs(None, output_weight=True)
    assert Needs() == Needs(0)
    passes = [frozenset({SecondPass(chunk)}) for chunk in (5, 6)]
    assert Needs(second_passes=passes[0]) | Needs(second_passes=passes[1]) == Needs(second_passes=passes[0] | passes[1])
    assert Needs(second_passes=passes[0]).whole_text
    assert not Needs(9).whole_text


@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("pool", ["avg", "max"])
def test_smoothing_over_held_neighbours(kernel, pool):
    observation = random_observation(length=40, batch=2, ragged=True)
    scores = torch.rand(observation.valid.shape, generator=torch.Generator().manual_seed(2)) + 0.1
    scores = scores.masked_fill(~observation.valid, 0)
    smoothed = smooth(scores, kernel, pool, observation.valid)
    for b in range(2):
        for g in range(2):
            held = scores[b, g][observation.valid[b, g]].tolist()
            expected = []
            for at in range(len(held)):
                window = held[max(0, at - kernel // 2) : at + kernel // 2 + 1]
                expected.append(max(window) if pool == "max" else sum(window) / kernel)
            assert smoothed[b, g][observation.valid[b, g]].tolist() == pytest.approx(expected, rel=1e-5)
            assert (smoothed[b, g][~observation.valid[b, g]] == 0).all()


# --- rotary -----------------------------------------------------------------------------------------------------------


def partial_rotary(head_size, rotated, scale=1.0):
    """As Phi3's: only the first `rotated` of a head's numbers turn, and a long-context variant scales them."""
    whole = ordinary_rotary(rotated)

    def cos_sin(positions):
        cos, sin = whole.cos_sin(positions)
        return scale * cos, scale * sin

    def apply(x, cos, sin):
        return torch.cat([whole.apply(x[..., :rotated], cos, sin), x[..., rotated:]], dim=-1)

    return Rotary(cos_sin, apply)


ROTARIES = {"ordinary": ordinary_rotary(16), "partial": partial_rotary(16, 8), "scaled": partial_rotary(16, 8, 1.3)}


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_unrotate_undoes_rotate(rotary):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 20, 16, generator=generator)
    positions = torch.randint(0, 5000, (2, 20), generator=generator)
    rotated = rotary.rotate(x, positions)
    assert not torch.allclose(rotated, x)
    torch.testing.assert_close(rotary.unrotate(rotated, positions), x, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_the_mean_rotation_is_the_mean_of_rotations(rotary):
    x = torch.randn(16, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(100, 164)
    expected = rotary.rotate(x.expand(1, 1, 64, 16), positions[None])[0, 0].mean(0)
    torch.testing.assert_close(rotary.mean_rotation(positions, 16) @ x, expected, atol=1e-5, rtol=1e-4)
