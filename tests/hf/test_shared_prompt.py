"""A text that is processed once gives each policy the cache that it would have had alone."""

from __future__ import annotations

import pytest
import torch

from kvkeep import Budget, KeepCache, Needs, available_policies, parse_policy
from kvkeep.errors import BudgetError, PolicyError
from kvkeep.hf.shared_prompt import SharedPrompt, shared_prompt_bytes
from kvkeep.hf.support import CACHE_ARGUMENT

from .tiny import tiny_model

IDS = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(0)).tolist()
# Policies that want a calibration of the model have tests of their own.
REGISTERED = [name for name in available_policies() if not parse_policy(name).needs().statistics]
POLICIES = [*REGISTERED, "snapkv[window=6]", "snapkv[window=6]+threshold", "h2o+ada", "knorm+pyramid"]


def feed(model: object, cache: KeepCache, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), **{CACHE_ARGUMENT: cache}).logits  # type: ignore[operator]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_cuts_of_one_prefill_are_those_of_many(architecture: str) -> None:
    model = tiny_model(architecture)
    shared = SharedPrompt(model, IDS, POLICIES, question=(50, 58))
    for name in POLICIES:
        for budget in (Budget(compression_ratio=0.5), Budget(entries=9)):
            if name == "full":
                budget = Budget(compression_ratio=0.0)
            ours = shared.cut(name, budget, protect=[(0, 2)])
            alone = KeepCache(model, name, budget=budget, protect=[(0, 2)], question=(50, 58))
            feed(model, alone, IDS)
            assert ours.ledger.entries_per_cell == alone.ledger.entries_per_cell, name
            for layer in alone.keep_layers:
                for head in range(layer.store.kv_heads):
                    kept = [cache.kept_positions(layer.index, 0, head) for cache in (ours, alone)]
                    assert torch.equal(*kept), name
            assert ours.notes == alone.notes
            assert ours.ledger.held_bytes == alone.ledger.held_bytes
            for piece in ([5, 6, 7], [8]):
                torch.testing.assert_close(feed(model, ours, piece), feed(model, alone, piece), rtol=0, atol=1e-10)
            ours.rewind()
            assert ours.get_seq_length() == len(IDS)


def test_the_peak_is_what_the_text_alone_needs() -> None:
    model = tiny_model("llama")
    shared = SharedPrompt(model, IDS, ["knorm"])
    ours = shared.cut("knorm", Budget(compression_ratio=0.5))
    alone = KeepCache(model, "knorm", compression_ratio=0.5)
    feed(model, alone, IDS)
    assert ours.ledger.peak_bytes == alone.ledger.peak_bytes
    assert ours.ledger.to_dict() == alone.ledger.to_dict()
    assert ours.evict_seconds > 0
    assert shared.prefill_seconds > 0
    entries = 3 * 2 * 60 * 2 * 16 * 8
    assert shared.nbytes >= entries


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("policies", [["knorm"], ["snapkv[window=6]", "tova"], ["h2o"], ["kvzip", "kvzip-plus"]])
@pytest.mark.parametrize("length", [9, 60])
def test_the_bytes_are_known_before(architecture: str, policies: list[str], length: int) -> None:
    model = tiny_model(architecture)
    ids = torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    assert SharedPrompt(model, ids, policies).nbytes == shared_prompt_bytes(model, policies, length)


def test_what_was_not_gathered_is_refused() -> None:
    model = tiny_model("llama")
    shared = SharedPrompt(model, IDS, ["snapkv[window=6]"])
    shared.cut("streaming-llm", Budget(entries=9))
    shared.cut("tova", Budget(entries=9))
    with pytest.raises(PolicyError, match="a policy that was announced"):
        shared.cut("h2o", Budget(entries=9))
    with pytest.raises(BudgetError):
        shared.cut("knorm")
    with pytest.raises(PolicyError, match="snapvk"):
        SharedPrompt(model, IDS, ["snapvk"])
    assert Needs(queries=6) == shared._needs


def test_a_mixed_table_is_cut_too() -> None:
    model = tiny_model("llama")
    table = {0: "full", "*": "snapkv[window=6]"}
    shared = SharedPrompt(model, IDS, [table])
    ours, alone = shared.cut(table, Budget(compression_ratio=0.5)), KeepCache(model, table, compression_ratio=0.5)
    feed(model, alone, IDS)
    assert ours.ledger.entries_per_cell == alone.ledger.entries_per_cell
