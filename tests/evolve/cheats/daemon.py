"""Leaves a process behind, in a session of its own."""

import numpy as np


# EVOLVE-BLOCK-START
import os
import time


def score_tokens(context):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(120)
        os._exit(0)
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
