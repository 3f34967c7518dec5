"""A trained scorer as a policy: one token at a time, in a cache, by name."""

from __future__ import annotations

import copy

import pytest
import torch
from hf.online_reference import read, text
from hf.tiny import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import KeepCache
from kvkeep.errors import BudgetError, ModelFileError
from kvkeep.hf.models import weights_identity
from kvkeep.hf.support import CACHE_ARGUMENT, plan_model
from kvkeep.learn import InputStatistics, KVpopConfig, KVpopScorer, LearnError, ModelShape, evict_at
from kvkeep.learn.config import FEATURES, INPUTS, SCORER_NAMES
from kvkeep.learn.evicting import evicting
from kvkeep.learn.policy import KVpop, ShippedKVpop
from kvkeep.learn.stepping import stepper_of
from kvkeep.policies import parse_policy, policy_string
from kvkeep.policies.online import Cells, split_cap
from kvkeep.testing import check_policy

TINY = ModelShape(3, 2, 16)  # of tests/hf/tiny.py
WINDOW, SINKS = 3, 4


def scorer(kind="mlstm", shape=TINY, *, seed=0, **options):
    """One whose scores differ."""
    config = KVpopConfig(**{"budget": 12, "window": WINDOW, "sinks": SINKS, "width": 2, "scorer": kind} | options)
    found = KVpopScorer(config, shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    x = torch.randn(2, shape.cells, 40, found.scorer.size, generator=generator)
    found.scorer.standardise(InputStatistics.of([2 * x + 1]))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCORER_NAMES),
    st.sampled_from(FEATURES),
    st.sampled_from([None, 0.5, 15.0]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_a_step_is_the_scorers_own(kind, feature, cap, skip, batch, seed):
    made = scorer(kind, feature=feature, gate_cap=cap, skip=skip, seed=seed).double()
    cells = TINY.cells_of(1)
    stepper = stepper_of(made.scorer, cells)
    x = torch.randn(batch, 2, 12, made.scorer.size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    state, expected_state = stepper.start(batch, x.device), made.scorer.start(batch, cells)
    with torch.no_grad():
        for at in range(12):
            leaving = x[:, :, at - WINDOW : at - WINDOW + 1] if at >= WINDOW else x[:, :, :0]
            found, state = stepper.step(x[:, :, at : at + 1], leaving, state)
            expected, expected_state = made.scorer.advance(x[:, :, at : at + 1], leaving, expected_state, cells)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        found, _ = stepper.read(x, x[:, :, -WINDOW - 1 : -WINDOW], state)  # goes on from the steps' memory
        expected, _ = made.scorer.advance(x, x[:, :, -WINDOW - 1 : -WINDOW], expected_state, cells)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", SCORER_NAMES)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("delayed", [True, False])
def test_it_is_a_policy_as_all_are(kind, inputs, delayed):
    if delayed or kind == "mlstm":
        check_policy(KVpop(scorer(kind, ModelShape(1, 2, 8), inputs=inputs, delayed=delayed)))


@pytest.mark.parametrize("kind", ["mlstm", "mlp"])
@pytest.mark.parametrize("inputs", INPUTS)
def test_a_cache_gives_the_same_in_chunks_of_any_size(kind, inputs):
    model = tiny_model("llama")
    policy = KVpop(scorer(kind, inputs=inputs).double())
    entries = {"mlstm": 10, "mlp": 12}[kind] + (kind == "mlstm")
    ids = text(rows=2)
    whole = KeepCache(model, policy, entries=entries)
    expected = read(model, whole, ids)
    positions = whole.kept_positions(1, 1, 1)
    assert not torch.equal(positions[SINKS:], positions[-1] - torch.arange(len(positions) - SINKS).flip(0))
    for sizes in ([1] * ids.shape[1], [9, 1, 7, 20]):
        cache = KeepCache(model, policy, entries=entries)
        torch.testing.assert_close(read(model, cache, ids, sizes), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(cache.kept_positions(1, 1, 1), positions)


@pytest.mark.parametrize("kind", SCORER_NAMES)
def test_a_new_scorer_is_streaming_llm(kind):
    model, ids = tiny_model("qwen3"), text()
    policy = KVpop(KVpopScorer(KVpopConfig(budget=12, window=WINDOW, width=2, scorer=kind), TINY))
    found = KeepCache(model, policy, entries=12)
    logits = read(model, found, ids)
    expected = KeepCache(model, "online-streaming-llm", entries=found.ledger.entries_per_cell[0][0][0])
    torch.testing.assert_close(logits, read(model, expected, ids), rtol=1e-10, atol=1e-10)


def test_sliding_layers_are_not_counted():
    model, ids = tiny_model("gemma3"), text()  # the second of three layers is of full attention
    cache = KeepCache(model, KVpop(scorer(shape=ModelShape(1, 2, 16))), entries=12)
    read(model, cache, ids)
    assert len(cache.ledger.entries_per_cell) == 1
    with pytest.raises(LearnError, match="3 layers of 2 KV heads"):
        KeepCache(model, KVpop(scorer()), entries=12)


def test_the_memory_is_counted_as_in_training():
    policy = KVpop(scorer(width=8, budget=64))
    cells = Cells(1, 2, 16, 16, torch.float32, torch.device("meta"))
    expected = policy.scorer.config.geometry(16, 4)
    assert split_cap(policy, 64, cells) == expected
    assert expected.state == 5  # 16 x 9 + 1 numbers of 4 bytes, an entry of 128 bytes
    model = tiny_model("llama", torch.float32)
    cache = KeepCache(model, policy, entries=64)
    read_all = torch.randint(3, 128, (1, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(read_all, **{CACHE_ARGUMENT: cache})
    assert max(cache.ledger.entries_per_cell[0][0]) == expected.held
    assert cache.ledger.state_bytes == 3 * 2 * (16 * 9 + 1) * 4
    with pytest.raises(BudgetError, match="5 for the policy's memory"):
        KeepCache(model, policy, entries=10)


def test_a_memory_that_is_read_early():
    """Scores of the whole text, from the definition, in a cache that gets it in chunks; they are counted as held."""
    model, ids = tiny_model("llama"), text(rows=2)
    made = scorer(delayed=False, window=5, budget=16).double()
    geometry = made.config.geometry(16, 8)
    assert made.config.state_numbers(16) == 4 * 3 + 1 + 5
    evicted = {}

    def decide(layer):
        x, cells = layer.inputs("cached").double(), TINY.cells_of(layer.ordinal)
        evicted[layer.layer] = evict_at(made.priorities(x, cells).detach(), geometry, ids.shape[1])
        return evicted[layer.layer]

    with torch.no_grad(), evicting(model, decide):
        expected = model(ids, use_cache=False).logits
    for sizes in ([ids.shape[1]], [1] * ids.shape[1], [3, 1, 12, 1, 20]):
        cache = KeepCache(model, KVpop(made), entries=16)
        logits = []
        for piece in ids.split(sizes, 1):
            with torch.no_grad():
                logits.append(model(piece, **{CACHE_ARGUMENT: cache}).logits)
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-6, atol=1e-6)
        for row in range(2):
            held = (evicted[1][row, 1] > ids.shape[1] - 1).nonzero()[:, 0]
            assert torch.equal(cache.kept_positions(1, row, 1), held)
    assert cache.ledger.state_bytes == 3 * 2 * 2 * made.config.state_numbers(16) * 8  # float64 here
    late = scorer(window=5, budget=16).double()
    other = KeepCache(model, KVpop(late), entries=16)
    with torch.no_grad():
        assert (model(ids, **{CACHE_ARGUMENT: other}).logits - expected).abs().max() > 1e-3


def test_another_layer_is_refused():
    with pytest.raises(LearnError, match=r"\[0, 1, 2\]"):
        KVpop(scorer()).begin(Cells(1, 2, 16, 16, torch.float32, torch.device("cpu"), layer=3))


# --- by name ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "a+scorer"
    scorer().save_pretrained(path)
    return path


def test_a_folder_names_a_policy(folder):
    policy = parse_policy(f"kvpop:{folder}")
    assert policy == KVpop(scorer())
    named = policy_string(policy)
    assert named == f"kvpop:{folder}@{policy.digest[:12]}"
    assert parse_policy(named) == policy
    assert policy_string(KVpop(scorer())).startswith("custom:kvkeep.learn.policy.KVpop(")
    scorer(seed=1).save_pretrained(folder)
    with pytest.raises(LearnError, match="trained again"):
        parse_policy(named)


def test_what_is_no_scorer_is_refused(tmp_path, folder):
    with pytest.raises(ModelFileError):
        parse_policy(f"kvpop:{tmp_path / 'nothing'}")
    with pytest.raises(LearnError, match="write kvpop:"):
        parse_policy(f"kvpop-mlp:{folder}")
    scorer("mlp").save_pretrained(tmp_path / "mlp")
    assert parse_policy(f"kvpop-mlp:{tmp_path / 'mlp'}").scorer.config.scorer == "mlp"


def test_a_saved_cache_finds_its_scorer_again(folder, tmp_path):
    model, ids = tiny_model("llama"), text()
    cache = KeepCache(model, f"kvpop:{folder}", entries=12)
    read(model, cache, ids[:, :-1])
    cache.save(tmp_path / "cache.safetensors")
    again = KeepCache.load(tmp_path / "cache.safetensors", model)
    torch.testing.assert_close(read(model, again, ids[:, -1:]), read(model, cache, ids[:, -1:]))


def test_the_model_is_checked_when_a_cache_is_made():
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    shape = ModelShape(3, 2, 16, weights_identity(model))
    policy = KVpop(scorer(shape=shape))
    KeepCache(model, policy, entries=12)
    with pytest.raises(LearnError, match="train a scorer for this model"):
        KeepCache(other, policy, entries=12)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_the_floating_type_of_a_model_does_not_matter(architecture):
    """A scorer of a model in one type serves it in every other one, also where numbers become zero or equal."""
    model = tiny_model(architecture, torch.float32)
    with torch.no_grad():
        model.lm_head.weight[:5] *= 1e-12  # all zero in half precision
    layers = len([plan for plan in plan_model(model) if plan.window is None])
    policy = KVpop(scorer(shape=ModelShape(layers, 2, 16, weights_identity(model))))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        cast = copy.deepcopy(model).to(dtype)
        assert weights_identity(cast) == policy.scorer.shape.fingerprint
        KeepCache(cast, policy, entries=24)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    with pytest.raises(LearnError, match="load the same weights"):
        KeepCache(model, policy, entries=24)


def test_the_shipped_one_is_found_by_the_model(monkeypatch, tmp_path):
    monkeypatch.setattr("kvkeep.learn.policy.SHIPPED", tmp_path)
    model = tiny_model("llama")
    assert parse_policy("kvpop") == ShippedKVpop("kvpop")
    assert [policy_string(parse_policy(name)) for name in ("kvpop", "kvpop-mlp")] == ["kvpop", "kvpop-mlp"]
    with pytest.raises(LearnError, match="kvkeep train kvpop"):
        KeepCache(model, "kvpop", entries=12)
    shape = ModelShape(3, 2, 16, weights_identity(model))
    for budget in (12, 40):
        scorer(shape=shape, budget=budget, seed=budget).save_pretrained(tmp_path / f"tiny-{budget}")
    scorer("mlp", shape=shape).save_pretrained(tmp_path / "tiny-mlp")
    for entries, budget in ((11, 12), (30, 40), (900, 40)):
        fitted = ShippedKVpop("kvpop").fit(_served(model, entries))
        assert fitted == KVpop(scorer(shape=shape, budget=budget, seed=budget), layers=(0, 1, 2))
    assert ShippedKVpop("kvpop-mlp").fit(_served(model, None)).scorer.config.scorer == "mlp"
    read(model, KeepCache(model, "kvpop", entries=12), text())
    with pytest.raises(LearnError, match="2 of this kind"):
        KeepCache(tiny_model("llama", seed=1), "kvpop", entries=12)


def _served(model, entries):
    from kvkeep import Budget
    from kvkeep.hf.fitting import served_model
    from kvkeep.hf.support import plan_model

    return served_model(model, plan_model(model), None if entries is None else Budget(entries=entries))


def test_copies_are_equal():
    policy = KVpop(scorer())
    assert copy.deepcopy(policy) == policy
    assert KVpop(scorer(seed=1)) != policy
