"""A sweep over policies and ratios: kvkeep's one prefill for all of them against kvpress's pipeline, one by one.

Both sides are given the same texts, make the same tokens of them (which is checked first), cut before they read the
question, and generate greedily. kvpress's pipeline reads the context once for each press and ratio and answers one
question at a time; kvkeep reads it once, cuts it twenty times, and lets the caches answer together. kvkeep's time
includes the full cache's answer, which a sweep of it always has.

Answers are compared for the policies that have the same settings on both sides. ChunkKV's differ on purpose (kvpress
rounds the number of chunks, and lets one forced entry win its whole chunk; see docs/from-kvpress.md): its share is
printed, and nothing is claimed. A difference of the others is shown with both answers. What can cause one: sums in
another order, so that two tokens or two scores which are all but equal change places; and kvpress's pipeline not
looking at the first generated token when it looks for the end.

    python benchmarks/sweep_vs_kvpress.py --kvpress PATH_TO_PYTHON
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

import torch
from harness import Claim, arguments, report, require_parity
from kvpress_side import Kvpress, add_arguments, kvpress_side
from models import embedded_model

from kvkeep import Budget
from kvkeep.bench.settings import Settings
from kvkeep.bench.worker import Worker
from kvkeep.hf.prompting import Prompting
from kvkeep.results import FULL
from kvkeep.tasks.protocols import Sample
from kvkeep.tasks.registry import task

WINDOW, KERNEL = 32, 5
POLICIES = {  # kvpress's name and kvkeep's
    "snapkv": f"snapkv[window={WINDOW},kernel={KERNEL}]",
    "chunkkv": f"chunkkv[window={WINDOW},kernel={KERNEL}]",
    "expected-attention": "expected-attention",
    "knorm": "knorm",
    "streaming-llm": "streaming-llm",
}
SAME = ("snapkv", "expected-attention", "knorm", "streaming-llm")  # the same settings on both sides
# Binary fractions, since kvpress's rounding loses an entry elsewhere; the window is at most half of each budget.
RATIOS = (0.25, 0.5, 0.75, 0.875)
TASKS = ("ruler/niah_single_2", "ruler/niah_multikey_1")
LENGTH, QUICK_LENGTH, NEW_TOKENS = 2048, 1024, 24


def settings_of(samples: int, length: int, tasks: tuple[str, ...]) -> Settings:
    return Settings(
        model="smollm2-135m",
        tasks=tasks,
        lengths=(length,),
        samples=samples,
        policies=tuple(POLICIES.values()),
        budgets=tuple(Budget(compression_ratio=ratio) for ratio in RATIOS),
        dtype="float32",
        max_new_tokens=NEW_TOKENS,
        fidelity=False,
    )


def samples_of(settings: Settings, worker: Worker) -> list[Sample]:
    room = settings.lengths[0] - worker.overhead
    return [
        sample
        for name in settings.tasks
        for sample in task(name).samples(worker.tokenizer, length=room, count=settings.samples, seed=settings.seed)
    ]


def warm_up(model: Any, prompting: Prompting, kvpress: Kvpress, sample: Sample) -> None:
    """A short forward on each side."""
    ids = prompting.context(sample.context).ids[:256]
    with torch.no_grad():
        model(torch.tensor([ids]), logits_to_keep=1)
    press = {"name": "knorm", "ratio": 0.5, "window": WINDOW, "kernel": KERNEL}
    short = texts(sample) | {"context": sample.context[:1000]}
    kvpress.ask("answer", max_new_tokens=2, press=press, **short)


def texts(sample: Sample) -> dict[str, str]:
    turn = sample.turns[0]
    return {"context": sample.context, "question": turn.question, "answer_prefix": turn.answer_prefix}


def check_tokens(samples: list[Sample], prompting: Prompting, kvpress: Kvpress) -> None:
    """Refuse to measure if the two sides do not read the same tokens."""
    differing = 0
    for sample in samples:
        theirs = kvpress.ask("tokens", **texts(sample))
        context = prompting.context(sample.context)
        ours = list(context.ids), prompting.question(context.end, sample.turns[0])
        differing += ours != (theirs["context"], theirs["question"])
    require_parity("samples whose tokens differ", differing, 0)


def ask_kvpress(kvpress: Kvpress, sample: Sample) -> tuple[dict[tuple[str, float], str], float]:
    """The answers of all presses at all ratios, and the milliseconds."""
    answers, spent = {}, 0.0
    for name in POLICIES:
        for ratio in RATIOS:
            press = {"name": name, "ratio": ratio, "window": WINDOW, "kernel": KERNEL}
            result = kvpress.ask("answer", max_new_tokens=NEW_TOKENS, press=press, **texts(sample))
            answers[name, ratio] = result["answer"]
            spent += result["ms"]
    return answers, spent


def ask_kvkeep(worker: Worker, sample: Sample) -> tuple[dict[tuple[str, float], str], float]:
    """The same of kvkeep."""
    started = time.perf_counter()
    rows = list(worker.rows((sample, frozenset())))
    spent = 1000 * (time.perf_counter() - started)
    names = {ours: theirs for theirs, ours in POLICIES.items()}
    answers = {
        (names[row.policy], float(row.budget["compression_ratio"])): row.prediction
        for row in rows
        if row.policy != FULL
    }
    return answers, spent


def main() -> None:
    claim = Claim.read("sweep_vs_kvpress")
    parser = argparse.ArgumentParser(description=claim.cell)
    add_arguments(parser)
    options = arguments(claim, parser, quick_runs=1)
    spent = {"kvkeep": 0.0, "kvpress": 0.0}
    same: dict[str, list[bool]] = defaultdict(list)
    with kvpress_side(options) as kvpress:
        loaded: tuple[Any, Any] = embedded_model(torch.float32)
        length, tasks = (QUICK_LENGTH, TASKS[:1]) if options.quick else (LENGTH, TASKS)
        settings = settings_of(options.runs, length, tasks)
        worker = Worker(settings, loaded)
        samples = samples_of(settings, worker)
        prompting = Prompting(loaded[1])
        check_tokens(samples, prompting, kvpress)
        print(f"{len(samples)} samples, {len(POLICIES)} policies, {len(RATIOS)} ratios")
        warm_up(loaded[0], prompting, kvpress, samples[0])
        for number, sample in enumerate(samples, 1):
            ours, milliseconds = ask_kvkeep(worker, sample)
            spent["kvkeep"] += milliseconds
            theirs, milliseconds = ask_kvpress(kvpress, sample)
            spent["kvpress"] += milliseconds
            for (name, ratio), answer in theirs.items():
                same[name].append(ours[name, ratio] == answer)
                if name in SAME and not same[name][-1]:
                    print(f"  {sample.key}, {name} at {ratio}: {ours[name, ratio]!r} here, {answer!r} in kvpress")
            so_far = ", ".join(f"{side} {milliseconds / 1000:.1f} s" for side, milliseconds in spent.items())
            print(f"  {number}/{len(samples)}: {so_far}", flush=True)
    for name, equal in same.items():
        print(f"the same answers, {name}: {sum(equal)} of {len(equal)}")
    judged = [equal for name in SAME for equal in same[name]]
    report(
        claim,
        {
            "total time, kvpress": spent["kvpress"] / spent["kvkeep"],
            "the same answers": sum(judged) / len(judged),
        },
        answers=len(judged),
        chunkkv=sum(same["chunkkv"]) / len(same["chunkkv"]),
    )


if __name__ == "__main__":
    main()
