"""The loop: the same seed gives the same search, in one go, in pieces, or through a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import Budget
from kvkeep.errors import ResultsError
from kvkeep.evolve.cascade import Cascade
from kvkeep.evolve.evaluating import Evaluator
from kvkeep.evolve.evaluation import CascadeSettings, Evaluation, Score, Yardstick
from kvkeep.evolve.history import Candidate, Generation, History, SearchLog, read_history
from kvkeep.evolve.loop import (
    Progress,
    SearchResult,
    SearchSettings,
    feedback_of,
    replay,
    search,
    search_facts,
)
from kvkeep.evolve.mutators.grammar import Grammar
from kvkeep.evolve.mutators.protocol import Mutator, Parent, Proposal, SpendLimitReached
from kvkeep.evolve.program import Program, seed_program
from kvkeep.evolve.sandbox import Sandbox
from kvkeep.evolve.traits import Traits
from kvkeep.testing import fake_model

from .toys import collected

SEEDS = ("frc", "v1-generic")


class Pretended:
    """A cascade that draws what becomes of a program from its digest."""

    def __init__(self) -> None:
        self.settings = CascadeSettings(Budget(compression_ratio=0.5))
        self.yardstick: Yardstick | None = None
        self.judged: list[str] = []

    def measure_yardstick(self) -> Yardstick:
        score = Score(100.0, 90.0, 110.0, 3, "", (100.0,) * 3)
        self.yardstick = Yardstick(-2.0, -1.0, {"stage1": score, "stage2": score}, 50.0)
        return self.yardstick

    def lower_gate(self, seed: Evaluation) -> None:
        assert self.yardstick is not None
        self.yardstick = replace(self.yardstick, gate=10.0)

    def evaluate(
        self, programs: Sequence[Program], known: Mapping[str, str] | None = None, *, gated: bool = True, on_stage: Any
    ) -> list[Evaluation]:
        found = []
        for program in programs:
            self.judged.append(program.digest)
            random = np.random.default_rng(int(program.digest[:12], 16))
            behaviour = f"{random.integers(40)}"
            traits = Traits(random.random(), 1 + 10 * random.random(), random.random(), random.random())
            mean = float(100 * random.random())
            score = Score(mean, mean - 1, mean + 1, 3, "", (mean,) * 3)
            one = Evaluation(program.digest, "evaluated", "stage2", behaviour=behaviour, traits=traits)
            kind = random.random() if gated else 1.0
            if known is not None and behaviour in known:
                found.append(replace(one, status="duplicate", stage="probe", twin=known[behaviour]))
            elif kind < 0.1:
                found.append(replace(one, status="refused", stage="probe", reason="crash", traits=None, behaviour=""))
            elif kind < 0.3:
                found.append(replace(one, status="gated", stage="stage1", reason="gate", stage1=score))
            else:
                found.append(replace(one, stage1=score, stage2=score, fitness=mean))
        return found


class Limited(Grammar):
    """A grammar with a purse; it counts, as a language model's spend does."""

    def __init__(self, limit: int = 10**6) -> None:
        super().__init__()
        self.spent, self.limit = 0, limit

    def propose(self, parents: Sequence[Parent], random: np.random.Generator) -> Proposal:
        if self.spent >= self.limit:
            raise SpendLimitReached(expected="tokens", received="none left", remedy="grant more")
        self.spent += 1
        if self.spent % 7 == 0:
            return Proposal(None, self.name, (parents[0].program.digest,), "prose", 1, rejection="no_code")
        return replace(super().propose(parents, random), tokens=1)

    def state(self) -> dict[str, Any]:
        return {"spent": self.spent}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.spent = state["spent"]


def run(
    folder: Path, candidates: int, mutator: Mutator | None = None, seeds: Sequence[str] = SEEDS, **changes: Any
) -> tuple[SearchResult, Pretended]:
    cascade: Any = Pretended()
    mutator = mutator or Limited()
    chosen = SearchSettings(**({"islands": 3, "generation": 4, "migration": 2} | changes))
    programs = [seed_program(name) for name in seeds]
    with SearchLog(folder, search_facts(chosen, cascade.settings, mutator, programs)) as log:
        return search(log, chosen, cascade, mutator, programs, candidates=candidates), cascade


def timeless(history: History) -> list[dict[str, Any]]:
    """All that is not a clock's."""
    records = [generation.to_dict() for generation in history.generations]
    for record in records:
        record["seconds"] = 0
        if record["seed_again"]:
            record["seed_again"] |= {"guard_seconds": 0, "model_seconds": 0}
        for candidate in record["candidates"]:
            if candidate["evaluation"]:
                candidate["evaluation"] |= {"guard_seconds": 0, "model_seconds": 0}
    return json.loads(json.dumps(records))  # type: ignore[no-any-return]


