"""Tries its luck, another one each time."""

import numpy as np


# EVOLVE-BLOCK-START
import os


def score_tokens(context):
    luck = np.frombuffer(os.urandom(context.L * 4), dtype=np.uint32)
    return luck.astype(np.float64)


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
