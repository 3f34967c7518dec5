"""Online policies side by side on held-out texts."""

from __future__ import annotations

import pytest
import torch

from kvkeep import KeepCache
from kvkeep.errors import ResultsError
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.learn import KVpopConfig, LearnError, ModelShape, evict_at, recall, static_priority
from kvkeep.learn.evaluate import EvaluationSettings, evaluate, summarise
from kvkeep.learn.fidelity import stray
from kvkeep.learn.policy import KVpop
from kvkeep.learn.texts import windows_of
from kvkeep.learn.traces import trace
from kvkeep.testing import fake_model

from .test_policy import scorer
from .test_train import documents

POLICIES = ("kvpop:{folder}", "online-streaming-llm", "online-h2o", "oracle")
SHAPE = ModelShape(2, 2, 16)


@pytest.fixture
def policies(tmp_path):
    folder = tmp_path / "scorer"
    scorer("mlp", SHAPE, budget=40, window=10).save_pretrained(folder)
    return tuple(name.format(folder=folder) for name in POLICIES)


def measure(out, policies, **options):
    model, tokenizer = fake_model()
    settings = EvaluationSettings(policies, 40, **{"length": 90, "documents": 3} | options)
    return evaluate(model, tokenizer, documents(), settings, out)


def test_rows_and_standings(tmp_path, policies):
    rows = measure(tmp_path / "out", policies)
    assert len(rows) == 12
    found = {one.policy: one for one in summarise(rows, policies)}
    assert list(found) == list(policies)
    kvpop = found[policies[0]]
    assert kvpop.against is None
    assert kvpop.kl.clusters == 3
    assert kvpop.choice is not None
    assert len(kvpop.recall_by_layer) == 2
    assert kvpop.choice.recall == pytest.approx(sum(kvpop.recall_by_layer) / 2)
    assert found["oracle"].kl.mean < found["online-streaming-llm"].kl.mean
    for name in policies[1:]:
        one = found[name]
        assert one.choice is None
        assert (one.against is None) == bool(one.note)
        if one.against is not None:
            difference = one.kl.mean - kvpop.kl.mean
            assert one.against.difference.mean == pytest.approx(difference)
            assert one.p_holm >= one.against.p_value
    # A row against the measurement itself.
    model, tokenizer = fake_model()
    window = windows_of(documents(), tokenizer, length=90, count=3, part="held-out")[0]
    cache = KeepCache(model, "online-streaming-llm", entries=40)
    alone = stray(model, torch.tensor([window.ids]), {"it": cache}, 40)["it"]
    [row] = [row for row in rows if row["key"] == "0000 online-streaming-llm"]
    assert row["kl"] == pytest.approx(alone.kl)
    assert row["held_bytes"] == alone.held_bytes == cache.ledger.held_bytes


def test_unequal_bytes_are_not_compared(tmp_path, policies):
    rows = measure(tmp_path / "out", policies[:2], documents=2)
    for row in rows:
        if row["policy"] == policies[1]:
            row["held_bytes"] = int(row["held_bytes"] * 1.2)
    second = summarise(rows, policies[:2])[1]
    assert second.against is None
    assert "bytes" in second.note


def test_it_goes_on_where_it_stood(tmp_path, policies):
    model, tokenizer = fake_model()
    settings = EvaluationSettings(policies, 40, length=90, documents=3)

    def stop(done, total, what):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, tokenizer, documents(), settings, tmp_path / "broken", on_row=stop)
    assert measure(tmp_path / "broken", policies) == measure(tmp_path / "whole", policies)
    with pytest.raises(ResultsError, match="length: 90 -> 80"):
        measure(tmp_path / "whole", policies, length=80)


def test_what_cannot_be_is_refused(tmp_path, policies):
    with pytest.raises(LearnError, match="snapkv, which cuts where a text ends"):
        measure(tmp_path, ("snapkv",))
    with pytest.raises(LearnError, match="5000 tokens"):
        measure(tmp_path, policies, length=5000)
    with pytest.raises(ResultsError, match="rows of oracle"):
        summarise([], ("oracle",))


def test_the_recall_is_that_of_the_cache_itself(tmp_path, policies):
    """What a cache under the scorer holds at the end, against what one under the oracle would."""
    model, tokenizer = fake_model(layers=1)  # one layer: nothing in front of it was evicted
    made = scorer("mlp", ModelShape(1, 2, 16), budget=40, window=10)
    made.save_pretrained(tmp_path / "one")
    name = f"kvpop:{tmp_path / 'one'}"
    settings = EvaluationSettings((name,), 40, length=90, documents=1)
    [row] = evaluate(model, tokenizer, documents(), settings, tmp_path / "out")
    ids = torch.tensor([windows_of(documents(), tokenizer, length=90, count=1, part="held-out")[0].ids])
    cache = KeepCache(model, KVpop(made), entries=40)
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
    layers = []
    trace(model, ids, layers.append)
    config = KVpopConfig(40, window=10, scorer="mlp")
    geometry = config.geometry(16, 4)
    oracle = evict_at(static_priority(layers[0].target(config), made.log_gamma().detach()), geometry, 90)
    held = torch.full((1, 2, 90), 0)
    for head in range(2):
        held[0, head, cache.kept_positions(0, 0, head)] = 90
    assert row["layers"][0]["recall"] == pytest.approx(recall(held, oracle, torch.tensor([89]), geometry).mean().item())
