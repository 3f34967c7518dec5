"""Keeps a position more than it may."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K + 1]


# EVOLVE-BLOCK-END
