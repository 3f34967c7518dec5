"""Names positions between positions."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.arange(context.K) + 0.5


# EVOLVE-BLOCK-END
