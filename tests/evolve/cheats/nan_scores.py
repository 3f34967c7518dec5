"""Scores that compare with nothing."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return context.local_attention * np.nan


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
