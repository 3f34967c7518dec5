"""How likely a session finds a given answer, and how far that is from what another session finds."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.hf.session import Session
from kvkeep.hf.support import CACHE_ARGUMENT


def answer_logits(session: Session, question: str, reference: str) -> Tensor:
    """Log-probabilities of the vocabulary before each token of a reference answer (teacher forcing).

    The session is left as it was: neither question nor answer stays in its cache.

    Args:
        session: holds the text; the question continues it as `ask` would.
        question: the user's words.
        reference: the answer that is fed, whatever the model would have said.

    Returns:
        `[T, V]` float32: row t is the distribution of token t of the reference, given those before it.

    Raises:
        CacheStateError: a session without a text, or an empty reference.
    """
    if session.cache.get_seq_length() == 0:
        raise CacheStateError(expected="an ingested text", received="none", remedy="call session.ingest(text) first")
    asked = session.question_tokens(question)
    told = list(session.tokenizer(reference, add_special_tokens=False)["input_ids"])
    if not told:
        raise CacheStateError(
            expected="a reference answer of at least one token", received=repr(reference), remedy="leave it out"
        )
    mark = session.cache.mark()
    inputs = torch.tensor([asked + told[:-1]], dtype=torch.long, device=session.model.device)
    with torch.no_grad():
        output = session.model(
            input_ids=inputs, use_cache=True, logits_to_keep=len(told), **{CACHE_ARGUMENT: session.cache}
        )
    session.cache.rewind(mark)
    logits: Tensor = output.logits[0]
    return logits.float().log_softmax(-1)


def kl_divergence(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) in nats at each of T tokens, `[T]`, from log-probabilities `[T, V]`."""
    return (full.exp() * (full - other)).sum(-1)
