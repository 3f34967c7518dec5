"""The sandbox: what comes out is what the program gives in this process, and nothing outlives it. See test_cheats."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.evolve import isolation as kernel
from kvkeep.evolve import sandbox_messages as wire
from kvkeep.evolve import sandbox_process
from kvkeep.evolve.context import FEATURES, SCALARS, PrefillContext
from kvkeep.evolve.program import SEEDS, Program, seed_program
from kvkeep.evolve.sandbox import Limits, Sandbox, SandboxError
from kvkeep.evolve.sandbox_messages import pack_job, read_job
from kvkeep.evolve.vocabulary import NUMPY

from .mutators.contexts import all_kinds, observed


@cache
def narrowest() -> str:
    try:
        return Sandbox().isolation
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error.received}")


@pytest.fixture
def sandbox():
    narrowest()
    with Sandbox() as found:
        yield found


def program(block: str, name: str = "program") -> Program:
    return Program(f"# EVOLVE-BLOCK-START\n{textwrap.dedent(block)}\n# EVOLVE-BLOCK-END\n", name)


def by(expression: str) -> Program:
    """Scores by an expression, top K."""
    return program(
        f"""
        def score_tokens(context):
            return {expression}


        def select_tokens_to_keep(scores, context):
            return np.argsort(-scores, kind="stable")[: context.K]
        """
    )


def here(chosen: Program, context: PrefillContext) -> np.ndarray:
    functions = chosen.functions()
    return np.sort(functions.select_tokens_to_keep(functions.score_tokens(context), context))


def test_outcomes_are_what_the_programs_give_here(sandbox):
    programs, contexts = [seed_program(name) for name in SEEDS], all_kinds()
    outcomes = sandbox.run(programs, contexts)
    assert [outcome.name for outcome in outcomes] == list(SEEDS)
    for chosen, outcome in zip(programs, outcomes, strict=True):
        assert outcome.refusal is None
        assert outcome.isolation == sandbox.isolation
        assert outcome.seconds > 0
        for context, kept in zip(contexts, outcome.selections, strict=True):
            np.testing.assert_array_equal(kept, here(chosen, context))
            assert kept.dtype == np.int64


def test_a_program_sees_each_feature_and_scalar_as_it_is(sandbox):
    programs = [by(f"context.{name}") for name in FEATURES]
    programs += [by(f"np.cos(np.arange(context.L) * (1.3 + context.{name}))") for name in SCALARS]
    for chosen, outcome in zip(programs, sandbox.run(programs, all_kinds()), strict=True):
        for context, kept in zip(all_kinds(), outcome.selections, strict=True):
            np.testing.assert_array_equal(kept, here(chosen, context))


@settings(max_examples=25)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_contexts_arrive_as_they_were_sent(shapes, seed):
    random = np.random.default_rng(seed)
    contexts = []
    for length, share in shapes:
        features = {name: random.standard_normal(length) for name in FEATURES}
        scalars = {"L": length, "K": max(1, round(share * length)), "H": 3, "Q": 5, "layer": int(random.integers(99))}
        contexts.append(PrefillContext(**features, **scalars))
    job = sandbox_process._sealed(pack_job(contexts, [seed_program("frc")], {"seconds": 1.5}, bare=True))
    try:
        told, arrived = read_job(job)
    finally:
        os.close(job)
    assert told["programs"] == [["frc", seed_program("frc").source]]
    assert told["limits"] == {"seconds": 1.5}
    for index, context in enumerate(contexts):
        again = arrived[index]
        for name in (*FEATURES, *SCALARS):
            np.testing.assert_array_equal(getattr(again, name), getattr(context, name))
        with pytest.raises(ValueError, match="read-only"):
            again.position[0] = 1
        assert arrived[index] is not again


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no sealed files")
def test_nobody_can_change_the_contexts_of_others():
    job = sandbox_process._sealed(pack_job([observed()], [], {}, bare=True))
    try:
        for change in (lambda: os.pwrite(job, b"x", 0), lambda: os.ftruncate(job, 1)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(job)


def test_everything_that_a_program_may_use_of_numpy_is_there(sandbox):
    """Where no file can be read, what numpy loads on first use cannot be loaded: it must have been before."""
    chosen = program(
        f"""
        NAMES = {sorted(NUMPY)!r}
        X = np.linspace(0.1, 0.9, 6)
        ARGUMENTS = (
            (), (X,), (X, X), (X, 2), (3,), (X, 1, 0), (X, X, X), (np.arange(6), X), ("float32",), ("i,i->i", X, X),
            (X > 0, X, X), ([X > 0], [X]), (X, [X > 0], [1.0]), ((X, X),), (X, 1.0, 2.0), (X, (2, 3)), (2, X, 5),
            (np.eye(3),), (X, np.arange(6), 1), (1, (2, 3)), (np.arange(6), np.arange(6), -1), (np.float32,),
            (X.reshape(2, 3), 1, 0), (X, np.array([0, 2]), X[:2]), (X, np.arange(6), X, 0),
        )


        def score_tokens(context):
            for name in NAMES:
                found = np
                for part in name.split("."):
                    found = getattr(found, part)
                for arguments in ARGUMENTS if callable(found) else ():
                    for options in ({{}}, {{"axis": 0}}, {{"keepdims": True}}, {{"method": "linear"}}):
                        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
                        try:
                            found(*copies, **options)
                        except (ImportError, OSError) as error:
                            raise RuntimeError(name) from error
                        except Exception:
                            pass
            return context.position


        def select_tokens_to_keep(scores, context):
            return np.arange(context.K)
        """
    )
    [outcome] = sandbox.run([chosen], [observed()], checked_source=False)
    assert outcome.refusal is None, outcome.refusal


ODD = {
    "frc": (seed_program("frc"), None),
    "snapkv-like": (seed_program("snapkv-like"), None),
    "leaves": (by("[__import__('os')._exit(3), context.position][1]"), "crash"),
    "falls": (by("[__import__('os').abort(), context.position][1]"), "crash"),
    "many": (program("def score_tokens(context):\n    return context.position * 1.0\n\n\ndef "
                     "select_tokens_to_keep(scores, context):\n    return np.arange(context.L)\n"), "count"),
}  # fmt: skip


@settings(max_examples=6, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(ODD)), min_size=2, max_size=5))
def test_what_becomes_of_a_program_does_not_hang_on_its_neighbours(names):
    with Sandbox(isolation=narrowest()) as sandbox:
        outcomes = sandbox.run([ODD[name][0] for name in names], [observed(0), observed(1)], checked_source=False)
    for name, outcome in zip(names, outcomes, strict=True):
        chosen, reason = ODD[name]
        assert (outcome.refusal and outcome.refusal.reason) == reason
        if reason is None:
            for context, kept in zip([observed(0), observed(1)], outcome.selections, strict=True):
                np.testing.assert_array_equal(kept, here(chosen, context))


def test_who_is_refused_by_the_text_runs_nowhere(sandbox):
    bad, good = sandbox.run([by("open('x')"), seed_program("frc")], [observed()])
    assert (bad.refusal.layer, bad.refusal.reason, bad.isolation, bad.selections) == ("syntax", "name", "", None)
    assert good.refusal is None


def test_an_exception_is_told_with_its_line(sandbox):
    [outcome] = sandbox.run([by("np.zeros(3) + np.ones(4)")], [observed()])
    assert outcome.refusal.reason == "crash"
    assert "could not be broadcast" in outcome.refusal.received
    assert outcome.refusal.received.endswith("in line 4")


def test_a_function_that_is_gone_is_missing(sandbox):
    gone = by("context.position")
    gone = gone.with_block(gone.block + "\ndel score_tokens\n")
    [outcome] = sandbox.run([gone], [observed()], checked_source=False)
    assert outcome.refusal.reason == "missing"


def test_the_beginning_of_what_is_printed_is_kept(sandbox):
    [outcome] = sandbox.run([by("[print('a word'), context.position][1]")], [observed()], checked_source=False)
    assert outcome.refusal is None
    assert outcome.printed == "a word\n"


def test_no_programs_and_no_contexts(sandbox):
    assert sandbox.run([], [observed()]) == []
    [outcome] = sandbox.run([seed_program("frc")], [])
    assert outcome.refusal is None
    assert outcome.selections == ()


def test_limits_are_above_zero():
    with pytest.raises(SandboxError, match="seconds"):
        Limits(seconds=0)
    with pytest.raises(SandboxError, match="processes"):
        Limits(processes=-1)
    with pytest.raises(SandboxError, match="memory_bytes"):
        Limits(memory_bytes=-5)


def test_isolations_are_known_by_name():
    with pytest.raises(SandboxError, match="'jail'"):
        Sandbox(isolation="jail")
    with pytest.raises(SandboxError, match="'none'"):
        Sandbox(isolation=kernel.NONE)  # only with unsafe


def test_where_nothing_isolates_it_refuses_unless_told_otherwise(monkeypatch, caplog):
    monkeypatch.setattr(kernel, "ISOLATIONS", ())
    sandbox_process.narrowest.cache_clear()
    try:
        with pytest.raises(SandboxError, match="--unsafe-no-sandbox"):
            Sandbox()
        with caplog.at_level(logging.WARNING):
            assert Sandbox(unsafe=True).isolation == kernel.NONE
        assert "isolation: none" in caplog.text
    finally:
        sandbox_process.narrowest.cache_clear()


def test_bubblewrap_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="bubblewrap is not installed"):
        Sandbox(isolation="bubblewrap").run([seed_program("frc")], [observed()])


SLEEPER = """
from kvkeep.evolve.program import Program
from kvkeep.evolve.sandbox import Sandbox
from kvkeep.evolve.context import FEATURES, PrefillContext

