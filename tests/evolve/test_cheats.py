"""Known cheats, each a program in `cheats/`: which guard stops it, and which one does if the text is not looked at.

Every cheat runs twice over: as a search would run it, and without the check of its text and with all of Python's names,
under each isolation that can be had. What only a look at the text stops would be no sandbox.
"""

from __future__ import annotations

import socket
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvkeep.evolve.canaries import Canaries
from kvkeep.evolve.context import PrefillContext
from kvkeep.evolve.guard import PolicyRefused
from kvkeep.evolve.isolation import ISOLATIONS, NONE
from kvkeep.evolve.program import Program, read_program, seed_program
from kvkeep.evolve.sandbox import Limits, Outcome, Sandbox, SandboxError

from .mutators.contexts import observed

FOLDER = Path(__file__).parent / "cheats"

COUNT, CRASH, TIMEOUT = ("invariant", "count"), ("sandbox", "crash"), ("sandbox", "timeout")
ANSWER_TYPE, CHANCE = ("invariant", "dtype"), ("invariant", "nondeterministic")

# Which layer stops a cheat, and its reason: with the check of its text, and without.
CHEATS: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "boolean_mask": (ANSWER_TYPE, ANSWER_TYPE),
    "chunk_excuse": (COUNT, COUNT),
    "counts_calls": (("syntax", "state"), CHANCE),
    "daemon": (("syntax", "import"), CRASH),
    "duplicates": (("invariant", "duplicate"),) * 2,
    "escapes_by_classes": (("syntax", "attribute"), CRASH),
    "exits": (("syntax", "import"), CRASH),
    "float_indices": (ANSWER_TYPE, ANSWER_TYPE),
    "forges_answers": (("syntax", "import"), COUNT),
    "forges_rubbish": (("syntax", "import"), ("sandbox", "output")),
    "fork_bomb": (("syntax", "import"), CRASH),
    "huge_answer": (("invariant", "shape"),) * 2,
    "imports_evaluator": (("syntax", "import"), CRASH),
    "imports_torch": (("syntax", "import"), CRASH),
    "keep_everything": (COUNT, COUNT),
    "kills_parent": (("syntax", "import"), COUNT),
    "lists_folders": (("syntax", "import"), CRASH),
    "lucky_first_stage": (TIMEOUT, TIMEOUT),
    "memory_bomb": (("sandbox", "memory"),) * 2,
    "nan_scores": (("invariant", "nonfinite"),) * 2,
    "negative_indices": (("invariant", "range"),) * 2,
    "one_large_array": (("sandbox", "memory"),) * 2,
    "one_too_many": (COUNT, COUNT),
    "out_of_range": (("invariant", "range"),) * 2,
    "patches_frames": (("syntax", "import"), COUNT),
    "patches_modules": (("syntax", "import"), COUNT),
    "patches_numpy": (("syntax", "attribute"), COUNT),
    "pickled_objects": (("syntax", "state"), ANSWER_TYPE),
    "pokes_context": (("syntax", "import"), CRASH),
    "position_keyed": (("canary", "position-keyed"),) * 2,
    "prints_gigabytes": (("syntax", "name"), ("sandbox", "output")),
    "raises": (("syntax", "state"), CRASH),
    "raises_budget": (("syntax", "attribute"), COUNT),
    "random_choice": (("syntax", "import"), CHANCE),
    "reads_environment": (("syntax", "import"), CRASH),
    "reads_files": (("syntax", "syntax"), CRASH),
    "remembers": (("syntax", "state"), CHANCE),
    "score_matrix": (("invariant", "shape"),) * 2,
    "segfault": (("syntax", "import"), CRASH),
    "sleeps": (("syntax", "import"), TIMEOUT),
    "socket": (("syntax", "import"), CRASH),
    "spins": (TIMEOUT, TIMEOUT),
    "starves_parent": (("syntax", "import"), COUNT),
    "stuck_in_numpy": (TIMEOUT, TIMEOUT),
    "threads": (("syntax", "import"), CRASH),
    "unlocks_context": (("syntax", "attribute"), ("sandbox", "mutation")),
    "wraps_around": (("invariant", "range"),) * 2,
    "writes_context": (("sandbox", "mutation"),) * 2,
    "writes_files": (("syntax", "syntax"), CRASH),
}

# Those that run into a limit, which is set low for them; the others have more time than they need.
SLOW = {"lucky_first_stage", "sleeps", "spins", "stuck_in_numpy"}
USUAL = Limits(memory_bytes=1 << 28)
LOW = Limits(seconds=1.0, cpu_seconds=1)

HONEST = seed_program("frc")


