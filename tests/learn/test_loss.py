from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.learn import (
    KVpopConfig,
    KVpopScorer,
    LearnError,
    LossSettings,
    ModelShape,
    boundary_loss,
    log_gamma,
    sample_queries,
)
from kvkeep.policies.online import Geometry

from .naive import kept_of

GEOMETRY = Geometry(1, 3, 4)
DECAY = (0.9, 0.99)


def problem(seed, *, batch=2, cells=4, length=24):
    generator = torch.Generator().manual_seed(seed)
    scores, target = (
        torch.randn(batch, cells, length - GEOMETRY.window, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    alpha = torch.randn(cells, generator=generator, dtype=torch.float64)
    return scores, target, log_gamma(alpha, DECAY), torch.arange(GEOMETRY.held, length)


def naive_loss(scores, target, decay, queries, layers, settings):
    """Pair by pair, as in the paper."""
    batch, cells, count = scores.shape
    pairs = []  # (layer, cell, label, difference, margin, own)
    for b in range(batch):
        for c in range(cells):
            fade = float(decay[c])
            static = [float(target[b, c, t]) - t * fade for t in range(count)] + [0.0] * GEOMETRY.window
            for query in queries.tolist():
                newest, kept = query - GEOMETRY.window, kept_of(static, query, GEOMETRY)
                label = 1.0 if newest in kept else -1.0
                rival = kept[-1]
                if rival == newest:
                    [rival] = set(kept_of(static, query - 1, GEOMETRY)) - set(kept)

                def faded(values, t, b=b, c=c, query=query, fade=fade):
                    return float(values[b, c, t]) + (query - t) * fade

                difference = faded(scores, newest) - faded(scores, rival)
                margin = label * (faded(target, newest) - faded(target, rival))
                assert margin >= 0
                pairs.append((c // (cells // layers), c, label, difference, margin, kept[-1] == newest))
    shares = {c: sum(p[2] > 0 for p in pairs if p[1] == c) / sum(p[1] == c for p in pairs) for c in range(cells)}
    weights = []
    for _, c, label, _, margin, _ in pairs:
        weight = 1.0
        if settings.margins:
            least, tau = settings.least_margin_weight, settings.margin_temperature
            weight = least + (1 - least) / (1 + math.exp(-margin / tau))
        if settings.balance:
            share = shares[c] if label > 0 else 1 - shares[c]
            weight *= min(max(1 / (2 * share), settings.balance_bounds[0]), settings.balance_bounds[1])
        weights.append(weight)
    total = 0.0
    for layer in range(layers):
        mine = [i for i, pair in enumerate(pairs) if pair[0] == layer]
        mean = sum(weights[i] for i in mine) / len(mine)
        terms = [
            weights[i] / mean * math.log1p(math.exp(-pairs[i][2] * pairs[i][3] / settings.temperature)) for i in mine
        ]
        total += sum(terms) / len(terms) / layers
    return total, pairs


@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2]),
    st.builds(
        LossSettings,
        temperature=st.floats(0.2, 3),
        margins=st.booleans(),
        least_margin_weight=st.floats(0, 1),
        margin_temperature=st.floats(0.2, 3),
        balance=st.booleans(),
        balance_bounds=st.sampled_from([(0.25, 4.0), (0.9, 1.1), (1e-3, 1e3)]),
    ),
)
def test_the_loss_is_the_papers_sum_over_pairs(seed, layers, settings):
    scores, target, decay, queries = problem(seed, cells=2)
    found = boundary_loss(scores, target, decay, queries, GEOMETRY, layers=layers, settings=settings)
    expected, pairs = naive_loss(scores, target, decay, queries, layers, settings)
    assert float(found.loss) == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert found.pairs == len(pairs)
    assert found.kept == sum(pair[2] > 0 for pair in pairs)
    assert found.own == sum(pair[5] for pair in pairs)
    assert found.agreed == sum(pair[2] * pair[3] > 0 for pair in pairs)


def test_a_boundary_that_is_the_newest_is_compared_with_what_it_displaced():
    """One cell, no decay to speak of: the newest, of 5, is the last of four that stay and has displaced the 4."""
    target = torch.tensor([[[0.0, 4.0, 6.0, 7.0, 8.0, 5.0]]])
    scores = torch.tensor([[[0.0, 1.5, 0.0, 0.0, 0.0, 2.0]]])
    found = boundary_loss(scores, target, torch.tensor([-1e-9]), torch.tensor([8]), GEOMETRY)
    assert (found.pairs, found.kept, found.own, found.agreed) == (1, 1, 1, 1)
    assert float(found.loss) == pytest.approx(math.log1p(math.exp(-0.5)))


@given(st.integers(0, 2**31))
def test_weights_are_one_in_the_mean_of_each_layer(seed):
    found = boundary_loss(*problem(seed), GEOMETRY, layers=2)
    for mine in found.weights.chunk(2, dim=1):
        assert float(mine.mean()) == pytest.approx(1)


def test_balanced_weights_count_kept_and_dropped_alike():
    scores, target, decay, queries = problem(5, cells=1, length=60)
    settings = LossSettings(margins=False, balance_bounds=(1e-6, 1e6))
    found = boundary_loss(scores, target, decay, queries, GEOMETRY, settings=settings)
    assert 0 < found.kept < found.pairs
    levels, counts = found.weights.unique(return_counts=True)
    products = levels * counts
    assert len(products) == 2
    assert float(products[0]) == pytest.approx(float(products[1]))


def test_the_decay_does_not_cancel_and_learns():
    """The two entries are of different age, so gamma has a gradient; it is the only way to one."""
    scores, target, _, queries = problem(1)
    alpha = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    scores.requires_grad_()
    target.requires_grad_()
    boundary_loss(scores, target, log_gamma(alpha, DECAY), queries, GEOMETRY).loss.backward()
    assert (alpha.grad != 0).all()
    assert target.grad is None
    assert (scores.grad != 0).any(dim=-1).all()


def test_gradients_are_those_of_the_function():
    scores, target, _, queries = problem(2, batch=1, cells=2, length=16)
    decay = torch.tensor([-0.05, -0.02], dtype=torch.float64)
    # The teacher's ranking has the decay as well, but as a constant: it is given apart.

    def run(scores, moved):
        return boundary_loss(scores, target, decay + (moved - moved.detach()), queries, GEOMETRY).loss

    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: run(s, torch.zeros(2, dtype=torch.float64)), [scores])
    step = 1e-6
    base = boundary_loss(scores.detach(), target, decay, queries, GEOMETRY, settings=LossSettings(margins=False))
    wide = (decay + step).requires_grad_()
    boundary_loss(
        scores.detach(), target, wide, queries, GEOMETRY, settings=LossSettings(margins=False)
    ).loss.backward()
    moved = boundary_loss(
        scores.detach(), target, wide.detach(), queries, GEOMETRY, settings=LossSettings(margins=False)
    )
    assert float(moved.loss - base.loss) == pytest.approx(float(wide.grad.sum()) * step, rel=1e-3)


