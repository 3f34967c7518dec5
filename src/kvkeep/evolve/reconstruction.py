"""How far attention to what is kept is from attention to everything, on queries that no feature has seen.

Those queries are of the tokens after the text: the rest of the question and the answer. Their rows of attention over
the text are what the choice is for, so that a choice which loses them can be refused without a forward.
"""

from __future__ import annotations

import torch

from kvkeep.evolve.evaluating import Job


@torch.no_grad()
def reconstruction_error(job: Job) -> float:
    """Mean over layers, heads and rows of `||mu - m_A|| / ||mu||`.

    ContourKV (arXiv 2608.25230), its forced error `e_s(A)`: `mu` is the row's output over the whole text, `m_A` the one
    over the kept set A with the weights of the row, normalised anew. Relative to the output's norm, since layers differ
    in scale.

    Args:
        job: a sample and what is kept of it.
    """
    total, rows = 0.0, 0
    for ordinal, kept in enumerate(job.kept):
        keys, values, queries = (
            job.sample.tensors[f"layers.{ordinal}.{name}"][0].float() for name in ("keys", "values", "answering")
        )
        group = queries.shape[0] // keys.shape[0]
        grouped = queries.view(keys.shape[0], group * queries.shape[1], -1)  # [H_kv, G q, D]
        weights = (grouped @ keys.transpose(1, 2) * job.sample.facts.scaling[ordinal]).softmax(-1)  # [H_kv, G q, L]
        whole = weights @ values
        forced = weights * kept[0].to(weights.dtype)[:, None]
        mean = (forced @ values) / forced.sum(-1, keepdim=True).clamp(min=torch.finfo(forced.dtype).tiny)
        errors = torch.linalg.vector_norm(whole - mean, dim=-1) / torch.linalg.vector_norm(whole, dim=-1).clamp(
            min=1e-12
        )
        total, rows = total + float(errors.sum()), rows + errors.numel()
    return total / rows
