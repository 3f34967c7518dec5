from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.learn import KVpopConfig, LearnError, ModelShape
from kvkeep.learn.config import SCORER_NAMES
from kvkeep.learn.scorers import SCORERS

from .naive import memory_readings

SHAPE = ModelShape(layers=2, kv_heads=3, head_size=6)
WINDOW = 4
STATELESS = [name for name in SCORER_NAMES if name != "mlstm"]


def config(scorer="mlstm", **options):
    return KVpopConfig(budget=64, scorer=scorer, **{"window": WINDOW, "gate_cap": None, **options})


def made(scorer="mlstm", seed=0, *, shape=SHAPE, **options):
    """A scorer whose parameters are all random, float64."""
    torch.manual_seed(seed)
    found = SCORERS[scorer](config(scorer, **options), shape).double()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_()
    found.mean.normal_()
    found.deviation.uniform_(0.5, 2.0)
    return found


def inputs(scorer, count, seed=1, batch=2, cells=SHAPE.cells):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, cells, count, scorer.size, generator=generator, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SCORER_NAMES)
@pytest.mark.parametrize("options", [{}, {"inputs": "position-free"}, {"skip": True}, {"feature": "softmax"}])
def test_every_scorer_starts_by_scoring_nothing(name, options):
    torch.manual_seed(0)
    scorer = SCORERS[name](KVpopConfig(budget=64, window=WINDOW, scorer=name, **options), SHAPE)
    scores = scorer(inputs(scorer, 20).float())
    assert scores.shape == (2, SHAPE.cells, 16)
    assert (scores == 0).all()


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("feature", ["hedgehog", "softmax"])
def test_a_delayed_score_is_read_from_the_memory_behind_the_window(delayed, skip, feature):
    """All memories of every cell stored, one cell after the other, without a stabiliser."""
    scorer = made(delayed=delayed, skip=skip, feature=feature, gate_cap=3.0)
    x = inputs(scorer, 13)
    found = scorer(x)
    for b, c in itertools.product(range(2), range(SHAPE.cells)):
        normal = (x[b, c] - scorer.mean[c]) / scorer.deviation[c]
        gates = 3 * torch.tanh((normal @ scorer.gate_weight[c] + scorer.gate_bias[c]) / 3)
        keys, values = (normal @ scorer.memory_weight[c]).chunk(2, -1)
        queries = normal @ scorer.query_weight[c]
        if feature == "hedgehog":
            queries, keys = (torch.cat([t.softmax(-1), (-t).softmax(-1)], -1) for t in (queries, keys))
        else:
            queries, keys = queries.softmax(-1), keys.softmax(-1)
        forget = torch.log(1 / (1 + torch.exp(-gates[:, 1])))
        read = memory_readings(queries, keys, values, gates[:, 0], forget, WINDOW if delayed else 0)
        for u in range(13 - WINDOW):
            h = read[u] / (1 + torch.exp(-read[u]))
            expected = h @ scorer.out_weight[c] + scorer.out_bias[c]
            if skip:
                expected = expected + normal[u] @ scorer.skip_weight[c]
            close(found[b, c, u], expected)


@pytest.mark.parametrize("name", SCORER_NAMES)
@pytest.mark.parametrize("count", [0, 1, WINDOW])
def test_a_text_within_the_window_has_no_scores(name, count):
    scorer = made(name)
    assert scorer(inputs(scorer, count)).shape == (2, SHAPE.cells, 0)


@pytest.mark.parametrize("name", SCORER_NAMES)
def test_a_score_sees_the_window_behind_its_entry_and_nothing_later(name):
    scorer = made(name)
    x = inputs(scorer, 14)
    u, before = 5, scorer(x)
    for changed in range(14):
        other = x.clone()
        other[:, :, changed] += 1.0
        differs = bool((scorer(other)[..., u] - before[..., u]).abs().amax() > 1e-12)
        stateful = name == "mlstm" and changed <= u + WINDOW
        assert differs == (name != "zero" and (stateful or changed == u)), changed


def test_without_delay_only_what_came_before_counts():
    scorer = made(delayed=False)
    x = inputs(scorer, 14)
    later = x.clone()
    later[:, :, 6:] += 1.0
    close(scorer(later)[..., :6], scorer(x)[..., :6])


@settings(max_examples=40)
@given(st.sampled_from(SCORER_NAMES), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 2**31))
def test_any_pieces_give_the_scores_of_the_whole(name, pieces, seed):
    """The last m of n new tokens push one out each; the first w push nobody."""
    scorer = made(name, seed)
    total = sum(pieces)
    x = inputs(scorer, total, seed)
    expected = scorer(x)
    state, found, first = scorer.start(2), [], 0
    for size in pieces:
        leaving = x[:, :, max(0, first - WINDOW) : max(0, first + size - WINDOW)]
        scores, after = scorer.advance(x[:, :, first : first + size], leaving, state)
        assert scores.shape == (2, SHAPE.cells, leaving.shape[2])
        assert after.keys() == state.keys()
        assert all(after[key].shape == state[key].shape for key in state)
        state, first = after, first + size
        found.append(scores)
    close(torch.cat(found, -1), expected)


