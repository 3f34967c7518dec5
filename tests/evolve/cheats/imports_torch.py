"""Brings a framework to call the model with."""

import numpy as np


# EVOLVE-BLOCK-START
import torch


def score_tokens(context):
    return torch.rand(context.L).numpy()


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
