"""The policies of kvkeep, registered under their names."""

from __future__ import annotations

from kvkeep.policies.allocators import Ada, Flat, Pyramid, Threshold, Uniform
from kvkeep.policies.compactor import Compactor
from kvkeep.policies.criticalkv import Critical
from kvkeep.policies.cur import CUR
from kvkeep.policies.duo import Duo
from kvkeep.policies.expected_attention import ExpectedAttention
from kvkeep.policies.finch import Finch
from kvkeep.policies.frc import FRC
from kvkeep.policies.grammar import parse_policy, parse_prompt_policy, policy_string
from kvkeep.policies.h2o import H2O
from kvkeep.policies.keydiff import KeyDiff
from kvkeep.policies.knorm import KNorm
from kvkeep.policies.kvzip import KVzip
from kvkeep.policies.lagkv import LagKV
from kvkeep.policies.online import OnlinePolicy, StaticPolicy, WatchingPolicy
from kvkeep.policies.online_h2o import OnlineH2O
from kvkeep.policies.online_random import OnlineRandom
from kvkeep.policies.online_streaming_llm import OnlineStreamingLLM
from kvkeep.policies.online_tova import OnlineTOVA
from kvkeep.policies.protocols import (
    Allocator,
    Full,
    Judgement,
    Policy,
    PromptPolicy,
    Scorer,
    Selector,
)
from kvkeep.policies.qfilter import QFilter
from kvkeep.policies.random import Random
from kvkeep.policies.registry import (
    AnyPolicy,
    Entry,
    available_policies,
    options_of,
    part_types,
    prefixes,
    register,
    register_part,
    register_prefix,
    summary_of,
)
from kvkeep.policies.selectors import Chunks, TopK
from kvkeep.policies.simlayer import SimLayer
from kvkeep.policies.snapkv import SnapKV
from kvkeep.policies.streaming_llm import StreamingLLM
from kvkeep.policies.tova import TOVA

__all__ = [
    "CUR",
    "FRC",
    "H2O",
    "TOVA",
    "Ada",
    "Allocator",
    "AnyPolicy",
    "Chunks",
    "Compactor",
    "Critical",
    "Duo",
    "Entry",
    "ExpectedAttention",
    "Finch",
    "Flat",
    "Full",
    "Judgement",
    "KNorm",
    "KVzip",
    "KeyDiff",
    "LagKV",
    "OnlineH2O",
    "OnlinePolicy",
    "OnlineRandom",
    "OnlineStreamingLLM",
    "OnlineTOVA",
    "Policy",
    "PromptPolicy",
    "Pyramid",
    "QFilter",
    "Random",
    "Scorer",
    "Selector",
    "SimLayer",
    "SnapKV",
    "StaticPolicy",
    "StreamingLLM",
    "Threshold",
    "TopK",
    "Uniform",
    "WatchingPolicy",
    "available_policies",
    "options_of",
    "parse_policy",
    "parse_prompt_policy",
    "part_types",
    "policy_string",
    "prefixes",
    "register",
    "register_part",
    "register_prefix",
    "summary_of",
]

for _part in (Uniform, Ada, Pyramid, Threshold, Flat, TopK, Chunks, Critical):
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
register(
    "kvzip",
    Policy(KVzip(), Uniform(), TopK()),
    summary="attention while the model repeats the text; costs a second pass",
    paper="arXiv 2505.23416",
)
register(
    "kvzip-plus",
    Policy(KVzip(normalised=True), Uniform(), TopK()),
    summary="kvzip, weighed by what the attention moves",
    paper="arXiv 2601.07891",
)
register(
    "contour",
    Policy(KVzip(), Threshold(), TopK()),
    summary="kvzip, one threshold for all layers and heads, and the newest entries",
    paper="arXiv 2608.25230",
)
register(
    "compactor",
    Policy(Compactor(), Uniform(), TopK()),
    summary="keys that others do not span, and attention within pieces of the text, both ways",
    paper="arXiv 2507.08143",
)
register(
    "criticalkv",
    Policy(SnapKV(), Uniform(), Critical()),
    summary="half by snapkv, half by snapkv times what the value does to the output",
    paper="arXiv 2502.03805",
)
register(
    "adacriticalkv",
    Policy(SnapKV(), Ada(), Critical()),
    summary="criticalkv, the heads of a layer competing for its budget",
    paper="arXiv 2502.03805",
)
register(
    "lagkv",
    Policy(LagKV(), Uniform(), TopK()),
    summary="keys and values that differ from the text that follows them",
    paper="arXiv 2504.04704",
)
register(
    "cur",
    Policy(CUR(), Uniform(), TopK()),
    summary="keys and values of large norm among their neighbours",
    paper="arXiv 2509.15038",
)
register(
    "simlayer",
    SimLayer(),
    summary="lazy layers keep the first entries and the most recent ones, the others everything",
    paper="arXiv 2410.13846",
)
register(
    "qfilter",
    Policy(QFilter(), Uniform(), TopK()),
    summary="keys that point where the model's queries point; wants `kvkeep calibrate`",
    paper="arXiv 2503.02812",
)
register(
    "duo",
    Duo(),
    summary="heads that fetch words from far away keep everything, others the ends; wants `kvkeep calibrate`",
    paper="arXiv 2410.10819",
)
register(
    "online-streaming-llm",
    OnlineStreamingLLM(),
    summary="the first entries and the newest ones, at every step",
    paper="arXiv 2309.17453",
)
register(
    "online-tova",
    OnlineTOVA(),
    summary="at every step the entry goes that the last query looks at least, one set per layer",
    paper="arXiv 2401.06104",
)
register(
    "online-h2o",
    OnlineH2O(),
    summary="at every step the entry goes that has received least attention, but for recent ones",
    paper="arXiv 2306.14048",
)
register(
    "online-random",
    OnlineRandom(),
    summary="random entries per head, beside the first and the newest ones",
)
register_prefix(
    "program",
    "kvkeep.evolve.policy:policy_of",
    placeholder="PATH",
    summary="a program of `kvkeep evolve`, in a file or by the name of a seed",
)
register_prefix(
    "kvpop",
    "kvkeep.learn.policy:kvpop",
    placeholder="FOLDER",
    summary="a scorer trained to foretell attention (`kvkeep train kvpop`), at every step",
    alone=True,
)
register_prefix(
    "kvpop-mlp",
    "kvkeep.learn.policy:kvpop_mlp",
    placeholder="FOLDER",
    summary="the same, for a scorer without a memory",
    alone=True,
)
