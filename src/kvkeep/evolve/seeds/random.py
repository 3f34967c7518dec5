"""The floor of every search: scores that look random, and depend on the position and the layer alone."""

import numpy as np

# EVOLVE-BLOCK-START
SEED = 0


def score_tokens(context):
    """A position keeps its score for life, so that cutting again keeps what was kept."""
    mixed = context.position.astype(np.int64) + 7919 * context.layer + 104729 * SEED + 1
    for factor in (1664525, 22695477, 1103515245):
        mixed = (mixed ^ (mixed >> 15)) * factor % 2147483647
    return mixed / 2147483647


def select_tokens_to_keep(scores, context):
    """The best scores; of equal ones the earlier position."""
    return np.sort(np.argsort(-scores, kind="stable")[: context.K])


# EVOLVE-BLOCK-END
