"""Starts processes (a bounded number of them, in case that nothing stops it)."""

import numpy as np


# EVOLVE-BLOCK-START
import os
import time


def score_tokens(context):
    for _ in range(64):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