class Listener:
    """A port on this machine, and who came."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]

    def visits(self) -> int:
        count = 0
        while True:
            try:
                self._socket.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def listener():
    found = Listener()
    yield found
    found.close()


@cache
def contexts() -> tuple[PrefillContext, ...]:
    """Four layers, so that a program that changes its mind has when to."""
    made = []
    for layer in range(4):
        arrays = observed(layer, length=150, budget=40).to_arrays()
        made.append(PrefillContext.from_arrays(arrays | {"layer": np.array(layer)}))
    return tuple(made)


@cache
def narrowest() -> str:
    try:
        return Sandbox().isolation
    except SandboxError as error:
        pytest.skip(f"no sandbox here: {error.received}")


@cache
def cheat(name: str, port: int = 0) -> Program:
    program = read_program(FOLDER / f"{name}.py")
    return program.with_block(program.block.replace("PORT = 0", f"PORT = {port}"))


def run_all(isolation: str | None, listener: Listener, *, checked: bool) -> dict[str, Outcome]:
    """All cheats, and an honest program at the end of each batch that must not have noticed."""
    found: dict[str, Outcome] = {}
    for slow, limits in ((False, USUAL), (True, LOW)):
        names = [name for name in CHEATS if (name in SLOW) is slow]
        with Sandbox(limits, isolation=isolation) as sandbox:
            programs = [cheat(name, listener.port) for name in names]
            outcomes = sandbox.run([*programs, HONEST], contexts(), checked_source=checked)
            if not slow:
                assert outcomes[-1].refusal is None, outcomes[-1].refusal
                expected = [HONEST.functions() for _ in contexts()]
                for context, functions, kept in zip(contexts(), expected, outcomes[-1].selections, strict=True):
                    alone = functions.select_tokens_to_keep(functions.score_tokens(context), context)
                    np.testing.assert_array_equal(kept, alone)
        found |= dict(zip(names, outcomes, strict=False))
    return found


@pytest.fixture(scope="module")
def checked(listener):
    narrowest()
    return run_all(None, listener, checked=True)


@pytest.fixture(scope="module", params=ISOLATIONS)
def unchecked(request, listener):
    narrowest()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SECRET_OF_THE_PARENT", "a key")
            return run_all(request.param, listener, checked=False)
    except SandboxError as error:
        pytest.skip(f"{request.param} cannot be had here: {error.received}")


def refusal_of(name: str, outcome: Outcome) -> PolicyRefused | None:
    """Of the run, or of the canaries that a cheat of positions goes on to."""
    if CHEATS[name][0][0] != "canary":
        return outcome.refusal
    assert outcome.refusal is None
    return position_keyed_refusal()


@cache
def position_keyed_refusal() -> PolicyRefused | None:
    with Sandbox() as sandbox:
        bad, good = Canaries.of(contexts()).run(sandbox, [cheat("position_keyed"), HONEST])
    assert good.refusal is None
    assert bad.selections is None
    return bad.refusal


def test_every_cheat_is_tried():
    assert set(CHEATS) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_stopped_by_the_layer_that_is_there_for_it(name, checked):
    refusal = refusal_of(name, checked[name])
    assert refusal is not None
    assert (refusal.layer, refusal.reason) == CHEATS[name][0], refusal
    if refusal.layer != "canary":
        assert checked[name].selections is None


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_stopped_without_a_look_at_its_text(name, unchecked, listener):
    refusal = refusal_of(name, unchecked[name])
    assert refusal is not None
    assert (refusal.layer, refusal.reason) == CHEATS[name][1], refusal
    if refusal.layer != "canary":
        assert unchecked[name].selections is None
    assert listener.visits() == 0
    assert not Path("/tmp/notes-of-a-program").exists()


def test_what_a_program_has_started_ends_with_it():
    """Here it may start processes: one goes into a session of its own, and its parent ends."""
    narrowest()
    seen: set[psutil.Process] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.update(psutil.Process().children(recursive=True))
            time.sleep(0.01)

    before = set(psutil.Process().children(recursive=True))
    watch = threading.Thread(target=look)
    watch.start()
    try:
        # The kernel counts all processes of a user, wherever they run.
        with Sandbox(Limits(processes=2000), isolation="namespaces") as sandbox:
            [outcome] = sandbox.run([cheat("daemon")], contexts(), checked_source=False)
    except SandboxError as error:
        pytest.skip(f"namespaces cannot be had here: {error.received}")
    finally:
        over.set()
        watch.join()
    assert outcome.refusal is None, "the daemon could not be started, so that nothing is shown"
    assert len(seen - before) >= 4  # the two of the sandbox, the program, its daemon
    assert not psutil.wait_procs(seen - before, timeout=10)[1]


def test_without_isolation_a_program_can_end_its_process_but_no_other_program():
    with Sandbox(unsafe=True, isolation=NONE) as sandbox:
        programs = [cheat("kills_parent"), cheat("starves_parent"), cheat("exits"), HONEST]
        *cheats, honest = sandbox.run(programs, contexts(), checked_source=False)
    assert all(outcome.refusal is not None for outcome in cheats)
    assert honest.refusal is None
    assert honest.isolation == NONE
