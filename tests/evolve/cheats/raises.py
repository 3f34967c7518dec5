"""An error that cannot even be printed."""

import numpy as np


# EVOLVE-BLOCK-START
class Unspeakable(Exception):
    def __str__(self):
        raise self


def score_tokens(context):
    raise Unspeakable()


def select_tokens_to_keep(scores, context):
    return np.argsort(-scores, kind="stable")[: context.K]


# EVOLVE-BLOCK-END
