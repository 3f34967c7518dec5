"""Online policies: what streams through a cap equals the masked whole text, however it is divided and padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep import KeepCache
from kvkeep.hf import online
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import OnlineRandom
from kvkeep.policies.online import Arrivals
from kvkeep.testing import fake_model

from ..test_testing_online import Sound
from .online_reference import CAP, H2O, LENGTH, NAMES, STREAMING, TOVA, Rule, online_reference, read, text
from .tiny import tiny_model

RULES: dict[str, Rule] = {"online-streaming-llm": STREAMING, "online-tova": TOVA, "online-h2o": H2O}
DIVISIONS = {
    "at once": [LENGTH],
    "token by token": [1] * LENGTH,
    "sinks first": [2, 1, 3, 1, LENGTH - 7],
    "as long as the cap": [CAP, 1, LENGTH - CAP - 1],
}


def random_rule() -> Rule:
    """The numbers that the policy draws, decided upon by the reference."""
    none = torch.zeros(1, 2, LENGTH, 1)
    at = torch.arange(LENGTH)[None]
    tables = [OnlineRandom().priorities(Arrivals(none, none, at, none, none, at, layer), {})[0] for layer in range(3)]
    return Rule(4, 3, 5, priority=lambda layer, head, t: float(tables[layer][0, head, t]))


@pytest.mark.parametrize(
    ("architecture", "policy"),
    [
        *(("llama", name) for name in NAMES),
        *((each, "online-random") for each in ("qwen3", "gemma3", "phi3")),
        ("gemma3", "online-h2o"),
    ],
)
def test_streaming_equals_the_masked_whole_text(architecture: str, policy: str) -> None:
    model, ids = tiny_model(architecture), text()
    rule = RULES[policy] if policy in RULES else random_rule()
    expected, held = online_reference(model, ids, rule)
    with torch.no_grad():
        untouched = model(ids).logits
    assert (expected - untouched).abs().max() > 1e-4, "nothing was evicted that mattered; the test shows nothing"
    for name, sizes in DIVISIONS.items():
        cache = KeepCache(model, policy, entries=CAP)
        ours = read(model, cache, ids, sizes)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        for layer, steps in held.items():
            for head, positions in enumerate(steps[-1]):
                assert cache.kept_positions(layer, 0, head).tolist() == sorted(positions)


@pytest.mark.parametrize("policy", NAMES)
def test_chunks_of_many_blocks_equal_single_tokens(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), text(2)
    expected = read(model, KeepCache(model, policy, entries=CAP), ids, [1] * LENGTH)
    monkeypatch.setattr(online, "_BLOCK", 6)
    for sizes in ([LENGTH], [3, LENGTH - 3], [CAP + 1, 15, LENGTH - CAP - 16]):
        ours = read(model, KeepCache(model, policy, entries=CAP), ids, sizes)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


def test_a_score_of_zero_that_fades_is_streaming_llm() -> None:
    """Whatever the window: sinks and the newest entries."""

    class Fading(Sound):
        def protects(self, entries: int) -> tuple[int, int]:
            return 4, 3

        def priorities(self, arrivals: Arrivals, state: Any) -> Any:
            zero, after = super().priorities(arrivals, state)
            return 0 * zero - arrivals.leaving_positions[:, None] * torch.log(torch.tensor(0.999)), after

    model, ids = tiny_model("llama"), text()
    faded, plain = KeepCache(model, Fading(), entries=CAP + 1), KeepCache(model, "online-streaming-llm", entries=CAP)
    logits = [read(model, cache, ids) for cache in (faded, plain)]  # one entry is worth the memory
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-10)
    expected = [*range(4), *range(LENGTH - CAP + 4, LENGTH)]
    assert plain.kept_positions(0, 0, 1).tolist() == faded.kept_positions(0, 0, 1).tolist() == expected


@pytest.mark.parametrize(
    ("architecture", "policy"),
    [("llama", "online-random"), ("llama", "online-tova"), ("llama", Sound()), ("gemma3", "online-h2o")],
)
def test_left_padded_rows_equal_single_rows(architecture: str, policy: Any) -> None:
    """Rows that are shorter than sinks and window, shorter than the cap, and longer; in one piece and in several."""
    model = tiny_model(architecture)
    lengths, more = (23, 3, 8, 14), text(4, 11, seed=9)
    rows = [text(1, length, seed=length) for length in lengths]
    single, kept = [], []
    for row, ids in enumerate(rows):
        cache = KeepCache(model, policy, entries=CAP)
        read(model, cache, ids)
        single.append(read(model, cache, more[row : row + 1], [1] * 8 + [3]))
        kept.append(cache.kept_positions(1, 0, 1).tolist())
    longest = max(lengths)
    padded = torch.cat([torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in rows])
    mask = torch.cat([(padded > 0).long(), torch.ones_like(more)], dim=1)
    for sizes in ([longest], [9, 9, 1, 4]):
        cache = KeepCache(model, policy, entries=CAP)
        read(model, cache, padded, sizes, mask[:, :longest])
        ours = read(model, cache, more, [1] * 8 + [3], mask)
        torch.testing.assert_close(ours, torch.cat(single), rtol=0, atol=1e-10)
        assert [cache.kept_positions(1, row, 1).tolist() for row in range(4)] == kept


def test_sliding_layers_keep_their_own_window() -> None:
    model, ids = tiny_model("gemma3"), text(2)
    cache, plain = KeepCache(model, "online-random", entries=200), DynamicCache(config=model.config)
    ours = torch.cat([model(x, **{CACHE_ARGUMENT: cache}).logits for x in ids.split(9, dim=1)], dim=1)
    theirs = torch.cat([model(x, **{CACHE_ARGUMENT: plain}).logits for x in ids.split(9, dim=1)], dim=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    for mine, index in zip(cache.sliding_layers, (0, 2), strict=True):
        torch.testing.assert_close(mine.keys, plain.layers[index].keys)


@pytest.mark.parametrize("policy", ["online-streaming-llm", "online-h2o"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_single(policy: str, dtype: torch.dtype) -> None:
    single, half = (fake_model("llama", dtype=each)[0] for each in (torch.float32, dtype))
    cache, other = KeepCache(single, policy, entries=60), KeepCache(half, policy, entries=60)
    ids = text()  # a window, and slots for nearly all
    expected, ours = read_freely(single, cache, ids), read_freely(half, other, ids)
    assert (ours.float() - expected).abs().mean() < 0.05 * expected.abs().mean()
    assert ours.isfinite().all()


def read_freely(model: Any, cache: KeepCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(x, **{CACHE_ARGUMENT: cache}).logits for x in ids.split(5, dim=1)], dim=1)
