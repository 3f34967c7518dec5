"""Looks around in the file system, through the system call."""

import numpy as np


# EVOLVE-BLOCK-START
import os


def score_tokens(context):
    assert os.listdir("/home")
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
