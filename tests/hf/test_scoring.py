from __future__ import annotations

import pytest
import torch

from kvkeep import KeepCache, Session
from kvkeep.errors import CacheStateError, UnsupportedError
from kvkeep.hf.scoring import answer_logits, batch_logprobs, kl_divergence
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

from .tiny import tiny_model


@pytest.fixture
def full():
    model, tokenizer = fake_model()
    session = Session(model, tokenizer)
    session.ingest("The ferry leaves at nine.")
    return session


def test_log_probabilities_are_those_of_one_forward_over_everything(full):
    found = answer_logits(full, "When?", "At nine.")
    texts, encode = full.texts, full.tokenizer.encode
    before = encode(f"{texts.header}The ferry leaves at nine.\n\nWhen?{texts.footer}")
    answer = encode("At nine.")
    with torch.no_grad():
        logits = full.model(torch.tensor([before + answer])).logits[0]
    expected = logits[len(before) - 1 : -1].log_softmax(-1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_session_is_left_as_it_was(full):
    before = full.cache.get_seq_length()
    first = answer_logits(full, "When?", "At nine.")
    said = full.ask("When?", max_new_tokens=4, keep=False).text
    assert full.cache.get_seq_length() == before
    torch.testing.assert_close(answer_logits(full, "When?", "At nine."), first, atol=0, rtol=0)
    assert full.ask("When?", max_new_tokens=4, keep=False).text == said


def test_empty_references_and_sessions_are_refused(full):
    with pytest.raises(CacheStateError, match="at least one token"):
        answer_logits(full, "When?", "")
    with pytest.raises(CacheStateError, match="an ingested text"):
        answer_logits(Session(full.model, full.tokenizer), "When?", "Now.")


def test_kl_is_that_of_the_textbook():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 11, generator=generator).log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl_divergence(p, q), expected)
    assert kl_divergence(p, p).tolist() == [0, 0, 0]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_rows_are_scored_together_as_one_by_one(architecture: str) -> None:
    model = tiny_model(architecture)
    generator = torch.Generator().manual_seed(0)
    slides = architecture == "gemma3"  # its windows must have seen equally much, and know no padding

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 128, (count,), generator=generator).tolist()

    texts = [tokens(40), tokens(40 if slides else 25), tokens(40 if slides else 33)]
    prompts = [tokens(3), tokens(3 if slides else 1), tokens(3 if slides else 6)]
    references = [tokens(2), tokens(2 if slides else 5), tokens(2 if slides else 1)]
    caches = []
    for text, policy in zip(texts, ("snapkv[window=4]", "full", "knorm+ada"), strict=True):
        cache = KeepCache(model, policy, entries=None if policy == "full" else 12)
        with torch.no_grad():
            model(torch.tensor([text]), **{CACHE_ARGUMENT: cache})
        caches.append(cache)
    together = batch_logprobs(model, KeepCache.stack(caches), prompts, references)
    for cache, prompt, reference, found in zip(caches, prompts, references, together, strict=True):
        with torch.no_grad():
            fed = torch.tensor([[*prompt, *reference[:-1]]])
            logits = model(fed, **{CACHE_ARGUMENT: cache}).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
        expected = logits.gather(1, torch.tensor(reference)[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_what_cannot_be_scored_together_is_refused() -> None:
    for architecture, prompts, references, error in (
        ("llama", [[5]], [[6]], CacheStateError),
        ("llama", [[5], [5]], [[6], []], CacheStateError),
        ("llama", [[5], []], [[6], [6]], CacheStateError),
        ("gemma3", [[5], [5, 6]], [[6], [6]], UnsupportedError),
    ):
        model = tiny_model(architecture)
        cache = KeepCache(model, "full")
        with torch.no_grad():
            model(torch.tensor([[3, 4, 5], [5, 4, 3]]), **{CACHE_ARGUMENT: cache})
        with pytest.raises(error):
            batch_logprobs(model, cache, prompts, references)