context = PrefillContext(**{name: [0.0] for name in FEATURES}, L=1, K=1, H=1, Q=1, layer=0)
program = Program('''# EVOLVE-BLOCK-START
import time

def score_tokens(context):
    time.sleep(600)

def select_tokens_to_keep(scores, context):
    return scores
# EVOLVE-BLOCK-END''')
print("ready", flush=True)
Sandbox(isolation=ISOLATION, unsafe=True).run([program], [context], checked_source=False)
"""


def descendants_when(process: psutil.Process, count: int, but: Iterable[Any] = ()) -> set[Any]:
    """The process's descendants, once there are so many; without those that were there before."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = set(process.children(recursive=True)) - set(but)
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError("the sandbox did not start")


@pytest.mark.parametrize("isolation", ["namespaces", "seccomp", kernel.NONE])
def test_when_the_searching_process_is_killed_everything_else_ends(isolation):
    try:
        Sandbox(isolation=isolation, unsafe=True).run([seed_program("frc")], [observed()])
    except SandboxError as error:
        pytest.skip(f"{isolation} cannot be had here: {error.received}")
    source = SLEEPER.replace("ISOLATION", repr(isolation))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        started = descendants_when(psutil.Process(process.pid), 3 if isolation == "namespaces" else 2)
        process.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(started, timeout=20)[1]


