"""Policies that watch attention read long texts in blocks: the same as token by token, to the last decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.errors import PolicyError
from kvkeep.hf import online
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies.online import WatchingPolicy
from kvkeep.testing import check_policy, fake_model

from .tiny import tiny_model


@dataclass(frozen=True)
class Ranking(WatchingPolicy):
    """Depends on the order of all entries."""

    sinks: int = 2
    window: int = 3
    fade: float = 0.5
    name: ClassVar[str] = "ranking"

    def protects(self, entries: int) -> tuple[int, int]:
        return self.sinks, self.window

    def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
        for row in attention.unbind(2):
            rank = row.argsort(-1, descending=True).argsort(-1)
            worth = 1 / (1 + rank) * (row > 0)  # nothing for what the query does not see yet
            priorities = self.fade * priorities + worth.float()
        return priorities


def read(model, cache, ids, sizes, mask=None):
    logits, at = [], 0
    for piece in ids.split(sizes, 1):
        seen = None if mask is None else mask[:, : at + piece.shape[1]]
        places = None if seen is None else (seen.cumsum(1) - 1).clamp(min=0)[:, at:]
        with torch.no_grad():
            logits.append(model(piece, attention_mask=seen, position_ids=places, **{CACHE_ARGUMENT: cache}).logits)
        at += piece.shape[1]
    return torch.cat(logits, 1)


def held(cache, row=0):
    layers, heads = len(cache.ledger.entries_per_cell), len(cache.ledger.entries_per_cell[0][0])
    return [cache.kept_positions(layer, row, head).tolist() for layer in range(layers) for head in range(heads)]


POLICIES = st.one_of(
    st.sampled_from(["online-h2o", "online-tova", "online-h2o[recent=0.2]"]),
    st.builds(Ranking, st.integers(0, 3), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0])),
)


@settings(max_examples=12, deadline=None)
@given(
    POLICIES,
    st.integers(10, 16),
    st.lists(st.integers(1, 36), min_size=1, max_size=3),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 9),
)
def test_blocks_give_what_single_tokens_give(policy, entries, lengths, sizes, block, protect, seed):
    """Rows of any length, pieces of any size, blocks of any size; with and without protected ranges."""
    model = tiny_model("llama")
    spans = [(3, 5)] if protect else []
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 128, (1, length), generator=generator) for length in lengths]
    longest = max(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "_WATCHED", block)
        padded = torch.cat([torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in rows])
        mask = (padded > 0).long() if len(set(lengths)) > 1 else None
        pieces = []
        while sum(pieces) < longest:
            pieces.append(min(sizes[len(pieces) % len(sizes)], longest - sum(pieces)))
        together = KeepCache(model, policy, entries=entries, protect=spans)
        ours = read(model, together, padded, pieces, mask)
    for row, ids in enumerate(rows):
        alone = KeepCache(model, policy, entries=entries, protect=spans)
        expected = read(model, alone, ids, [1] * ids.shape[1])
        torch.testing.assert_close(ours[row : row + 1, longest - ids.shape[1] :], expected, rtol=0, atol=1e-10)
        assert held(together, row) == held(alone)
    more = torch.randint(3, 128, (len(rows), 3), generator=generator)
    whole = None if mask is None else torch.cat([mask, torch.ones_like(more)], 1)
    places = None if mask is None else (whole.cumsum(1) - 1)[:, -3:]
    with torch.no_grad():  # what the next tokens find is the same, too
        found = model(more, attention_mask=whole, position_ids=places, **{CACHE_ARGUMENT: together}).logits
        expected = model(more[-1:], **{CACHE_ARGUMENT: alone}).logits
    torch.testing.assert_close(found[-1:], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_close(dtype):
    model = fake_model("qwen3", dtype=dtype)[0]
    ids = torch.randint(3, 128, (2, 60), generator=torch.Generator().manual_seed(0))
    once, single = (KeepCache(model, "online-h2o", entries=40) for _ in range(2))
    found, expected = read(model, once, ids, [60]), read(model, single, ids, [1] * 60)
    assert (found.float() - expected.float()).abs().mean() < 0.05 * expected.float().abs().mean()
    assert found.dtype == dtype


def test_it_is_a_policy_as_all_are():
    check_policy(Ranking())


def test_priorities_that_cannot_be_are_refused_within_a_block():
    @dataclass(frozen=True)
    class Broken(Ranking):
        def observe(self, priorities: Tensor, attention: Tensor) -> Tensor:
            return priorities / 0 if attention.shape[-1] == 12 and attention.shape[2] == 1 else priorities

    model = tiny_model("llama")
    with pytest.raises(PolicyError, match="finite priorities from ranking"):
        read(model, KeepCache(model, Broken(), entries=12), torch.arange(3, 33)[None], [30])
