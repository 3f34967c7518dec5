"""Starts threads that go on between calls."""

import numpy as np


# EVOLVE-BLOCK-START
import _thread
import time


def score_tokens(context):
    _thread.start_new_thread(time.sleep, (60,))
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
