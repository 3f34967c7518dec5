from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.learn import InputStatistics, KVpopConfig, KVpopScorer, LearnError, ModelShape, scorer_inputs
from kvkeep.observation import Rotary


def rotary(size):
    """A plain rotation of the pairs (i, i + D/2)."""
    frequencies = 100.0 ** -(torch.arange(size // 2, dtype=torch.float64) / (size // 2))

    def cos_sin(positions):
        angles = (positions[..., None].double() * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    def apply(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    return Rotary(cos_sin, apply)


def tensors(size=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, size, generator=generator, dtype=torch.float64) for _ in range(2)]


def test_cached_inputs_are_what_the_cache_holds_and_detached():
    keys, values = tensors()
    keys.requires_grad_()
    found = scorer_inputs(keys, values)
    assert not found.requires_grad
    assert torch.equal(found, torch.cat([keys.detach(), values], -1))


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_other_inputs_do_not_depend_on_the_position(start):
    keys, values = tensors()
    turning, positions = rotary(6), (start + torch.arange(5)).expand(2, -1)
    rotated = turning.rotate(keys, positions)
    unrotated = scorer_inputs(rotated, values, "unrotated", positions=positions, rotary=turning)
    torch.testing.assert_close(unrotated, torch.cat([keys, values], -1), rtol=1e-9, atol=1e-9)
    lengths = scorer_inputs(rotated, values, "position-free")
    torch.testing.assert_close(lengths, scorer_inputs(keys, values, "position-free"), rtol=1e-9, atol=1e-9)
    for kind, found in {"unrotated": unrotated, "position-free": lengths}.items():
        assert found.shape[-1] == KVpopConfig(budget=64, inputs=kind).input_size(6)


def test_what_cannot_be_made_is_refused():
    keys, values = tensors()
    with pytest.raises(LearnError, match="undo"):
        scorer_inputs(keys, values, "unrotated", rotary=rotary(6))
    with pytest.raises(LearnError, match="even size"):
        scorer_inputs(keys[..., :5], values, "position-free")
    with pytest.raises(LearnError, match="'raw'"):
        scorer_inputs(keys, values, "raw")


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(sum), st.floats(-1e4, 1e4), st.integers(0, 2**31))
def test_statistics_of_pieces_are_those_of_the_whole(pieces, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, sum(pieces), 4, generator=generator, dtype=torch.float64) + offset
    x[:, :, :, 3] = offset  # never changes
    statistics = InputStatistics.of(x.split(pieces, dim=2))
    mean, deviation = statistics.result()
    rows = x.transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(mean, rows.mean(1).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(deviation[:, :3], rows.std(1, correction=0)[:, :3].float(), rtol=1e-5, atol=1e-6)
    assert (deviation[:, 3] == 1).all()


def test_statistics_make_inputs_standard():
    shape = ModelShape(2, 3, 4)
    x = 5 + 3 * torch.randn(2, 6, 50, 8, generator=torch.Generator().manual_seed(0))
    statistics = InputStatistics(6, 8)
    for ordinal in range(2):
        statistics.add(x[:, shape.cells_of(ordinal)], shape.cells_of(ordinal))
    made = KVpopScorer(KVpopConfig(budget=64, scorer="linear"), shape)
    made.scorer.standardise(statistics)
    normal = made.scorer.normal(x, None).transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(normal.mean(1), torch.zeros(6, 8), rtol=0, atol=1e-5)
    torch.testing.assert_close(normal.std(1, correction=0), torch.ones(6, 8), rtol=1e-4, atol=0)


def test_statistics_of_something_else_are_refused():
    statistics = InputStatistics(6, 8)
    with pytest.raises(LearnError, match="none of 6 of 6"):
        statistics.result()
    with pytest.raises(LearnError, match=r"\[B, 6, T, 8\]; received \(1, 6, 2, 7\)"):
        statistics.add(torch.zeros(1, 6, 2, 7))
    with pytest.raises(LearnError, match="NaN"):
        statistics.add(torch.full((1, 6, 2, 8), torch.nan))
    with pytest.raises(LearnError, match="at least one piece"):
        InputStatistics.of([])
    statistics.add(torch.zeros(1, 6, 2, 8))
    made = KVpopScorer(KVpopConfig(budget=64), ModelShape(1, 3, 4))
    with pytest.raises(LearnError, match=r"\(3, 8\) inputs; received \(6, 8\)"):
        made.scorer.standardise(statistics)
