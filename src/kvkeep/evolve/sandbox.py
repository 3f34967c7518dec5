"""Runs programs that nobody has read: in a process of their own, isolated, limited, and never believed.

    with Sandbox() as sandbox:
        for outcome in sandbox.run(programs, contexts):
            print(outcome.name, outcome.refusal or outcome.selections)

A batch of programs shares one start and one copy of the contexts; each program has processes of its own in it, see
`sandbox_worker`. A program that crashes, hangs or ends its process is refused, and the others of the batch go on.
"""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.evolve import isolation as kernel
from kvkeep.evolve import sandbox_messages as wire
from kvkeep.evolve.context import PrefillContext
from kvkeep.evolve.guard import REASONS, PolicyRefused, check_scores, check_selection, check_source
from kvkeep.evolve.program import Program
from kvkeep.evolve.sandbox_process import Batch, Limits, SandboxError, narrowest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        name: of the program.
        selections: for each context the positions that stay, ascending; None for a program that is refused.
        refusal: why it is refused, or None.
        seconds: of wall clock that its two passes took.
        printed: the beginning of what it printed.
        isolation: in which isolation it ran; empty for one that was refused by its text.
    """

    name: str
    selections: tuple[NDArray[np.int64], ...] | None
    refusal: PolicyRefused | None
    seconds: float = 0.0
    printed: str = ""
    isolation: str = ""


class Sandbox:
    """Runs batches of programs.

    Args:
        limits: for each program.
        unsafe: run also where the kernel offers no isolation: with limits and a process group only. A program can then
            read the user's files.
        isolation: one of `isolation.ISOLATIONS`; None for the narrowest that can be had here.

    Raises:
        SandboxError: no isolation can be had, or not this one.
    """

    def __init__(self, limits: Limits | None = None, unsafe: bool = False, isolation: str | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        known = (*kernel.ISOLATIONS, *((kernel.NONE,) if unsafe else ()))
        if isolation is not None and isolation not in known:
            raise SandboxError(
                expected=f"an isolation, one of {', '.join(known)}",
                received=repr(isolation),
                remedy="or none for the best",
            )
        self.isolation = isolation or narrowest(unsafe)
        self._running: Batch | None = None
        self._closed = False
        log = _log.warning if self.isolation == kernel.NONE else _log.info
        log("programs run in isolation: %s", self.isolation)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Run nothing any more, and end what runs in another thread, which then gets a `SandboxError`."""
        self._closed = True
        if self._running is not None:
            self._running.interrupt()

    def run(
        self, programs: Sequence[Program], contexts: Sequence[PrefillContext], checked_source: bool = True
    ) -> list[Outcome]:
        """What each program keeps of each context.

        Each program is asked twice about every context, the second time in reverse order and in another process, and
        must answer the same to the last bit. Scores and selections are checked here, outside of the sandbox.

        Args:
            programs: the candidates; each has its own outcome.
            contexts: what they are asked about, sent once for the batch.
            checked_source: refuse by their text those that `check_source` refuses, and give the others only the names
                that they may use. False runs all, with all of Python's names: the rest of the guards must do.

        Returns:
            An outcome for each program, in their order.

        Raises:
            SandboxError: the sandbox itself does not work, or has been closed.
        """
        tallies = [_Tally(program, contexts, self.isolation) for program in programs]
        for tally in tallies if checked_source else ():
            tally.try_to(partial(check_source, tally.program.source))
        fruitless = 0
        while waiting := [tally for tally in tallies if not tally.done]:
            before = len(waiting)
            if not self._closed:
                self._run_batch(waiting, contexts, checked_source)
            if self._closed:
                raise SandboxError(
                    expected="an open sandbox",
                    received="one that was closed",
                    remedy="make another one to run programs",
                )
            fruitless = fruitless + 1 if sum(not tally.done for tally in tallies) == before else 0
            if fruitless == 3:
                raise SandboxError(
                    expected="a process that runs programs",
                    received="one that ends without a word, three times",
                    remedy="see the log; it may lack memory",
                )
        return [tally.outcome() for tally in tallies]

    def _run_batch(self, tallies: Sequence[_Tally], contexts: Sequence[PrefillContext], bare: bool) -> None:
        """Run programs until the last one, or until one of them takes the whole process down."""
        current: _Tally | None = None
        batch = Batch([tally.program for tally in tallies], contexts, self.limits, self.isolation, bare)
        self._running = batch
        with batch:
            for kind, number, payload in batch.messages():
                tally = tallies[number]
                if kind == wire.BEGIN:
                    current = tally
                elif kind == wire.ANSWER and not tally.refused:
                    tally.take(payload)
                    if tally.refused:
                        batch.stop(number)
                elif kind == wire.END:
                    tally.end(wire.Verdict.from_bytes(payload))
                    current = None
            if current is not None:  # it began, and never ended
                current.end(wire.Verdict("crash", batch.epitaph(), batch.age(), ""))


