"""The policies of kvkeep, registered under their names."""

from __future__ import annotations

from kvkeep.policies.allocators import Ada, Pyramid, Threshold, Uniform
from kvkeep.policies.expected_attention import ExpectedAttention
from kvkeep.policies.finch import Finch
from kvkeep.policies.frc import FRC
from kvkeep.policies.h2o import H2O
from kvkeep.policies.keydiff import KeyDiff
from kvkeep.policies.knorm import KNorm
from kvkeep.policies.protocols import (
    Allocator,
    Full,
    Judgement,
    Policy,
    PromptPolicy,
    Scorer,
    Selector,
)
from kvkeep.policies.random import Random
from kvkeep.policies.registry import (
    Entry,
    available_policies,
    options_of,
    parse_policy,
    part_types,
    policy_string,
    register,
    register_part,
    summary_of,
)
from kvkeep.policies.selectors import Chunks, TopK
from kvkeep.policies.snapkv import SnapKV
from kvkeep.policies.streaming_llm import StreamingLLM
from kvkeep.policies.tova import TOVA

__all__ = [
    "FRC",
    "H2O",
    "TOVA",
    "Ada",
    "Allocator",
    "Chunks",
    "Entry",
    "ExpectedAttention",
    "Finch",
    "Full",
    "Judgement",
    "KNorm",
    "KeyDiff",
    "Policy",
    "PromptPolicy",
    "Pyramid",
    "Random",
    "Scorer",
    "Selector",
    "SnapKV",
    "StreamingLLM",
    "Threshold",
    "TopK",
    "Uniform",
    "available_policies",
    "options_of",
    "parse_policy",
    "part_types",
    "policy_string",
    "register",
    "register_part",
    "summary_of",
]

for _part in (Uniform, Ada, Pyramid, Threshold, TopK, Chunks):
    register_part(_part)

register("full", Full(), summary="keeps everything, the yardstick")
register(
    "random",
    Policy(Random(), Uniform(), TopK()),
    summary="random entries per head, the floor of every comparison",
)
register(
    "streaming-llm",
    Policy(StreamingLLM(), Uniform(), TopK()),
    summary="the first entries and the most recent ones",
    paper="arXiv 2309.17453",
)
register(
    "knorm",
    Policy(KNorm(), Uniform(), TopK()),
    summary="keys of small norm",
    paper="arXiv 2406.11430",
)
register(
    "keydiff",
    Policy(KeyDiff(), Uniform(), TopK()),
    summary="keys that differ from the average key",
    paper="arXiv 2504.15364",
)
register(
    "snapkv",
    Policy(SnapKV(), Uniform(), TopK()),
    summary="attention from the end of the text",
    paper="arXiv 2404.14469",
)
register(
    "pyramidkv",
    Policy(SnapKV(), Pyramid(), TopK()),
    summary="snapkv with larger budgets in lower layers",
    paper="arXiv 2406.02069",
)
register(
    "chunkkv",
    Policy(SnapKV(), Uniform(), Chunks()),
    summary="snapkv on whole chunks of 20 positions",
    paper="arXiv 2502.00299",
)
register(
    "adasnapkv",
    Policy(SnapKV(), Ada(), TopK()),
    summary="snapkv, the heads of a layer competing for its budget",
    paper="arXiv 2407.11550",
)
register(
    "tova",
    Policy(TOVA(), Uniform(), TopK()),
    summary="attention of the last query, one set per layer",
    paper="arXiv 2401.06104",
)
register(
    "h2o",
    Policy(H2O(), Uniform(), TopK()),
    summary="attention accumulated over the text, and recent entries",
    paper="arXiv 2306.14048",
)
register(
    "expected-attention",
    Policy(ExpectedAttention(), Uniform(), TopK()),
    summary="attention that queries to come are expected to pay",
    paper="arXiv 2510.00636",
)
register(
    "finch",
    Policy(Finch(), Uniform(), TopK()),
    summary="attention from the question",
    paper="arXiv 2408.00167",
)
register(
    "frc",
    Policy(FRC(), Uniform(), Chunks()),
    summary="recent attention, density and strongest head, on chunks; found by CacheCraft",
    paper="arXiv 2608.14555",
)
