"""Rows that decode together give what each gives alone."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from kvkeep import KeepCache
from kvkeep.errors import CacheStateError, UnsupportedError
from kvkeep.hf.decoding import decode_batch
from kvkeep.hf.support import CACHE_ARGUMENT

from .tiny import tiny_model

SETTINGS = [
    ("snapkv[window=6]", {"compression_ratio": 0.5}),
    ("full", {}),
    ("snapkv[window=6]+ada", {"compression_ratio": 0.75}),
    ("frc", {"entries": 9}),
    ("knorm", {"entries": 5}),
]
QUESTIONS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [16, 17, 18]]


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(seed))


def caches_of(model: PreTrainedModel, lengths: list[int], follow_up: bool = False) -> list[KeepCache]:
    caches = []
    for index, (length, (policy, budget)) in enumerate(zip(lengths, SETTINGS, strict=True)):
        cache = KeepCache(model, policy, **budget)
        with torch.no_grad():
            model(text(length, index), **{CACHE_ARGUMENT: cache})
            if follow_up and index % 2:
                model(text(index + 2, 90 + index), **{CACHE_ARGUMENT: cache})
        caches.append(cache)
    return caches


def alone(model: PreTrainedModel, cache: KeepCache, question: list[int], count: int) -> list[int]:
    """Greedy decoding of one row, token by token."""
    new: list[int] = []
    ids = torch.tensor([question])
    with torch.no_grad():
        while len(new) < count:
            new.append(int(model(ids, **{CACHE_ARGUMENT: cache}).logits[0, -1].argmax()))
            ids = torch.tensor([[new[-1]]])
    return new


# Rows of a model with sliding windows must be equally long.
@pytest.mark.parametrize(
    ("architecture", "lengths", "follow_up"),
    [("llama", [40, 25, 60, 33, 50], False), ("llama", [40, 25, 60, 33, 50], True), ("gemma3", [40] * 5, False)],
)
def test_rows_of_different_texts_policies_and_budgets(architecture: str, lengths: list[int], follow_up: bool) -> None:
    model = tiny_model(architecture)
    questions = QUESTIONS if architecture == "llama" else [[5, 6, token] for token in range(7, 12)]
    caches = caches_of(model, lengths, follow_up)
    stacked = KeepCache.stack(caches)
    assert stacked.ledger.entries == sum(cache.ledger.entries for cache in caches)
    assert stacked.ledger.payload_bytes == sum(cache.ledger.payload_bytes for cache in caches)
    limits = [7, 12, 3, 1, 9]
    expected = [alone(model, *row) for row in zip(caches, questions, limits, strict=True)]
    assert decode_batch(model, stacked, questions, max_new_tokens=limits) == expected


def test_rows_that_are_done_leave_the_batch() -> None:
    model = tiny_model("llama")
    caches = caches_of(model, [40, 25, 60, 33, 50])
    expected = [alone(model, cache.fork(), question, 10) for cache, question in zip(caches, QUESTIONS, strict=True)]
    ends = {expected[0][4], expected[2][1]}
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    ours = decode_batch(
        model,
        KeepCache.stack(caches),
        QUESTIONS,
        max_new_tokens=10,
        stop_tokens=ends,
        stop=lambda row, new: row == 4 and len(new) == 6,
    )
    hook.remove()
    for row, (mine, whole) in enumerate(zip(ours, expected, strict=True)):
        end = next((i + 1 for i, token in enumerate(whole) if token in ends), 10)
        assert mine == whole[: min(end, 6) if row == 4 else end]
    steps = max(map(len, ours))
    assert rows == [sum(len(new) > step for new in ours) for step in range(steps)]


def test_other_ways_to_choose_a_token() -> None:
    model = tiny_model("llama")
    caches = caches_of(model, [40, 25, 60, 33, 50])
    second = decode_batch(
        model,
        KeepCache.stack(caches),
        QUESTIONS,
        max_new_tokens=1,
        choose=lambda logits: logits.topk(2).indices[:, 1],
    )
    first = decode_batch(model, KeepCache.stack(caches), QUESTIONS, max_new_tokens=1)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_what_cannot_be_stacked_is_refused() -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    cache = caches_of(model, [40, 25, 60, 33, 50])[0]
    for caches in ([], [cache, KeepCache(model, "knorm", entries=5)]):
        with pytest.raises(CacheStateError, match="hold a text each"):
            KeepCache.stack(caches)
    with pytest.raises(CacheStateError, match="caches of one model"):
        KeepCache.stack([cache, *caches_of(other, [40, 25, 60, 33, 50])])
    sliding = tiny_model("gemma3")
    with pytest.raises(UnsupportedError, match="sliding-window"):
        KeepCache.stack(caches_of(sliding, [40, 25, 60, 33, 50]))
    with pytest.raises(UnsupportedError, match="prompts of one length"):
        decode_batch(sliding, KeepCache.stack(caches_of(sliding, [40] * 5)), QUESTIONS, max_new_tokens=2)
    for prompts in ([], [[1], [2]], [[]]):
        with pytest.raises(CacheStateError, match="one prompt of at least one token"):
            decode_batch(model, cache, prompts, max_new_tokens=2)


def test_an_empty_cache_reads_the_prompts_as_its_text() -> None:
    model = tiny_model("llama")
    prompts = [[5, 6, 7], [8], [9, 10]]
    found = decode_batch(model, KeepCache(model, "full"), prompts, max_new_tokens=4)
    for prompt, new in zip(prompts, found, strict=True):
        alone = model.generate(
            torch.tensor([prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert new == alone[0, len(prompt) :].tolist()
