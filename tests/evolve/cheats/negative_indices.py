"""Counts from the end, so that a position can be named twice."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.arange(context.K) - 1


# EVOLVE-BLOCK-END
