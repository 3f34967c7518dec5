"""One call that takes for ever, and that no Python code interrupts."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return np.sort(np.convolve(np.ones(2**22), np.ones(2**22)))[: context.L]


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
