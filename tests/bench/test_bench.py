"""The runner: one prefill for all policies gives what each gives alone, rows once each, through kills and executors."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep import Budget, KeepCache
from kvkeep.bench.measuring import kept_shares
from kvkeep.bench.runner import run
from kvkeep.bench.settings import Settings
from kvkeep.bench.worker import Worker
from kvkeep.errors import ResultsError, TaskError
from kvkeep.hf.prompting import Prompting
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.results import Row, read_rows
from kvkeep.testing import fake_model

from .toy import Toy

POLICIES = ("snapkv[window=8]", "streaming-llm", "knorm+ada")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    model, tokenizer = fake_model(dtype=torch.float32, layers=3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def settings_for(model: str | Path = "tiny", **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": str(model),
        "tasks": ("toy/colours",),
        "lengths": (512,),
        "samples": 2,
        "policies": POLICIES,
        "budgets": (Budget(compression_ratio=0.5), Budget(entries=12)),
        "protocols": ("query-agnostic", "query-aware"),
    }
    return Settings(**(values | changes))


def rows_of(settings: Settings, out: Path, task: Toy | None = None, **options: Any) -> list[Row]:
    loaded = None if Path(settings.model).is_dir() else fake_model(dtype=torch.float64, layers=3)
    return list(read_rows(run(settings, [task or Toy()], out, loaded=loaded, **options)))


def generated(model: Any, cache: KeepCache, ids: list[int], count: int, ends: set[int]) -> list[int]:
    new: list[int] = []
    step = torch.tensor([ids])
    with torch.no_grad():
        while len(new) < count and not (new and new[-1] in ends):
            new.append(int(model(step, **{CACHE_ARGUMENT: cache}).logits[0, -1].argmax()))
            step = torch.tensor([[new[-1]]])
    return new


@pytest.mark.parametrize("batch_rows", [1, 3, 16])
def test_rows_are_what_each_policy_gives_alone(tmp_path: Path, batch_rows: int) -> None:
    settings = settings_for(samples=1)
    rows = rows_of(settings, tmp_path, Toy(questions=2), batch_rows=batch_rows)
    assert len(rows) == 2 * 2 * (1 + 3 * 2)
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    prompting = Prompting(tokenizer)
    sample = next(iter(Toy(questions=2).samples(tokenizer, length=400, count=1)))
    context = prompting.context(sample.context)
    for row in rows:
        turn = sample.turns[row.turn]
        question = prompting.question(context.end, turn)
        budget = Budget(**row.budget)  # type: ignore[arg-type]
        visible = row.protocol == "query-aware"
        ids = [*context.ids, *question] if visible else list(context.ids)
        words = len(ids) - len(prompting.footer(turn))
        span = (len(context.ids), words) if visible else None
        cache = KeepCache(model, row.policy, budget=budget, question=span)
        with torch.no_grad():
            model(torch.tensor([ids[:-1] if visible else ids]), **{CACHE_ARGUMENT: cache})
        assert row.memory.held_bytes == cache.ledger.held_bytes
        assert row.memory.peak_bytes == cache.ledger.peak_bytes or "+ada" in row.policy
        assert row.entries_per_cell == tuple(tuple(r[0]) for r in cache.ledger.entries_per_cell)
        needles = prompting.needles(context, turn)
        assert row.kept_needle_share_per_cell == kept_shares(cache, needles)
        new = generated(model, cache, ids[-1:] if visible else question, 6, {tokenizer.eos_token_id})
        assert row.prediction == tokenizer.decode(new, skip_special_tokens=True)
        if row.policy == "full":
            assert row.fidelity.kl == 0
            assert row.fidelity.top1 == 1
            assert row.kept_needle_share == 1
        else:
            assert row.fidelity.kl is not None
            assert row.fidelity.kl > 0


def test_the_reference_is_scored_in_its_place(tmp_path: Path) -> None:
    rows = rows_of(settings_for(samples=1, policies=("full",), budgets=()), tmp_path)
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    prompting = Prompting(tokenizer)
    sample = next(iter(Toy().samples(tokenizer, length=400, count=1)))
    context, turn = prompting.context(sample.context), sample.turns[0]
    reference = prompting.reference(turn)
    ids = [*context.ids, *prompting.question(context.end, turn)]
    with torch.no_grad():
        logits = model(torch.tensor([ids + reference])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(reference)[:, None]).mean()
    for row in rows:
        assert row.fidelity.reference_logprob == pytest.approx(float(expected), abs=1e-5)


def test_needles_are_where_the_task_says(tmp_path: Path) -> None:
    _, tokenizer = fake_model()
    prompting = Prompting(tokenizer)
    for sample in Toy(questions=3).samples(tokenizer, length=400, count=3):
        context = prompting.context(sample.context)
        for turn in sample.turns:
            ids = [context.ids[at] for at in prompting.needles(context, turn)]
            text = tokenizer.decode(ids)
            assert turn.references[0] in text
            assert turn.answer_prefix in text


def test_talks_go_on_from_each_policys_own_answers(tmp_path: Path) -> None:
    rows = rows_of(settings_for(samples=1), tmp_path, Toy(talking=True))
    agnostic = [row for row in rows if row.protocol == "query-agnostic"]
    aware = [row for row in rows if row.protocol == "query-aware"]
    assert len(agnostic) == 2 * 7
    assert {row.turn for row in aware} == {0}  # what a follow-up asks is not known when the text is cut
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    prompting = Prompting(tokenizer)
    sample = next(iter(Toy(talking=True).samples(tokenizer, length=400, count=1)))
    context = prompting.context(sample.context)
    for policy, budget in settings_for().cuts:
        cache = KeepCache(model, policy, budget=budget)
        with torch.no_grad():
            model(torch.tensor([context.ids]), **{CACHE_ARGUMENT: cache})
        ends = {tokenizer.eos_token_id}
        first = generated(model, cache, prompting.question(context.end, sample.turns[0]), 6, ends)
        second = generated(model, cache, first[-1:] + prompting.follow_up(sample.turns[1]), 6, ends)
        mine = [r.prediction for r in agnostic if (r.policy, r.budget) == (policy, budget.describe())]
        assert mine == [tokenizer.decode(new, skip_special_tokens=True) for new in (first, second)]


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    settings, seen = settings_for(samples=1), list[int]()
    first = rows_of(settings, tmp_path)
    again = rows_of(settings, tmp_path, on_rows=lambda done, total, task: seen.append(done))
    assert [row.key for row in again] == [row.key for row in first]
    assert seen == [len(first)]
    with pytest.raises(ResultsError, match="samples"):
        rows_of(dataclasses.replace(settings, samples=2), tmp_path)


def test_a_row_that_is_missing_is_filled_in(tmp_path: Path) -> None:
    settings = settings_for(samples=2)
    whole = rows_of(settings, tmp_path)
    log = tmp_path / "rows.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(line for at, line in enumerate(lines) if at not in (3, 9, 17)) + lines[3][:40])
    filled = rows_of(settings, tmp_path)
    assert {row.key for row in filled} == {row.key for row in whole}
    assert len(filled) == len(whole)
    by_key = {row.key: row for row in whole}
    for row in filled:
        assert row.prediction == by_key[row.key].prediction
        assert row.fidelity.kl == pytest.approx(by_key[row.key].fidelity.kl, abs=1e-9)


KILLED = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[3])
    from bench.test_bench import settings_for, rows_of
    rows_of(settings_for(sys.argv[1], samples=6), Path(sys.argv[2]))
"""


