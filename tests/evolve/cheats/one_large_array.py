"""Asks for more memory than any machine has, at once."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return np.zeros(2**44)


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
