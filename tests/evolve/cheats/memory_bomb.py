"""Takes all memory."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    held = [np.ones(2**24)]
    while True:
        held.append(held[-1] + 1)


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
