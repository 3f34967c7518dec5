"""How many candidates a search judges in an hour: recorded samples and a sandbox, against a prefill for each.

The same candidates go through both sides in turns, group by group. The plain side is what one would write first: a
KeepCache with the candidate as its policy, a prefill of the text, and the reference answer fed after it; it runs
programs in the process of the model, without sandbox or canaries. Both sides must find the same log-probabilities.

    python benchmarks/candidates_per_hour.py
    python benchmarks/candidates_per_hour.py --quick
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Claim, arguments, report, require_parity, show
from models import embedded_model

import kvkeep
from kvkeep.evolve.cascade import Cascade
from kvkeep.evolve.context import PrefillContext
from kvkeep.evolve.evaluating import Evaluator
from kvkeep.evolve.evaluation import CascadeSettings, Evaluation
from kvkeep.evolve.mutators.grammar import Grammar
from kvkeep.evolve.mutators.protocol import Parent
from kvkeep.evolve.policy import ProgramPolicy
from kvkeep.evolve.program import Program, seed_program
from kvkeep.evolve.sample_store import SampleSet, SampleStore
from kvkeep.evolve.samples import Asked, Recorded, SampleSettings, split_samples
from kvkeep.evolve.sandbox import Sandbox
from kvkeep.hf.prompting import Prompting
from kvkeep.hf.scoring import batch_logprobs
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.tasks.registry import task

TASKS = ("ruler/niah_single_2", "key_value")
LENGTH, RATIO, CANDIDATES = 1024, 0.83, 30
ALLOWED = 1e-3  # nats: the same sums, other batches


def candidates(count: int) -> list[Program]:
    """Different children of FRC, as the first generations of a search have them."""
    seed, grammar, found = seed_program("frc"), Grammar(), dict[str, Program]()
    for at in range(10 * count):
        child = grammar.propose([Parent(seed)], np.random.default_rng([0, at])).program
        if child is not None:
            found.setdefault(child.digest, child)
    return list(found.values())[:count]


def plain(model: Any, asked: Sequence[Asked], program: Program) -> list[float]:
    """A prefill of each sample under the candidate, and the mean log-probability of its answer."""
    found = []
    budget = kvkeep.Budget(compression_ratio=RATIO)
    for one in asked:
        cache = kvkeep.KeepCache(model, ProgramPolicy(program), budget=budget, question=one.question)
        model(input_ids=torch.tensor([one.ids]), use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        (logprobs,) = batch_logprobs(model, cache, [one.prompt], [one.reference])
        found.append(float(logprobs.mean()))
    return found


def bare_seconds(programs: Sequence[Program], contexts: Sequence[PrefillContext]) -> float:
    """What the candidates' own functions take, once, with nobody looking."""
    started = time.perf_counter()
    for program in programs:
        functions = program.functions()
        for context in contexts:
            functions.select_tokens_to_keep(functions.score_tokens(context), context)
    return time.perf_counter() - started


def logprobs(cascade: Cascade, evaluation: Evaluation) -> list[float]:
    """Points back in nats, in the order of the samples of both stages."""
    yardstick = cascade.yardstick
    if yardstick is None or evaluation.stage1 is None or evaluation.stage2 is None:
        raise SystemExit(f"a candidate was not evaluated to the end: {evaluation.status}, {evaluation.detail}")
    points = [*evaluation.stage1.values, *evaluation.stage2.values]
    return [yardstick.zero + value / 100 * (yardstick.hundred - yardstick.zero) for value in points]


def tokens_of(samples: Sequence[Recorded], settings: SampleSettings, tokenizer: Any) -> list[Asked]:
    """The same samples as tokens, for the plain side."""
    drawn = split_samples([task(name) for name in TASKS], tokenizer, settings, ("stage1", "stage2"))
    prompting = Prompting(tokenizer)
    by_key = {s.key: Asked.of(s, prompting, settings.protocol) for split in drawn.values() for s in split}
    return [by_key[sample.facts.sample] for sample in samples]


@torch.inference_mode()
def main() -> None:
    claim = Claim.read("candidates_per_hour")
    options = arguments(claim, quick_runs=2)
    count = CANDIDATES * options.runs // claim.runs
    model, tokenizer = embedded_model()
    settings = SampleSettings(LENGTH, probe=1, stage1=1, stage2=1 if options.quick else 4, heldout=0)
    with tempfile.TemporaryDirectory() as folder, Sandbox() as sandbox:
        started = time.perf_counter()
        samples = SampleStore(Path(folder)).collect(
            model, tokenizer, [task(name) for name in TASKS], settings, splits=("probe", "stage1", "stage2")
        )
        print(f"samples recorded in {time.perf_counter() - started:.1f} s, once for a search")
        few = 2 if options.quick else None
        ratios = compare(model, tokenizer, samples, settings, sandbox, candidates(count), options.runs, few)
    report(claim, ratios, candidates=count)


def compare(
    model: Any,
    tokenizer: Any,
    samples: SampleSet,
    settings: SampleSettings,
    sandbox: Sandbox,
    programs: Sequence[Program],
    groups: int,
    few: int | None,
) -> dict[str, float]:
    """Both sides on all candidates, in turns; the slow side on the first `few` of each group only, if given."""
    cascade = Cascade(
        samples,
        CascadeSettings(kvkeep.Budget(compression_ratio=RATIO)),
        Evaluator(model, tokenizer).read,
        sandbox,
    )
    cascade.measure_yardstick()
    pool = samples.of("stage1", "stage2")
    asked = tokens_of(pool, settings, tokenizer)
    contexts = [c for split in ("probe", "stage1", "stage2") for c in cascade.contexts(split)]
    taken: dict[str, list[float]] = {"cascade, a candidate": [], "plain, a candidate": []}
    guard, bare, whole, difference = 0.0, 0.0, 0.0, 0.0
    for group in np.array_split(np.arange(len(programs)), groups):
        mine = [programs[int(at)] for at in group]
        started = time.perf_counter()
        evaluations = cascade.evaluate(mine, gated=False)
        seconds = time.perf_counter() - started
        taken["cascade, a candidate"].append(1000 * seconds / len(mine))
        whole += seconds
        guard += sum(evaluation.guard_seconds for evaluation in evaluations)
        bare += bare_seconds(mine, contexts)
        started = time.perf_counter()
        found = [plain(model, asked, program) for program in mine[:few]]
        taken["plain, a candidate"].append(1000 * (time.perf_counter() - started) / len(found))
        for evaluation, theirs in zip(evaluations, found, strict=False):
            if evaluation.status == "evaluated":
                difference = max(difference, float(np.abs(np.subtract(logprobs(cascade, evaluation), theirs)).max()))
    require_parity("log-probabilities of the right answers", difference, ALLOWED)
    show(f"{len(programs)} candidates on {len(pool)} samples", taken)
    ours, theirs_ms = sum(taken["cascade, a candidate"]), sum(taken["plain, a candidate"])
    print(f"\n{3.6e6 * groups / ours:,.0f} candidates an hour, {3.6e6 * groups / theirs_ms:,.0f} without")
    return {
        "plain evaluation": theirs_ms / ours,
        "guard overhead, share of a candidate's time": max(0.0, guard - bare) / whole,
    }


if __name__ == "__main__":
    main()