def test_a_killed_run_goes_on_and_counts_nothing_twice(folder: Path, tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(tmp_path), tests]
    process = subprocess.Popen(command)
    log = tmp_path / "rows.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (log.exists() and log.read_bytes().count(b"\n") >= 10):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = log.read_bytes().count(b"\n")
    rows = rows_of(settings_for(folder, samples=6), tmp_path)
    assert there < len(rows) == 6 * 2 * 7
    assert len({row.key for row in rows}) == len(rows)


def test_processes_give_the_same_rows(folder: Path, tmp_path: Path) -> None:
    _same_rows(folder, tmp_path, "processes")


def test_ray_gives_the_same_rows(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real cluster of two workers on this machine."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    _same_rows(folder, tmp_path, "ray")


def _same_rows(folder: Path, tmp_path: Path, executor: str) -> None:
    settings = settings_for(folder, samples=3, protocols=("query-agnostic",))
    alone = {row.key: row for row in rows_of(settings, tmp_path / "serial")}
    shared = rows_of(settings, tmp_path / executor, executor=executor, workers=2)
    assert {row.key for row in shared} == set(alone)
    assert len(shared) == len(alone)
    for row in shared:
        assert row.prediction == alone[row.key].prediction
        assert row.memory == alone[row.key].memory


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for changes in ({"policies": ()}, {"tasks": ()}, {"budgets": ()}, {"samples": 0}):
        with pytest.raises(ResultsError):
            settings_for(**changes)
    with pytest.raises(ResultsError, match="did you mean 'serial'"):
        rows_of(settings_for(samples=1), tmp_path / "a", executor="seria")
    with pytest.raises(TaskError, match="chat template"):
        rows_of(settings_for(samples=1, lengths=(4,)), tmp_path / "b")


def test_answers_may_end_with_their_line() -> None:
    model, tokenizer = fake_model()
    worker = Worker(settings_for(stop_at_line=True), (model, tokenizer))
    breaks = tokenizer("\n", add_special_tokens=False)["input_ids"]
    word = tokenizer("red", add_special_tokens=False)["input_ids"]
    ends = worker._measurer._is_line
    assert not ends(0, breaks)
    assert not ends(0, word)
    colon = tokenizer(":", add_special_tokens=False)["input_ids"]
    assert not ends(0, colon + breaks)  # ":\n" begins an answer
    assert ends(0, word + breaks)
    assert ends(0, breaks + word + breaks)