messages = st.builds(
    lambda kind, number, payload, lie: wire.HEADER.pack(kind, number, len(payload) + lie) + payload,
    kind=st.integers(0, 7),
    number=st.integers(0, 3),
    payload=st.binary(max_size=40) | st.just(wire.Verdict(None, "", 0.1, "").to_bytes()),
    lie=st.sampled_from([0, 0, 0, 1, 2**31]),
)
READY = wire.HEADER.pack(wire.READY, 0, 0)


@settings(max_examples=25, deadline=None)
@given(said=st.builds(lambda start, rest: start + b"".join(rest), st.sampled_from([b"", READY]), st.lists(messages)))
def test_whatever_the_process_says_no_answer_is_made_up(said):
    """A process in the place of the true one, which an attacker has taken over."""
    with pytest.MonkeyPatch.context() as patch:
        start = f"import os; os.write({{}}, bytes.fromhex({said.hex()!r}))"
        patch.setattr(
            sandbox_process, "_command", lambda results, job, where: [sys.executable, "-ISc", start.format(results)]
        )
        sandbox = Sandbox(unsafe=True, isolation=kernel.NONE)
        programs = [seed_program("frc"), seed_program("random")]
        try:
            outcomes = sandbox.run(programs, [observed()])
        except SandboxError:
            return
    assert all(outcome.refusal is not None and outcome.selections is None for outcome in outcomes)


@pytest.mark.parametrize("isolation", ["namespaces", kernel.NONE])
def test_closing_ends_what_runs_in_another_thread(isolation):
    sleeper = by("[__import__('time').sleep(600), context.position][1]")
    sandbox = Sandbox(isolation=isolation, unsafe=True)
    errors: list[SandboxError] = []

    def run() -> None:
        try:
            sandbox.run([sleeper], [observed()], checked_source=False)
        except SandboxError as error:
            errors.append(error)

    before = psutil.Process().children(recursive=True)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        started = descendants_when(psutil.Process(), 3 if isolation == "namespaces" else 2, before)
    finally:
        sandbox.close()
        thread.join(timeout=60)
    assert not thread.is_alive()
    assert not psutil.wait_procs(started, timeout=20)[1]
    assert "closed" in errors[0].received
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run([seed_program("frc")], [observed()])