def test_a_step_down_the_gradient_agrees_more_often():
    shape = ModelShape(1, 2, 4)
    config = KVpopConfig(budget=9, sinks=1, window=3, scorer="linear", decay=DECAY)
    made = KVpopScorer(config, shape)
    geometry = config.geometry(4, 4)
    x = torch.randn(2, 2, 60, 8, generator=torch.Generator().manual_seed(0))
    target = x[:, :, :57, 0] - 2 * x[:, :, :57, 5]  # what a linear scorer can learn
    queries = torch.arange(geometry.held, 60)
    optimiser = torch.optim.Adam(made.parameters(), lr=0.05)
    found = []
    for _ in range(60):
        found.append(boundary_loss(made(x), target, made.log_gamma(), queries, geometry))
        optimiser.zero_grad()
        found[-1].loss.backward()
        optimiser.step()
    assert found[-1].loss < 0.6 * found[0].loss
    assert found[-1].agreed / found[-1].pairs > 0.85 > found[0].agreed / found[0].pairs


def test_nothing_reaches_the_model_that_made_the_inputs():
    keys = torch.randn(1, 2, 30, 4, requires_grad=True)
    config = KVpopConfig(budget=9, sinks=1, window=3, scorer="mlp", decay=DECAY)
    made = KVpopScorer(config, ModelShape(1, 2, 4))
    from kvkeep.learn import scorer_inputs

    x = scorer_inputs(keys, keys * 2)
    target = keys.sum(-1)[..., :27]
    boundary_loss(made(x), target, made.log_gamma(), torch.arange(9, 30), config.geometry(4, 4)).loss.backward()
    assert keys.grad is None
    assert all(parameter.grad is not None for parameter in made.parameters())


@given(st.integers(1, 80), st.integers(0, 40), st.floats(0, 1), st.integers(0, 2**31))
def test_sampled_queries_are_ones_at_which_an_entry_must_leave(length, count, late, seed):
    found = sample_queries(length, GEOMETRY, count, late=late, generator=torch.Generator().manual_seed(seed))
    assert len(found) == min(count, max(0, length - GEOMETRY.held))
    assert found.tolist() == sorted(set(found.tolist()))
    assert all(GEOMETRY.held <= query < length for query in found.tolist())
    again = sample_queries(length, GEOMETRY, count, late=late, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(found, again)


def test_late_queries_are_drawn_more_often():
    generator = torch.Generator().manual_seed(0)
    means = {
        late: sum(
            float(sample_queries(1008, GEOMETRY, 50, late=late, generator=generator).double().mean()) for _ in range(40)
        )
        / 40
        for late in (0.0, 1.0)
    }
    assert means[0.0] == pytest.approx(508, abs=20)
    assert means[1.0] == pytest.approx(8 + 2 / 3 * 1000, abs=30)  # a little less, since none is drawn twice


def test_errors_say_what_was_wrong():
    scores, target, decay, queries = problem(0)
    with pytest.raises(LearnError, match=r"log_gamma \(3,\)"):
        boundary_loss(scores, target, decay[:3], queries, GEOMETRY)
    with pytest.raises(LearnError, match="3 layers"):
        boundary_loss(scores, target, decay, queries, GEOMETRY, layers=3)
    with pytest.raises(LearnError, match="0 queries"):
        boundary_loss(scores, target, decay, queries[:0], GEOMETRY)
    with pytest.raises(LearnError, match="finite target"):
        boundary_loss(scores, target.log(), decay, queries, GEOMETRY)
    with pytest.raises(LearnError, match="queries from 7"):
        boundary_loss(scores, target, decay, queries - 1, GEOMETRY)
    with pytest.raises(LearnError, match="temperature=0"):
        LossSettings(temperature=0)
    with pytest.raises(LearnError, match="late=2"):
        sample_queries(20, GEOMETRY, 3, late=2)
