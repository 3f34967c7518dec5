"""The process in which programs run: started by `sandbox`, isolated, and kept apart from what it runs.

It reads one job (contexts and programs), isolates itself, and then starts a process of its own for each pass of each
program, see `sandbox_candidate`: a pass asks the program about all contexts. Programs cannot meet each other this way,
nor leave anything behind. Two passes are made, the second one backwards: a program that answers from memory, from a
counter or from chance answers differently then.

Standard output and error are no channel: what is printed is counted, and cut. Like `context` and `program` this file
needs numpy alone.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

# What numpy loads only when it is first used; later there is nothing to load it from.
import numpy.fft
import numpy.lib.stride_tricks
import numpy.linalg
import numpy.ma  # noqa: F401

from kvkeep.evolve import isolation as kernel
from kvkeep.evolve.context import SCALARS
from kvkeep.evolve.program import Program
from kvkeep.evolve.sandbox_candidate import RAISED_REASONS, CandidateProcess
from kvkeep.evolve.sandbox_messages import (
    ANSWER,
    ANSWERED,
    BEGIN,
    DONE,
    END,
    ENDED,
    FAILED,
    HEADER,
    INNER,
    INNER_ANSWER,
    LOADED,
    RAISED,
    READY,
    STOP,
    Contexts,
    Verdict,
    longest_answer,
    pack_answer,
    read_job,
    write,
)

_PRINTED_KEPT = 2048  # bytes of what a program prints that are shown to whoever changes it next


def main(results: int, job: int, isolation: str) -> None:
    """Run the programs of a job, and tell about it.

    Args:
        results: descriptor of the pipe to the searching process.
        job: descriptor of the file with the job.
        isolation: one of `isolation.ISOLATIONS`, or `none`.
    """
    sys.path.clear()  # nothing is imported from here on that is not there already
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace hears only what it listens to
    warnings.simplefilter("ignore")
    told, contexts = read_job(job)
    os.close(job)
    # New descriptors get the lowest free numbers: none will be as high.
    told["limits"]["descriptors"] = max(results, job) + 64
    told["limits"]["address_bytes"] = kernel.address_space() + told["limits"]["memory_bytes"]
    try:
        isolate(isolation)
    except OSError as error:
        _send(results, FAILED, 0, str(error).encode())
        return
    _send(results, READY, 0, b"")
    stopped: set[int] = set()
    own_limits = kernel.all_limits()
    for number, (name, source) in enumerate(told["programs"]):
        _send(results, BEGIN, number, b"")
        verdict = _judge(Program(source, name), number, contexts, told, isolation, results, stopped)
        if kernel.all_limits() != own_limits:
            # Processes of one user may change each other's limits, which the next program would inherit. Ending here
            # puts the blame on this one, and the others get a new process.
            sys.exit("a program has changed the limits of the process that watches it")
        _send(results, END, number, verdict.to_bytes())
    _send(results, DONE, 0, b"")


def isolate(isolation: str) -> None:
    """Isolate this process as far as that does not hinder its work, and see that it holds.

    Raises:
        OSError: it cannot be had, or does not hold.
    """
    if isolation == kernel.NONE:
        kernel.become_subreaper()
        return
    if isolation.startswith("namespaces"):
        kernel.enter_namespaces()
        if os.getpid() != 1 or os.listdir("/"):
            raise OSError("the namespaces do not hide the file system or other processes")
    else:
        kernel.give_up_rights()
    if "seccomp" in isolation:
        _try(kernel.filter_calls, lambda: os.open("/", os.O_RDONLY), "the kernel gives no filter of system calls")
    else:
        _try(lambda: kernel.limit_processes(0), os.fork, "the kernel does not count the processes of this user")


def _try(isolate_more: Callable[[], object], forbidden: Callable[[], object], complaint: str) -> None:
    """See in a child that what every program's process will do to itself can be done, and that it holds."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            isolate_more()
            forbidden()
        except (PermissionError, BlockingIOError):
            code = 0
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise OSError(complaint)


def _judge(
    program: Program,
    number: int,
    contexts: Contexts,
    told: dict[str, Any],
    isolation: str,
    results: int,
    stopped: set[int],
) -> Verdict:
    """Both passes of a program."""
    count, seconds, printed = told["contexts"], 0.0, ""
    for repeat, order in enumerate((range(count), range(count)[::-1])):

        def forward(payload: bytes, place: int, repeat: int = repeat, order: Sequence[int] = order) -> None:
            _send(results, ANSWER, number, pack_answer(repeat, order[place], payload))

        verdict = _Pass(program, number, contexts, order, told, isolation, stopped).run(forward)
        seconds += verdict.seconds
        printed = printed or verdict.printed
        if verdict.reason is not None:
            break
    return verdict._replace(seconds=seconds, printed=printed)


