"""After SnapKV (arXiv 2404.14469): attention from the end of the text, smoothed, and the end of the text itself."""

import numpy as np

# EVOLVE-BLOCK-START
KERNEL = 7
WINDOW = 32


def score_tokens(context):
    """The local attention of positions before the window, averaged over seven neighbours."""
    before = context.local_attention * (1 - context.recent_mask)
    return np.convolve(before, np.ones(KERNEL) / KERNEL, mode="full")[KERNEL // 2 :][: context.L]


def select_tokens_to_keep(scores, context):
    """The last positions, at most half of all that stay, then the best scores."""
    order = np.argsort(-scores, kind="stable")
    window = np.arange(context.L - min(WINDOW, context.K // 2), context.L)
    others = order[np.isin(order, window, invert=True)]
    return np.sort(np.concatenate([window, others[: context.K - len(window)]]))


# EVOLVE-BLOCK-END
