"""FRC, which CacheCraft's search found (arXiv 2608.14555, section 5): three attentions, on whole chunks."""

import numpy as np

# EVOLVE-BLOCK-START
CHUNK = 20


def by_largest(feature):
    """Divide by the largest magnitude; a feature of zeros stays zero."""
    return feature / max(np.max(np.abs(feature)), 1e-30)


def score_tokens(context):
    """Recent attention, attention density and the strongest head, with fixed weights."""
    local = by_largest(context.local_attention)
    density = by_largest(context.neighbor_attn_density)
    max_head = by_largest(context.max_head_attention)
    return 0.55 * local + 0.30 * density + 0.15 * max_head


def select_tokens_to_keep(scores, context):
    """Chunks with the best mean score, from the best one down while they fit."""
    chunk = (context.position // CHUNK).astype(np.int64)
    sizes = np.bincount(chunk)
    sums = np.bincount(chunk, weights=scores)
    means = np.where(sizes > 0, sums / np.maximum(sizes, 1), -np.inf)
    order = np.argsort(-means, kind="stable")
    fits = np.cumsum(sizes[order]) <= context.K
    kept = np.flatnonzero(np.isin(chunk, order[fits]))
    if len(kept) == 0:  # not even the best chunk fits: the best positions of it
        best = np.flatnonzero(chunk == order[0])
        kept = np.sort(best[np.argsort(-scores[best], kind="stable")[: context.K]])
    return kept


# EVOLVE-BLOCK-END
