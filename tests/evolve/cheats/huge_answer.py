"""An answer that would fill the searching process's memory."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.zeros(10**7, dtype=np.int64)


# EVOLVE-BLOCK-END
