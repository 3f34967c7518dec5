"""Reads where there is no memory."""

import numpy as np


# EVOLVE-BLOCK-START
import ctypes


def score_tokens(context):
    ctypes.string_at(0)
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
