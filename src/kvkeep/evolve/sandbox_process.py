"""Starts the process in which programs run, listens to it, and ends it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np

import kvkeep
from kvkeep.errors import KvkeepError
from kvkeep.evolve import isolation as kernel
from kvkeep.evolve import sandbox_messages as wire
from kvkeep.evolve.context import PrefillContext
from kvkeep.evolve.program import Program

# How long a batch's process may take to start, and to say anything beyond what its programs are allowed.
_START_SECONDS = 120.0
_GRACE_SECONDS = 30.0

# Of the environment, all that the process is given: where libraries lie, and how linear algebra is computed.
_PASSED_ON = ("LD_LIBRARY_PATH", "OPENBLAS_CORETYPE")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class SandboxError(KvkeepError):
    """A sandbox that cannot be had here, or that does not work; no program is to blame."""


@dataclass(frozen=True)
class Limits:
    """What a program may use. Every limit ends in a refusal, never in a partial score.

    Attributes:
        seconds: of wall clock, for one call (scores and selection of one context), and for loading the program.
        total_seconds: of wall clock, for one pass over all contexts.
        cpu_seconds: of processor time, for one pass.
        memory_bytes: of address space, beyond what Python, numpy and the contexts take.
        output_bytes: printed, for one pass.
        open_files: at once.
        processes: that its user may have, where the kernel counts them; 0: a program can start none, and no threads.
    """

    seconds: float = 20.0
    total_seconds: float = 300.0
    cpu_seconds: int = 20
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 16
    open_files: int = 16
    processes: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), 0 if item.name == "processes" else 1e-3
            if not value >= least:
                raise SandboxError(
                    expected=f"{item.name} of at least {least}",
                    received=f"{value}",
                    remedy="the defaults suit programs that look at some thousand positions",
                )


class Batch:
    """A process that runs programs, seen from outside."""

    def __init__(
        self,
        programs: Sequence[Program],
        contexts: Sequence[PrefillContext],
        limits: Limits,
        isolation: str,
        bare: bool,
    ) -> None:
        self._limits, self._started = limits, time.monotonic()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed when the process is
        self._end, self._isolation, self._programs = "", isolation, len(programs)
        # A verdict is a message, too, with what was printed in it.
        self._longest = max(1 << 16, wire.longest_answer(context.L for context in contexts) + wire.HEADER.size)
        job = _sealed(wire.pack_job(contexts, programs, asdict(limits), bare=bare))
        self._results, results_in = os.pipe()
        lifeline_out, lifeline = os.pipe()
        self._lifeline: int | None = lifeline
        self._lock = threading.Lock()  # of the lifeline, which another thread may cut
        try:
            self._process = subprocess.Popen(
                _command(results_in, job, isolation),
                stdin=lifeline_out,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env=_ONE_THREAD | {name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                pass_fds=(results_in, job),
                cwd="/",
                start_new_session=True,  # a group of its own, so that all of it can be killed
            )
        except BaseException:
            os.close(self._results)
            os.close(lifeline)
            self._said.close()
            raise
        finally:
            os.close(lifeline_out)
            os.close(results_in)
            os.close(job)

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._said.close()

    def messages(self) -> Iterator[tuple[int, int, bytes]]:
        """What the process tells, until it is done, ends, or is silent for too long.

        Raises:
            SandboxError: it could not isolate itself, or did not start.
        """
        ready, received = False, bytearray()
        poll = select.poll()
        poll.register(self._results, select.POLLIN)
        while True:
            patience = _START_SECONDS if not ready else self._limits.seconds + _GRACE_SECONDS
            if not poll.poll(patience * 1000):
                self._end = f"silence for {patience:.0f} s"
                break
            data = os.read(self._results, 1 << 20)
            if not data:
                break
            received += data
            for kind, number, payload in self._whole(received):
                if kind == wire.FAILED:
                    raise _no_isolation(payload.decode(errors="replace"))
                if kind == wire.DONE:
                    self._end = "done"
                    return
                if kind == wire.READY:
                    ready = True
                    continue
                yield kind, number, payload
        if not ready:
            raise _no_isolation(self.epitaph())

    def stop(self, number: int) -> None:
        """Ask the process to spend no more on a program."""
        with self._lock, suppress(OSError):  # it may have ended already
            if self._lifeline is not None:
                os.write(self._lifeline, wire.STOP.pack(number))

    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started

    def epitaph(self) -> str:
        """How it ended, in words."""
        self.kill()
        self._said.seek(0)
        said = self._said.read()[-2000:].decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else ""
        return "; ".join(part for part in ("the process ended", self._end, last) if part)

    def interrupt(self) -> None:
        """Make it end, also from another thread: whoever listens to it then hears that it has ended."""
        with self._lock:
            if self._lifeline is not None:
                os.close(self._lifeline)  # it kills its own, and ends
                self._lifeline = None
        # A namespace ends with its first process. Without one, what a program has started must be found by its parent.
        if self._ends_with_its_group and self._end != "done":
            self._kill_group()

    def kill(self) -> None:
        """End it, and all that it has started."""
        if self._process.returncode is not None:
            return
        self.interrupt()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        self._kill_group()
        self._process.wait()
        os.close(self._results)

    def _whole(self, received: bytearray) -> Iterator[tuple[int, int, bytes]]:
        """Take whole messages off the front of what was received; what is no message ends the process."""
        while len(received) >= wire.HEADER.size:
            kind, number, length = wire.HEADER.unpack_from(received)
            if kind > wire.FAILED or number >= max(1, self._programs) or length > self._longest:
                self._end = "a message that it never sends"
                self.interrupt()
                received.clear()
                return
            end = wire.HEADER.size + length
            if len(received) < end:
                return
            payload = bytes(received[wire.HEADER.size : end])
            del received[:end]
            yield kind, number, payload

    @property
    def _ends_with_its_group(self) -> bool:
        return self._isolation not in ("seccomp", kernel.NONE)

    def _kill_group(self) -> None:
        if self._process.returncode is not None:  # its number may be somebody else's by now
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _sealed(pieces: Iterator[bytes | memoryview]) -> int:
    """A file in memory with these bytes, which nobody can change any more, where the system has such files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as out:
        for piece in pieces:
            out.write(piece)
    if hasattr(os, "memfd_create"):
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _command(results: int, job: int, isolation: str) -> list[str]:
    """What starts the process: Python without the user's environment, which sees numpy and kvkeep until it is ready."""
    homes = list(dict.fromkeys(str(Path(package.__file__ or "").parent.parent) for package in (np, kvkeep)))
    start = (
        f"import sys; sys.path += {homes!r}; from kvkeep.evolve.sandbox_worker import main; "
        f"main({results}, {job}, {isolation!r})"
    )
    python = os.path.realpath(sys.executable)
    command = [python, "-I", "-S", "-B", "-c", start]
    if not isolation.startswith("bubblewrap"):
        return command
    numpy = Path(np.__file__).parent
    see = [Path(sys.base_prefix), numpy, numpy.with_name("numpy.libs"), Path(kvkeep.__file__ or "").parent]
    wrapped = kernel.bubblewrap(command, [path for path in see if path.exists()])
    if wrapped is None:
        raise _no_isolation("bubblewrap is not installed")
    return wrapped


@lru_cache
def narrowest(unsafe: bool) -> str:
    """The first isolation that can be had here."""
    failures = []
    for isolation in kernel.ISOLATIONS:
        try:
            with Batch([], [], Limits(), isolation, bare=True) as batch:
                list(batch.messages())
            return isolation
        except SandboxError as error:
            failures.append(f"{isolation}: {error.received}")
    if unsafe:
        return kernel.NONE
    raise _no_isolation("; ".join(failures))


def _no_isolation(received: str) -> SandboxError:
    return SandboxError(
        expected="a kernel that isolates the process in which programs run",
        received=received,
        remedy="allow user namespaces or install bubblewrap; or trust the programs: unsafe=True, --unsafe-no-sandbox",
    )