def test_a_search_keeps_its_rules(tmp_path: Path) -> None:
    result, cascade = run(tmp_path, 60)
    history = result.history
    assert len(history.candidates) == 62
    assert [candidate.order for candidate in history.candidates] == list(range(62))
    assert [c.island for c in history.candidates[2:]] == [at % 3 for at in range(60)]
    again = [generation.number for generation in history.generations if generation.seed_again is not None]
    assert again == [5, 10, 15]
    assert history.drift() == [(5, 0.0), (10, 0.0), (15, 0.0)]
    seed = seed_program(SEEDS[0]).digest
    assert cascade.judged.count(seed) == 4
    others = [digest for digest in cascade.judged if digest != seed]
    assert len(set(others)) == len(others)  # no other text is evaluated twice
    digests = [
        candidate.digest for candidate in history.candidates if candidate.status not in ("rejected", "duplicate")
    ]
    assert len(set(digests)) == len(digests)
    fitness = [c.evaluation.fitness for c in history.candidates if c.evaluation and c.evaluation.fitness is not None]
    assert history.best is not None
    assert history.best.evaluation is not None
    assert history.best.evaluation.fitness == max(fitness)
    rising = [c.evaluation.fitness for c in history.ascent() if c.evaluation]
    assert rising == sorted(set(rising))  # type: ignore[type-var]
    assert sum(history.counts().values()) == 62
    assert history.counts()["rejected"] == 60 // 7
    assert replay(history).to_dict() == result.archive.to_dict()
    known = {c.digest for c in history.candidates}
    assert all(parent in known for c in history.candidates for parent in c.parents)
    moves = [move for generation in history.generations for move in generation.migrations]
    assert moves
    assert all(g.number % 2 == 0 for g in history.generations if g.migrations)
    read = read_history(tmp_path)
    assert timeless(read) == timeless(history)
    assert read.yardstick is not None
    assert read.drift() == history.drift()


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=3), st.integers(0, 3))
def test_a_search_in_pieces_is_the_same_search(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int], seed: int
) -> None:
    """Pieces of whole generations, so that the same candidates are judged together."""
    whole, _ = run(tmp_path_factory.mktemp("whole"), 4 * sum(pieces), seed=seed)
    folder, done = tmp_path_factory.mktemp("pieces"), 0
    for piece in pieces:
        done += 4 * piece
        result, _ = run(folder, done, seed=seed)
    assert timeless(result.history) == timeless(whole.history)
    assert result.archive.to_dict() == whole.archive.to_dict()
    other, _ = run(tmp_path_factory.mktemp("other"), 4 * sum(pieces), seed=seed + 1)
    assert timeless(other.history)[1:] != timeless(whole.history)[1:]


def test_a_torn_line_is_judged_again(tmp_path: Path) -> None:
    whole, _ = run(tmp_path, 24)
    log = tmp_path / "rows.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    again, cascade = run(tmp_path, 24)
    assert timeless(again.history) == timeless(whole.history)
    assert 0 < len(cascade.judged) < len(whole.history.candidates)
    finished, idle = run(tmp_path, 24)
    assert timeless(finished.history) == timeless(whole.history)
    assert idle.judged == []
    with pytest.raises(ResultsError, match="islands"):
        run(tmp_path, 24, islands=2)
    with pytest.raises(ResultsError, match="seeds"):  # the first one is that of controls, and begins island 0
        run(tmp_path, 24, seeds=SEEDS[::-1])


def test_a_spend_limit_ends_a_search_and_says_so(tmp_path: Path) -> None:
    result, _ = run(tmp_path, 60, Limited(limit=10))
    assert "none left" in result.stopped
    assert 2 + 8 <= len(result.history.candidates) <= 2 + 10
    more, _ = run(tmp_path, 20, Limited())
    assert more.stopped == ""
    assert len(more.history.candidates) == 22


def test_a_search_without_a_seed_that_runs_is_refused(tmp_path: Path) -> None:
    class Refusing(Pretended):
        def evaluate(self, programs: Any, known: Any = None, **rest: Any) -> list[Evaluation]:
            return [Evaluation(p.digest, "refused", "probe", "crash", "it divides by zero") for p in programs]

    cascade: Any = Refusing()
    seeds = [seed_program("frc")]
    chosen = SearchSettings()
    with (
        SearchLog(tmp_path, search_facts(chosen, cascade.settings, Grammar(), seeds)) as log,
        pytest.raises(ResultsError, match="divides by zero"),
    ):
        search(log, chosen, cascade, Grammar(), seeds, candidates=4)
    with pytest.raises(ResultsError, match="at least 1"):
        SearchSettings(generation=0)


