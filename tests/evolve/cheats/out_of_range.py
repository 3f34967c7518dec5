"""Names positions behind the end, where there is nothing."""

import numpy as np


# EVOLVE-BLOCK-START
def score_tokens(context):
    return context.local_attention


def select_tokens_to_keep(scores, context):
    return np.arange(context.L - context.K + 1, context.L + 1)


# EVOLVE-BLOCK-END
