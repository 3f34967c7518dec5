from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.learn import KVpopConfig, LearnError, ModelShape
from kvkeep.learn.config import AGGREGATES, FEATURES, INPUTS, SCORER_NAMES

configs = st.builds(
    KVpopConfig,
    budget=st.integers(4, 9000),
    sinks=st.integers(0, 8),
    window=st.none() | st.integers(1, 300),
    scorer=st.sampled_from(SCORER_NAMES),
    width=st.none() | st.integers(1, 64),
    feature=st.sampled_from(FEATURES),
    gate_cap=st.none() | st.floats(1, 30),
    skip=st.booleans(),
    delayed=st.booleans(),
    inputs=st.sampled_from(INPUTS),
    aggregate=st.sampled_from(AGGREGATES),
    eps=st.floats(1e-12, 0.1),
    decay=st.sampled_from([(0.999, 0.999999), (0.5, 0.5)]),
)


@given(configs)
def test_a_configuration_survives_json(config):
    assert KVpopConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(configs, st.sampled_from([6, 64, 128]), st.sampled_from([2, 4]))
def test_the_parts_of_a_cell_are_the_budget_or_an_error_has_all_numbers(config, head_size, itemsize):
    state = config.state_entries(head_size, itemsize)
    left = config.budget - config.sinks - config.protected_window - state
    if left >= 1:
        geometry = config.geometry(head_size, itemsize)
        assert (geometry.slots, geometry.held, geometry.entries) == (left, config.budget - state, config.budget)
        return
    with pytest.raises(LearnError) as caught:
        config.geometry(head_size, itemsize)
    for number in (config.budget, config.sinks, config.protected_window, state, head_size, itemsize, left):
        assert str(number) in caught.value.received


def test_the_papers_own_numbers():
    """Heads of 128 in bfloat16: C and z have 8,320 numbers, and there is the stabiliser: 65 entries and a little."""
    config = KVpopConfig(budget=4096, window=256)
    assert config.state_numbers(128) == 8_321
    assert config.state_entries(128, 2) == 66
    assert config.geometry(128, 2).slots == 4096 - 4 - 256 - 66
    assert KVpopConfig(budget=4096, window=256, scorer="mlp").geometry(128, 2).slots == 3836


def test_the_usual_window_is_a_quarter():
    assert KVpopConfig(budget=512).protected_window == KVpopConfig(budget=512).delay == 128
    assert KVpopConfig(budget=512, delayed=False).delay == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget": 64, "sinks": -1}, "sinks"),
        ({"budget": 64, "window": 0}, "window"),
        ({"budget": 64, "width": 0}, "width"),
        ({"budget": 64, "scorer": "mlstn"}, "did you mean 'mlstm'"),
        ({"budget": 64, "feature": "relu"}, "feature"),
        ({"budget": 64, "inputs": "rotated"}, "did you mean 'unrotated'"),
        ({"budget": 64, "aggregate": "sum"}, "aggregate"),
        ({"budget": 64, "eps": 0}, "eps"),
        ({"budget": 64, "gate_cap": 0}, "gate_cap"),
        ({"budget": 64, "skip": 1}, "skip"),
        ({"budget": 64, "decay": [0.9]}, "decay"),
        ({"budget": 64, "decay": [0.99, 0.9]}, "decay"),
        ({"budget": 64, "decay": [0.9, 1.0]}, "decay"),
        ({"budget": 64, "windows": 3}, "did you mean 'window'"),
        ({"sinks": 4}, "a budget"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, named):
    with pytest.raises(LearnError, match=named):
        KVpopConfig.from_dict(fields)


def test_cells_go_layer_by_layer():
    shape = ModelShape(3, 2, 8)
    assert shape.cells == 6
    assert [shape.cells_of(ordinal) for ordinal in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 6)]
    with pytest.raises(LearnError, match="0 to 2; received 3"):
        shape.cells_of(3)
    with pytest.raises(LearnError, match="kv_heads"):
        ModelShape(3, 0, 8)
