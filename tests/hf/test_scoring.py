from __future__ import annotations

import pytest
import torch

from kvkeep import Session
from kvkeep.errors import CacheStateError
from kvkeep.hf.scoring import answer_logits, kl_divergence
from kvkeep.testing import fake_model


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
