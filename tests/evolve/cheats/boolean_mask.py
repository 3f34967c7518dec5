"""Gives a mask in the place of indices: as indices it is zeros and ones."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return scores > np.median(scores)


# EVOLVE-BLOCK-END
