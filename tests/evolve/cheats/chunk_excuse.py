"""Claims chunks of a million positions, and keeps a single one."""

import numpy as np


# EVOLVE-BLOCK-START
CHUNK = 10**6


def score_tokens(context):
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[:1]


# EVOLVE-BLOCK-END
