"""Bad input: refused by our own errors, with names; the cache and the model go on as if nothing had been asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep import (
    BudgetError,
    CacheStateError,
    KeepCache,
    KvkeepError,
    Observation,
    PolicyError,
    UnsupportedError,
    detach,
)
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import Policy, Scorer, TopK, Uniform

from ..hf.tiny import tiny_model
from .common import LockStep, feed, generate, text


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("snapk", "received 'snapk'; did you mean 'snapkv'"),
        ("SnapKVPress", "did you mean 'snapkv'"),
        ("snapkv[windw=8]", "received 'windw'; did you mean 'window'"),
        ("snapkv[window=x]", "expected a value of type int for snapkv"),
        ("snapkv[window=0]", "expected window >= 1"),
        ("snapkv[window=4,window=8]", "each once"),
        ("snapkv+adda", "received 'adda'; did you mean 'ada'"),
        ("snapkv+ada[safegard=1]", "received 'safegard'; did you mean 'safeguard'"),
        ("full+ada", "'full' alone"),
        ("", r"expected name\[option=value"),
        (None, "received None of type NoneType"),
        ({0: "snapkv"}, r"received none for \[1, 2\]"),
        ({9: "snapkv", "*": "knorm"}, r"received \[9\]"),
        ({0: "snapk", "*": "knorm"}, "did you mean 'snapkv'"),
        ("snapkv+ada+pyramid", "one allocator"),
    ],
)
def test_unknown_policies_parts_and_options_are_answered_with_near_names(
    llama: PreTrainedModel, policy: Any, message: str
) -> None:
    detach(llama)
    with pytest.raises(PolicyError, match=message):
        KeepCache(llama, policy, compression_ratio=0.5)
    assert llama.config._attn_implementation == "sdpa", "a refusal must not attach"


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({}, "received none of them"),
        ({"compression_ratio": 0.5, "entries": 8}, "exactly one of"),
        *(({"compression_ratio": ratio}, "0 <= ratio < 1") for ratio in (1, 1.0, 1.5, -0.1, float("nan"))),
        *(({"entries": entries}, "whole number of entries") for entries in (0, -3, 2.5)),
        ({"bytes": 0}, "whole number of bytes"),
        ({"entries": True}, "received True"),
        ({"compression_ratio": "0.5"}, "received '0.5'"),
        ({"compression_ratio": 0.5, "prompt_tokens": 0}, "prompt_tokens as a whole number"),
        *(
            ({"entries": 8, "protect": [span]}, "expected a range of positions")
            for span in (3, "ab", (0.5, 2), (1, 2, 3))
        ),
    ],
)
def test_budgets_that_make_no_sense_are_refused(llama: PreTrainedModel, budget: dict[str, Any], message: str) -> None:
    detach(llama)
    with pytest.raises(BudgetError, match=message):
        KeepCache(llama, "knorm", **budget)
    assert llama.config._attn_implementation == "sdpa", "a refusal must not attach"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression_ratio": 0.5, "protect": [(0, 40)]}, "40 protected positions; received 30"),
        ({"entries": 8, "protect": [(0, 5), (-5, None)]}, "10 protected positions; received 8"),
        ({"bytes": 100}, "bytes, which hold one entry per cell; received bytes=100"),
    ],
)
def test_what_must_stay_above_the_budget_is_refused_before_the_first_layer(
    llama: PreTrainedModel, options: dict[str, Any], message: str
) -> None:
    """Both numbers in the message; a text that fits is then processed by the same cache."""
    pair = LockStep(llama, KeepCache(llama, "knorm", **options))
    with pytest.raises(BudgetError, match=message):
        feed(llama, pair.cache, text(1, 60))
    assert not pair.cache.is_broken
    assert pair.cache.ledger.held_bytes == 0
    if "bytes" not in options:
        pair.feed(text(1, 90) if "compression_ratio" in options else text(1, 6))
        pair.feed(text(1, 3))


REFUSED_FORWARDS: dict[str, tuple[Callable[[PreTrainedModel, KeepCache], Any], type[KvkeepError], str]] = {
    "use_cache": (lambda m, c: feed(m, c, text(1, 5), use_cache=False), UnsupportedError, "use_cache=False"),
    "attentions": (lambda m, c: feed(m, c, text(1, 5), output_attentions=True), UnsupportedError, "output_attentions"),
    "mask of 4 dimensions": (
        lambda m, c: feed(m, c, text(1, 5), attention_mask=torch.zeros(1, 1, 5, 45)),
        UnsupportedError,
        r"a tensor of shape \(1, 1, 5, 45\)",
    ),
    "masks by layer type": (
        lambda m, c: feed(m, c, text(1, 5), attention_mask={"full_attention": torch.zeros(1, 1, 5, 45)}),
        UnsupportedError,
        "received a dict",
    ),
    "mask of the new tokens only": (
        lambda m, c: feed(m, c, text(1, 5), attention_mask=torch.ones(1, 4)),
        UnsupportedError,
        "expected an attention mask of shape",
    ),
    "row of padding": (
        lambda m, c: feed(m, c, text(1, 5), attention_mask=torch.zeros(1, c.get_seq_length() + 5)),
        KvkeepError,
        "row of padding only|hides or shows tokens",
    ),
    "packed": (
        lambda m, c: feed(m, c, text(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]])),
        UnsupportedError,
        "packed sequences",
    ),
    "empty": (lambda m, c: feed(m, c, text(1, 0)), CacheStateError, "at least one new token"),
    "no rows": (lambda m, c: feed(m, c, text(0, 5)), CacheStateError, "at least one new token"),
    "empty generate": (lambda m, c: generate(m, text(1, 0), c), CacheStateError, "at least one new token"),
    "assistant": (
        lambda m, c: generate(m, text(1, c.get_seq_length() + 5), c, assistant_model=tiny_model("llama", seed=1)),
        UnsupportedError,
        "assisted or speculative decoding",
    ),
    "prompt lookup": (
        lambda m, c: generate(m, text(1, c.get_seq_length() + 5), c, prompt_lookup_num_tokens=3),
        UnsupportedError,
        "assisted or speculative decoding",
    ),
}


@pytest.mark.parametrize("seen", [0, 40])
@pytest.mark.parametrize("name", REFUSED_FORWARDS)
def test_p43_p55_a_refused_forward_changes_nothing(llama: PreTrainedModel, name: str, seen: int) -> None:
    """Elsewhere: use_cache=False ends in an attribute error or in wrong tokens, and assisted decoding leaves rejected
    tokens behind. Right: refused by name; the cache goes on as if nothing had been asked."""
    call, error, message = REFUSED_FORWARDS[name]
    pair = LockStep(llama, KeepCache(llama, "snapkv[window=6]+ada", compression_ratio=0.5))
    if seen:
        pair.feed(text(1, seen))
    before = (pair.cache.ledger.to_dict(), pair.cache.notes, pair.cache.get_seq_length())
    with pytest.raises(error, match=message):
        call(llama, pair.cache)
    assert (pair.cache.ledger.to_dict(), pair.cache.notes, pair.cache.get_seq_length()) == before
    pair.feed(text(1, 30, seed=1))
    pair.feed(text(1, 1, seed=2))


def test_p55_a_model_whose_config_has_no_cache_is_told_to_use_it() -> None:
    """The same where use_cache=False stands in the config: refused, until the call says otherwise."""
    model = tiny_model("llama", use_cache=False)
    pair = LockStep(model, KeepCache(model, "knorm", compression_ratio=0.5))
    with pytest.raises(UnsupportedError, match="received use_cache=False together with a KeepCache"):
        feed(model, pair.cache, text(1, 20))
    pair.feed(text(1, 20), use_cache=True)
    pair.feed(text(1, 3), use_cache=True)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
def test_more_rows_than_a_prefilled_cache_holds_are_refused(llama: PreTrainedModel, options: dict[str, Any]) -> None:
    pair = LockStep(llama, KeepCache(llama, "knorm", compression_ratio=0.5))
    prompt, question = text(1, 40), text(1, 4, seed=1)
    pair.feed(prompt)
    with pytest.raises(UnsupportedError, match="expected 1 rows, as the cache holds; received 3"):
        generate(llama, torch.cat([prompt, question], 1), pair.cache, **options)
    pair.feed(question)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("reason", ["never attached", "detached", "another cache's model"])
def test_a_cache_serves_only_the_model_that_it_was_made_for(architecture: str, reason: str) -> None:
    """Elsewhere: a cache is fed by another model, or one whose attention is no longer ours, and answers nonsense."""
    model, other = tiny_model(architecture), tiny_model(architecture, seed=1)
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    if reason == "detached":
        detach(model)
        other = model
    elif reason == "another cache's model":
        KeepCache(other, "knorm", compression_ratio=0.5)
    with pytest.raises(CacheStateError, match=r"expected (a forward of )?the model that this cache was made for"):
        feed(other, cache, text(1, 20))
    assert not cache.is_broken
    assert cache.get_seq_length() == cache.ledger.held_bytes == cache.ledger.window_bytes == 0
    fresh = KeepCache(model, "knorm", compression_ratio=0.5)
    pair = LockStep(model, fresh if reason == "detached" else cache)
    pair.feed(text(1, 20))
    pair.feed(text(1, 2))


def test_a_model_whose_attention_was_changed_is_refused_and_can_be_changed_back(llama: PreTrainedModel) -> None:
    pair = LockStep(llama, KeepCache(llama, "knorm", compression_ratio=0.5))
    pair.feed(text(1, 20))
    ours = llama.config._attn_implementation
    llama.set_attn_implementation("eager")
    with pytest.raises(CacheStateError, match="do not change the model's attention implementation"):
        feed(llama, pair.cache, text(1, 3))
    llama.set_attn_implementation(ours)
    pair.feed(text(1, 3))


def test_dropout_is_refused_and_eval_mends_it() -> None:
    model = tiny_model("llama", attention_dropout=0.5)
    pair = LockStep(model, KeepCache(model, "knorm", compression_ratio=0.5))
    model.train()
    with pytest.raises(UnsupportedError, match=r"received dropout=0.5 in LlamaAttention; call model.eval\(\)"):
        feed(model, pair.cache, text(1, 20))
    model.eval()
    pair.feed(text(1, 20))
    pair.feed(text(1, 3))


def test_a_bidirectional_mask_is_refused_by_name() -> None:
    model = tiny_model("gemma3", use_bidirectional_attention=True)
    cache = KeepCache(model, "knorm", compression_ratio=0.5)
    with pytest.raises(UnsupportedError, match="expected causal attention over the evictable layers"):
        feed(model, cache, text(1, 20))
    assert not cache.is_broken


def test_gradients_are_warned_about() -> None:
    """Elsewhere: the graph keeps every layer alive, and nobody says that no memory was freed."""
    llama = tiny_model("llama").requires_grad_()
    cache = KeepCache(llama, "knorm", compression_ratio=0.5)
    with pytest.warns(UserWarning, match=r"Wrap the call in torch.no_grad\(\)"):
        llama(text(1, 20), **{CACHE_ARGUMENT: cache})


@dataclass(frozen=True)
class Broken(Scorer):
    """Gives what no scorer may give, in layer 1, for texts of 20 tokens."""

    kind: str = "nan"
    name: ClassVar[str] = "broken"

    def score(self, observation: Observation) -> Tensor:
        scores = observation.zeros()
        if (observation.layer, observation.length) != (1, 20):
            return scores
        bad = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}
        if self.kind in bad:
            scores[0, 0, 3] = bad[self.kind]
            return scores
        return scores.double() if self.kind == "double" else scores[..., :-1]


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf", "double", "short"])
def test_scores_that_are_no_scores_name_the_policy_and_the_layer(llama: PreTrainedModel, kind: str) -> None:
    """Layer 0 is cut by then: the cache says that it is broken and serves again after reset."""
    cache = KeepCache(llama, Policy(Broken(kind), Uniform(), TopK()), entries=8)
    with pytest.raises(PolicyError, match=r"from broken; received .* in layer 1"):
        feed(llama, cache, text(1, 20))
    assert cache.is_broken
    for call in (lambda: feed(llama, cache, text(1, 2)), cache.mark, cache.fork, cache.rewind, lambda: cache.crop(-1)):
        with pytest.raises(CacheStateError, match=r"call cache.reset\(\)"):
            call()
    cache.reset()
    assert cache.ledger.held_bytes == 0
    pair = LockStep(llama, cache)
    pair.feed(text(1, 30))
    pair.feed(text(1, 2))


def test_a_short_text_needs_no_cut_and_no_note(llama: PreTrainedModel) -> None:
    cache = KeepCache(llama, "snapkv+ada", entries=64)
    pair = LockStep(llama, cache)
    pair.feed(text(1, 3))
    assert cache.notes == []
    assert cache.ledger.entries == cache.ledger.entries_full
    pair.feed(text(1, 2))
