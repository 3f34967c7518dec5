"""After ExpectedAttention (arXiv 2510.00636): attention times the norm of the value, with the global attention in the
place of the expected one, which no feature tells."""

import numpy as np

# EVOLVE-BLOCK-START
EPSILON = 0.01
SINKS = 4


def score_tokens(context):
    """How much a position moves the output."""
    share = context.global_attention / max(np.sum(context.global_attention), 1e-30)
    return (share + EPSILON / context.L) * context.value_norm


def select_tokens_to_keep(scores, context):
    """The first positions, at most half of all that stay, then the best scores."""
    order = np.argsort(-scores, kind="stable")
    sinks = np.flatnonzero(context.position < SINKS)[: context.K // 2]
    others = order[np.isin(order, sinks, invert=True)]
    return np.sort(np.concatenate([sinks, others[: context.K - len(sinks)]]))


# EVOLVE-BLOCK-END