class _Tally:
    """What is known of a program while a batch runs."""

    def __init__(self, program: Program, contexts: Sequence[PrefillContext], isolation: str) -> None:
        self.program, self._contexts, self._isolation = program, contexts, isolation
        self._chunk = program.chunk  # read off the text, which takes longer than to check an answer
        self.done = False
        self._refusal: PolicyRefused | None = None
        self._answers: dict[int, wire.Answer] = {}
        self._repeated: set[int] = set()
        self._selections: dict[int, NDArray[np.int64]] = {}
        self._seconds, self._printed, self._ran = 0.0, "", False

    @property
    def refused(self) -> bool:
        """Whether a guard has refused it already."""
        return self._refusal is not None

    def try_to(self, check: Callable[[], object]) -> None:
        """Run a check; a refusal ends the matter."""
        try:
            check()
        except PolicyRefused as refusal:
            self._refusal = refusal
            self.done = True

    def take(self, payload: bytes) -> None:
        """An answer: kept from the first pass, compared in the second."""
        try:
            answer = wire.Answer.from_bytes(payload)
            context = self._contexts[answer.context]
            if answer.repeat == 0:
                self._answers[answer.context] = answer
                self._selections[answer.context] = self._check(context, answer)
            elif self._answers.get(answer.context) == answer._replace(repeat=0):
                self._repeated.add(answer.context)
            else:
                raise PolicyRefused(
                    "nondeterministic",
                    "invariant",
                    expected="the same answer whenever the same context is asked about",
                    received=f"another one the second time, for context {answer.context}, asked about in reverse order",
                    remedy="depend on the context alone: on no earlier call, no chance, no clock",
                )
        except PolicyRefused as refusal:
            self._refusal = refusal
        except (IndexError, struct.error) as error:
            self._refusal = _no_answer("crash", f"a message that is no answer: {error}")

    def end(self, verdict: wire.Verdict) -> None:
        """The program has ended, by itself or not."""
        self.done = self._ran = True
        self._seconds, self._printed = verdict.seconds, verdict.printed
        whole = len(self._repeated) == len(self._contexts)
        if self._refusal is None and (verdict.reason is not None or not whole):
            reason = verdict.reason if verdict.reason in REASONS else "crash"
            self._refusal = _no_answer(str(reason), verdict.message or "an end before the last answer")

    def outcome(self) -> Outcome:
        """All of it."""
        kept = None
        if self._refusal is None:
            kept = tuple(self._selections[index] for index in range(len(self._contexts)))
        where = self._isolation if self._ran else ""
        return Outcome(self.program.name, kept, self._refusal, self._seconds, self._printed, where)

    def _check(self, context: PrefillContext, answer: wire.Answer) -> NDArray[np.int64]:
        check_scores(_load(answer.scores), context)
        return check_selection(_load(answer.indices), context, chunk=self._chunk)


def _no_answer(reason: str, received: str) -> PolicyRefused:
    return PolicyRefused(
        reason,
        "invariant" if reason in ("dtype", "shape", "missing") else "sandbox",
        expected="a program that answers for every context, within its limits",
        received=received,
        remedy=_REMEDIES.get(reason, "see what it raised"),
    )


_REMEDIES = {
    "timeout": "do less, and let numpy loop",
    "memory": "make no array larger than a few times L",
    "mutation": "copy what is to be changed: `np.array(context.position)`",
    "output": "print nothing",
    "missing": "define score_tokens(context) and select_tokens_to_keep(scores, context)",
    "dtype": "return arrays of numbers",
    "shape": "return one score for each position, and at most K indices",
}


def _load(data: bytes) -> NDArray[Any]:
    """An array that came from a program, in numpy's format, over the bytes themselves; objects are refused.

    `numpy.load` reads each header as Python, which takes longer than to check an answer: here equal ones are read once.
    """
    try:
        start = _HEADER_START + int.from_bytes(data[_HEADER_START - 2 : _HEADER_START], "little")
        shape, fortran, dtype = _header(data[:start])
        if dtype.hasobject:
            raise ValueError(f"an array of {dtype}")
        return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # whatever a forged message may bring about
        raise PolicyRefused(
            "dtype",
            "invariant",
            expected="an array of numbers",
            received=f"{type(error).__name__}: {error}"[:200],
            remedy="return arrays of numbers",
        ) from None


_HEADER_START = 10  # numpy's format, version 1: six bytes of magic, two of version, two of the length of what follows


@lru_cache(maxsize=256)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array, from the beginning of its file."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("another version of numpy's format")
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = np.lib.format.read_array_header_1_0(stream)
    return found
