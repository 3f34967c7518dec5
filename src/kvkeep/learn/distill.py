"""How far a student's predictions are from its teacher's, over the teacher's likeliest tokens.

KVpop (arXiv 2607.05061), section 4 and table 3: the KL divergence of the teacher's distribution to the student's, over
the 256 largest logits of the teacher, at temperature 1. What becomes of the others the paper does not say; here they
are one event, "any other token". So this is the KL of a coarser view of the vocabulary: never above the whole KL, zero
only where both agree, and the whole KL where the vocabulary has no more tokens than are looked at.

Shapes: `S` positions, `V` vocabulary, `K` tokens that are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvkeep.learn.config import LearnError

_ROWS = 256  # positions at once: a vocabulary is wide, and its probabilities are needed in float32


@dataclass(frozen=True, eq=False)
class Likeliest:
    """The teacher's predictions.

    Attributes:
        tokens: `[S, K]` int64.
        log_probs: `[S, K]` float32, of the whole distribution.
        others: `[S]` float32, the logarithm of the probability of all other tokens; minus infinity where there are
            none.
    """

    tokens: Tensor
    log_probs: Tensor
    others: Tensor


@torch.no_grad()
def likeliest(logits: Tensor, count: int = 256) -> Likeliest:
    """What a student is compared with, of a teacher's logits `[S, V]`.

    Raises:
        LearnError: a count below 1.
    """
    if count < 1:
        raise LearnError(expected="at least one logit of the teacher", received=f"{count}", remedy="the paper has 256")
    parts = []
    for start in range(0, len(logits), _ROWS):
        told = logits[start : start + _ROWS].float().log_softmax(-1)
        found = told.topk(min(count, told.shape[-1]), dim=-1)
        parts.append((found.indices, found.values, _others(told, found.indices)))
    tokens, log_probs, others = (torch.cat(part) for part in zip(*parts, strict=True))
    return Likeliest(tokens, log_probs, others)


@dataclass(frozen=True, eq=False)
class Distance:
    """A student beside its teacher, in nats, with gradient.

    Attributes:
        kl: `[S]`.
        nll: `[S - 1]` negative log-likelihood of each next token of the text.
    """

    kl: Tensor
    nll: Tensor


def distance(teacher: Likeliest, logits: Tensor, ids: Tensor) -> Distance:
    """Compare a student's logits with what the teacher said.

    Args:
        teacher: of S positions.
        logits: `[S, V]`.
        ids: `[S]` the text.
    """
    following = torch.cat([ids[1:], ids[:1]])  # of the last position there is none: its number is not used
    kl, nll = [], []
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        given = (logits[rows], teacher.tokens[rows], teacher.log_probs[rows], teacher.others[rows], following[rows])
        # The probabilities are made again for the gradient, so that they are not kept of the whole text.
        again = torch.is_grad_enabled() and logits.requires_grad
        found = checkpoint(_distance, *given, use_reentrant=False) if again else _distance(*given)
        kl.append(found[0])
        nll.append(found[1])
    return Distance(torch.cat(kl), torch.cat(nll)[:-1])


def _distance(
    logits: Tensor, tokens: Tensor, log_probs: Tensor, others: Tensor, following: Tensor
) -> tuple[Tensor, Tensor]:
    told = logits.float().log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - told.gather(-1, tokens))).sum(-1)
    if tokens.shape[-1] < told.shape[-1]:
        some = others > -math.inf
        kl = kl + torch.where(some, others.exp() * (others - _others(told, tokens)), 0.0)
    return kl, -told.gather(-1, following[:, None])[:, 0]


def _others(told: Tensor, tokens: Tensor) -> Tensor:
    """The logarithm of the probability of all tokens but some, `[S]`."""
    return told.scatter(-1, tokens, -math.inf).logsumexp(-1)
