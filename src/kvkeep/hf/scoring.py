"""How likely a session finds a given answer, and how far that is from what another session finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.decoding import mask_of, positions_of, refuse_padding
from kvkeep.hf.session import Session
from kvkeep.hf.stacking import left_padded
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


@torch.no_grad()
def batch_logprobs(
    model: Any, cache: KeepCache, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Log-probability of each token of a reference answer for each row of a cache, by one forward (teacher forcing).

    The tokens stay in the cache. Rows may hold different entries and have seen texts of different length; see
    `KeepCache.stack`.

    Args:
        model: the model that the cache was made for.
        cache: with as many rows as there are prompts.
        prompts: tokens that each row reads before its reference, at least one each.
        references: tokens of the answers, at least one each.

    Returns:
        For each row `[T]` float32, T tokens of its reference.

    Raises:
        CacheStateError: another number of prompts or references than rows, or an empty one.
        UnsupportedError: rows that need padding, for a model with sliding-window layers.
    """
    rows = len(cache.lengths)
    if len(prompts) != rows or len(references) != rows or not all(prompts) or not all(references):
        raise CacheStateError(
            expected=f"a prompt and a reference of at least one token for each of the {rows} rows of the cache",
            received=f"{len(prompts)} prompts of {sorted(map(len, prompts))} tokens, {len(references)} references of "
            f"{sorted(map(len, references))}",
            remedy="stack as many caches as there are prompts",
        )
    fed = [[*prompt, *reference[:-1]] for prompt, reference in zip(prompts, references, strict=True)]
    ids, fresh = left_padded(fed, pad=fed[0][0], device=model.device)
    refuse_padding(cache, fresh, list(map(len, fed)))
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=mask_of(cache, fresh, ids),
        position_ids=positions_of(cache, ids, fresh),
        use_cache=True,
        logits_to_keep=max(map(len, references)),
        **{CACHE_ARGUMENT: cache},
    ).logits
    found = []
    for row, reference in zip(logits, references, strict=True):  # one by one: a vocabulary is wide
        told = torch.tensor(list(reference), device=row.device)[:, None]
        found.append(row[-len(reference) :].float().log_softmax(-1).gather(1, told)[:, 0])
    return found


def kl_divergence(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) in nats at each of T tokens, `[T]`, from log-probabilities `[T, V]`."""
    return (full.exp() * (full - other)).sum(-1)
