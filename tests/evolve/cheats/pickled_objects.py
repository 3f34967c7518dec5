"""An answer that would be unpickled, and would then run something."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return context.local_attention


class Surprise:
    def __reduce__(self):
        return print, ("unpickled",)


def select_tokens_to_keep(scores, context):
    return np.array([Surprise() for _ in range(context.K)], dtype=object)


# EVOLVE-BLOCK-END