def test_whoever_watches_is_told(tmp_path: Path) -> None:
    seen: list[Progress] = []
    cascade: Any = Pretended()
    chosen, seeds = SearchSettings(islands=1, generation=5), [seed_program("frc")]
    with SearchLog(tmp_path, search_facts(chosen, cascade.settings, Grammar(), seeds)) as log:
        search(log, chosen, cascade, Grammar(), seeds, candidates=12, on_progress=seen.append)
    assert [stand.done for stand in seen] == sorted(stand.done for stand in seen)
    assert (seen[-1].done, seen[-1].total) == (12, 12)
    assert sum(seen[-1].counts.values()) == 13
    best = [stand.best for stand in seen if stand.best is not None]
    assert best == sorted(best)


def test_feedback_says_what_became_of_a_program() -> None:
    score = Score(61.2, 50.0, 70.0, 6, "", ())
    gated = Evaluation("d", "gated", "stage1", "gate", "61.2 points; the gate asks for 70.0", stage1=score)
    text = feedback_of(replace(gated, traits=Traits(0.5, 3.0, 0.25, 0.8)))
    assert "stage 1: 61.2 points [50.0, 70.0] on 6 samples" in text
    assert "50% in common with SnapKV" in text
    assert "gated at stage1: 61.2 points" in text
    assert feedback_of(None) == ""


def test_records_read_back() -> None:
    candidate = Candidate(3, 1, 0, "source", "name", "digest", "grammar", ("p",), "note", 5, "", None)
    generation = Generation(1, (candidate,), {"spent": 3}, ((0, 1, "x"),), 2.5)
    assert Generation.from_dict(json.loads(json.dumps(generation.to_dict()))) == generation
    assert (candidate.status, candidate.reason) == ("rejected", "")


KILLED = """
    import sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[2])
    from tests.evolve.test_loop import really_search
    really_search(Path(sys.argv[1]), Path(sys.argv[3]))
"""


def really_search(folder: Path, samples: Path, candidates: int = 12) -> SearchResult:
    """A search on a tiny model, with everything that belongs to one."""
    model, tokenizer = fake_model(dtype=torch.float32, layers=2)
    recorded = collected(samples, (model, tokenizer), stage1=1, stage2=1, heldout=0)
    cascade_settings = CascadeSettings(Budget(compression_ratio=0.6), gate=0.0)
    chosen, seeds = SearchSettings(islands=2, generation=3, migration=2), [seed_program("frc")]
    with (
        Sandbox() as sandbox,
        SearchLog(folder, search_facts(chosen, cascade_settings, Grammar(), seeds)) as log,
    ):
        cascade = Cascade(recorded, cascade_settings, random_is_worse(Evaluator(model, tokenizer)), sandbox)
        return search(log, chosen, cascade, Grammar(), seeds, candidates=candidates)


def random_is_worse(evaluator: Evaluator) -> Any:
    """A random model does not mind what is evicted: here, less attention kept is worse."""

    def read(jobs: Any) -> Any:
        found = evaluator.read(jobs)
        kept = []
        for job in jobs:
            share = [
                float(job.sample.tensors[f"contexts.{at}.global_attention"][mask[0, 0]].sum())
                / float(job.sample.tensors[f"contexts.{at}.global_attention"].sum())
                for at, mask in enumerate(job.kept)
            ]
            kept.append(sum(share) / len(share))
        return [
            replace(r, logprobs=tuple(x - 3 * (1 - k) for x in r.logprobs)) for r, k in zip(found, kept, strict=True)
        ]

    return read


def test_a_killed_search_comes_to_the_same_result(tmp_path: Path) -> None:
    whole = really_search(tmp_path / "whole", tmp_path / "samples")
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "killed"), root, str(tmp_path / "samples")]
    process = subprocess.Popen(command)
    log = tmp_path / "killed" / "rows.jsonl"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and not (log.exists() and log.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = read_history(tmp_path / "killed")
    assert 0 < len(before.candidates) < len(whole.history.candidates)
    resumed = really_search(tmp_path / "killed", tmp_path / "samples")
    assert timeless(resumed.history) == timeless(whole.history)
    assert resumed.archive.to_dict() == whole.archive.to_dict()
    assert resumed.history.counts()["evaluated"] >= 2
