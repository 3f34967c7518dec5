"""Never comes to an end."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    count = 0
    while True:
        count += 1
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