@pytest.mark.parametrize("name", SCORER_NAMES)
def test_a_layer_alone_is_its_part_of_the_model(name):
    scorer = made(name)
    x = inputs(scorer, 11)
    whole = scorer(x)
    for ordinal in range(SHAPE.layers):
        cells = SHAPE.cells_of(ordinal)
        close(scorer(x[:, cells], cells), whole[:, cells])
        state = scorer.start(2, cells)
        assert all(tensor.shape[:2] == (2, SHAPE.kv_heads) for tensor in state.values())
        scores, _ = scorer.advance(x[:, cells], x[:, cells, :-WINDOW], state, cells)
        close(scores, whole[:, cells])


@pytest.mark.parametrize("name", SCORER_NAMES)
def test_rows_and_cells_do_not_mix(name):
    scorer = made(name)
    x = inputs(scorer, 11)
    before = scorer(x)
    other = x.clone()
    other[1] += 1.0
    other[0, 4] += 1.0
    after = scorer(other)
    same = torch.arange(SHAPE.cells) != 4
    assert torch.equal(after[0, same], before[0, same])
    assert name == "zero" or not torch.equal(after[0, 4], before[0, 4])


@settings(max_examples=20)
@given(st.integers(1, 7), st.integers(0, 2**31))
def test_left_padding_is_never_taken_in(padding, seed):
    scorer = made(seed=seed)
    x = inputs(scorer, 12, seed)
    expected = scorer(x)
    padded = torch.cat([torch.full_like(x[:, :, :padding], 7.0), x], dim=2)
    valid = (torch.arange(12 + padding) >= padding).expand(2, -1)
    close(scorer(padded, valid=valid)[..., padding:], expected)
    scores, _ = scorer.advance(padded, padded[:, :, :-WINDOW], scorer.start(2), valid=valid)
    close(scores[..., padding:], expected)


@pytest.mark.parametrize("name", SCORER_NAMES)
@pytest.mark.parametrize(("head_size", "itemsize"), [(6, 4), (16, 2), (64, 2)])
@pytest.mark.parametrize("feature", ["hedgehog", "softmax"])
def test_the_state_weighs_what_the_configuration_counts(name, head_size, itemsize, feature):
    shape = ModelShape(2, 3, head_size)
    settings_ = KVpopConfig(budget=4096, scorer=name, feature=feature)
    state = SCORERS[name](settings_, shape).start(1, shape.cells_of(1), torch.device("meta"))
    weight = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert weight == 3 * 4 * settings_.state_numbers(head_size)
    entries = settings_.state_entries(head_size, itemsize)
    assert (entries - 1) * 3 * 2 * head_size * itemsize < weight <= entries * 3 * 2 * head_size * itemsize


def test_parameters_are_as_many_as_in_the_paper():
    """Heads of 128: 49,731 a cell; the MLP of about as many is 192 wide."""
    shape = ModelShape(1, 1, 128)
    counts = {
        name: sum(p.numel() for p in SCORERS[name](KVpopConfig(budget=4096, scorer=name), shape).parameters())
        for name in SCORER_NAMES
    }
    assert counts["mlstm"] == 49_731
    assert KVpopConfig(budget=4096, scorer="mlp").inner_width(128) in (192, 193)
    assert counts["mlp"] == pytest.approx(counts["mlstm"], rel=0.01)
    assert (counts["linear"], counts["zero"]) == (257, 0)


def test_queries_and_keys_begin_as_the_key_and_values_as_the_value():
    scorer = SCORERS["mlstm"](config(), SHAPE)
    entry = torch.arange(12.0)  # a key of 0 to 5, a value of 6 to 11
    keys, values = (entry @ scorer.memory_weight[0]).chunk(2)
    assert (entry @ scorer.query_weight[0]).tolist() == keys.tolist() == [0, 1, 2]
    assert values.tolist() == [6, 7, 8]


@pytest.mark.parametrize("name", ["mlstm", "mlp", "linear"])
def test_every_parameter_learns(name):
    scorer = made(name, skip=True)
    scorer(inputs(scorer, 12)).square().sum().backward()
    for label, parameter in scorer.named_parameters():
        assert bool((parameter.grad != 0).any(dim=-1).all() if parameter.dim() > 1 else (parameter.grad != 0).all()), (
            label
        )


def test_gradients_are_those_of_the_function():
    shape = ModelShape(1, 1, 2)
    scorer = made(shape=shape, window=2)
    x = inputs(scorer, 5, batch=1, cells=1)
    names, values = zip(*scorer.named_parameters(), strict=True)

    def run(*parameters):
        return torch.func.functional_call(scorer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, values)


@pytest.mark.parametrize("name", SCORER_NAMES)
def test_inputs_of_another_shape_are_refused(name):
    scorer = made(name)
    with pytest.raises(LearnError, match=r"inputs \[B, 6, T, 12\]; received \(2, 5, "):
        scorer(inputs(scorer, 9, cells=5))
    with pytest.raises(LearnError, match=r"inputs \[B, 3, T, 12\]; received \(2, 6, "):
        scorer(inputs(scorer, 9), SHAPE.cells_of(0))
    with pytest.raises(LearnError, match="received"):
        scorer(inputs(scorer, 9)[..., :11])


def test_names_of_configurations_are_those_of_the_scorers():
    assert tuple(SCORERS) == SCORER_NAMES
    assert dataclasses.replace(config(), scorer="mlp").scorer == "mlp"