class _Pass:
    """A program's process, and the watch over it."""

    def __init__(
        self,
        program: Program,
        number: int,
        contexts: Contexts,
        order: Sequence[int],
        told: dict[str, Any],
        isolation: str,
        stopped: set[int],
    ) -> None:
        self.number, self.contexts, self.order = number, contexts, order
        self.limits, self.stopped = told["limits"], stopped
        self.most = longest_answer(contexts.scalars[:, SCALARS.index("L")].tolist())
        filtered = "seccomp" in isolation
        self.candidate = CandidateProcess(
            program, bare=told["bare"], limits=self.limits, filtered=filtered, most=self.most
        )
        self.received, self.printed = bytearray(), bytearray()
        self.printed_bytes = self.answers = 0
        self.ended = False
        self.verdict: tuple[str, str] | None = None

    def run(self, forward: Callable[[bytes, int], None]) -> Verdict:
        """Start the process, hand on what it answers, and leave nothing of it."""
        answers, answers_in = os.pipe()
        prints, prints_in = os.pipe()
        started, own = time.monotonic(), os.getpid()
        child = os.fork()
        if child == 0:
            try:
                self.candidate.run(self.contexts, self.order, answers_in, prints_in, own)
            finally:
                os._exit(1)
        os.close(answers_in)
        os.close(prints_in)
        try:
            self._watch(child, answers, prints, forward, started)
            exitcode = self._exit_of(child)
        finally:
            kernel.kill_others(child)
            os.close(answers)
            os.close(prints)
        if self.verdict is None and not (self.ended and self.answers == len(self.order)):
            self.verdict = _death(exitcode)
        reason, message = self.verdict or (None, "")
        printed = bytes(self.printed).decode(errors="replace")
        return Verdict(reason, message, time.monotonic() - started, printed)

    def _watch(
        self, child: int, answers: int, prints: int, forward: Callable[[bytes, int], None], started: float
    ) -> None:
        poll = select.poll()
        for descriptor in (0, answers, prints):
            poll.register(descriptor, select.POLLIN)
        last = started
        while self.verdict is None and not self.ended:
            left = min(last + self.limits["seconds"], started + self.limits["total_seconds"]) - time.monotonic()
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, left) * 1000)]
            if not ready:
                which = "one call" if time.monotonic() - last >= self.limits["seconds"] else "all calls"
                self.verdict = ("timeout", f"too much time for {which}, after {self.answers} answers")
            if 0 in ready:
                self._hear(child)
            if prints in ready and not self._count(os.read(prints, 1 << 16)):
                poll.unregister(prints)
            if answers in ready:
                data = os.read(answers, 1 << 20)
                if not data:
                    break
                self.received += data
                if self._take(forward):
                    last = time.monotonic()
        # What was printed before the last message is there by now; who else holds these pipes is not waited for.
        poll.unregister(answers)
        poll.unregister(0)
        for descriptor, _ in poll.poll(0):
            self._count(os.read(descriptor, 1 << 16))

    def _hear(self, child: int) -> None:
        """A request to stop, or the end of whoever makes them."""
        data = os.read(0, 1 << 12)
        if not data:
            kernel.kill_others(child)
            os._exit(0)
        self.stopped.update(number for (number,) in STOP.iter_unpack(data[: len(data) // STOP.size * STOP.size]))
        if self.number in self.stopped:
            self.verdict = ("crash", "stopped")  # the one who asked knows better why

    def _count(self, data: bytes) -> int:
        self.printed_bytes += len(data)
        self.printed += data[: _PRINTED_KEPT - len(self.printed)]
        if self.printed_bytes > self.limits["output_bytes"]:
            self.verdict = ("output", f"more than {self.limits['output_bytes']} bytes printed")
        return len(data)

    def _take(self, forward: Callable[[bytes, int], None]) -> bool:
        """Whole messages of the program's process; whether there were any."""
        any_whole = False
        while self.verdict is None and len(self.received) >= INNER.size:
            kind, length = INNER.unpack_from(self.received)
            if length > self.most:
                self.verdict = ("output", f"an answer of {length} bytes")
                return True
            whole = INNER.size + length
            if len(self.received) < whole:
                break
            payload = bytes(self.received[INNER.size : whole])
            del self.received[:whole]
            any_whole = True
            if kind == ANSWERED and length >= INNER_ANSWER.size and self.answers < len(self.order):
                forward(payload, self.answers)
                self.answers += 1
            elif kind == ENDED:
                self.ended = True
            elif kind == RAISED:
                reason, _, message = payload.decode(errors="replace").partition("\n")
                self.verdict = (reason if reason in RAISED_REASONS else "crash", message)
            elif kind != LOADED:
                self.verdict = ("crash", "a message that no program sends")
        return any_whole

    def _exit_of(self, child: int) -> int | None:
        """The exit code of a process that has closed its pipe; None where it goes on, or has to be killed."""
        until = time.monotonic() + (1.0 if self.verdict is None else 0.0)
        while True:
            # Left to be reaped later: until then nobody else can get its number.
            found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if time.monotonic() >= until:
                return None
            time.sleep(0.001)


def _death(exitcode: int | None) -> tuple[str, str]:
    """Why a process has not answered to the end."""
    if exitcode is None:
        return "crash", "stopped answering"
    if exitcode >= 0:
        return "crash", f"exit with code {exitcode}"
    if -exitcode in (signal.SIGXCPU, signal.SIGKILL):
        return "timeout", "too much processor time"
    return "crash", f"killed by {signal.Signals(-exitcode).name}"


def _send(descriptor: int, kind: int, number: int, payload: bytes) -> None:
    write(descriptor, HEADER.pack(kind, number, len(payload)) + payload)
