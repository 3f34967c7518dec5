"""A plain start, as CacheCraft's first runs had one: five generic signals with round weights, token by token."""

import numpy as np


# EVOLVE-BLOCK-START
def by_largest(feature):
    """Divide by the largest magnitude; a feature of zeros stays zero."""
    return feature / max(np.max(np.abs(feature)), 1e-30)


def score_tokens(context):
    """Global and recent attention, small keys, the start and the end of the text."""
    attention = by_largest(context.global_attention)
    recent = by_largest(context.local_attention)
    small_key = 1 - by_largest(context.key_norm)
    start = 1 - context.relative_position
    end = 1 - context.recency
    return 0.4 * attention + 0.3 * recent + 0.1 * small_key + 0.1 * start + 0.1 * end


def select_tokens_to_keep(scores, context):
    """The best scores; of equal ones the earlier position."""
    return np.sort(np.argsort(-scores, kind="stable")[: context.K])


# EVOLVE-BLOCK-END
