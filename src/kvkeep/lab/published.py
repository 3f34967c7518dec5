"""What the paper published, to stand beside what was measured here; never mixed with it.

ContourKV, arXiv 2608.25230 v2: Qwen2.5-1.5B, 4,096 tokens of wikitext-103's test part, rows of all 28 x 12 heads. AUCs
are given for ten models at s = 8 only.
"""

from __future__ import annotations

SOURCE = "ContourKV, arXiv 2608.25230 v2: Qwen2.5-1.5B, 4,096 tokens of wikitext-103"

# Metric, then number of entries.
PUBLISHED: dict[str, dict[int, float]] = {
    "penalty": {4: 1.07, 8: 1.16, 16: 1.39, 32: 1.79},
    "kappa": {4: 1.003, 8: 1.025, 16: 1.034, 32: 1.033},
    # 1 - 1/kappa, which is exact for medians. The paper's own range over models is 0.021 to 0.047.
    "closable_share": {4: 0.003, 8: 0.024, 16: 0.033, 32: 0.032},
    "optimal": {4: 0.39, 8: 0.21},  # given without the model's name
    "beyond": {4: 0.235, 8: 0.259, 16: 0.265, 32: 0.236},
    "dropped_mass": {4: 0.38, 8: 0.28, 16: 0.20, 32: 0.13},
    "auc": {8: 0.83},
}

AUC_BY_MODEL = {
    "Qwen2.5-1.5B": 0.83,
    "Llama-3.2-1B": 0.80,
    "Qwen3-1.7B": 0.85,
    "OLMo-2-1B": 0.76,
    "Qwen3-0.6B": 0.85,
    "Qwen3-4B": 0.76,
    "gemma-2-2b": 0.89,
    "gemma-3-1b": 0.82,
    "Qwen2.5-7B": 0.85,
    "Qwen3-14B": 0.80,
}
