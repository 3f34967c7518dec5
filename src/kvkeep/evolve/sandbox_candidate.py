"""A program's own process: it limits itself for good, loads the program, and asks it about each context.

What it writes is not trusted. A program may find the pipe and forge answers; but an answer is indices, which the
searching process checks as strictly as if the program had given them, and which the program's worth is then measured
by. A forged answer is an answer. The pipe of another program cannot be reached: it does not exist yet, or no longer.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from kvkeep.evolve import isolation as kernel
from kvkeep.evolve.program import Program
from kvkeep.evolve.sandbox_messages import ANSWERED, ENDED, INNER, INNER_ANSWER, LOADED, RAISED, Contexts, write

# Why a program's process may say that it failed.
RAISED_REASONS = frozenset(("crash", "memory", "missing", "mutation", "dtype", "shape"))

_TOLD = 500  # characters of an exception
_PIPE = 3  # the descriptor of the only way out


class CandidateProcess:
    """Becomes a program, in a process that has just been started for it.

    Args:
        program: which.
        bare: give it only the names that programs may use.
        limits: as the job says.
        filtered: let it make only the system calls of a calculation.
        most: bytes of an answer.
    """

    def __init__(self, program: Program, *, bare: bool, limits: dict[str, Any], filtered: bool, most: int) -> None:
        self.program, self.bare, self.limits, self.filtered, self.most = program, bare, limits, filtered, most

    def run(self, contexts: Contexts, order: Iterable[int], answers: int, prints: int, parent: int) -> None:
        """Answer for contexts in that order, and end the process.

        Args:
            contexts: all of them.
            order: their indices.
            answers: descriptor of the pipe for answers.
            prints: descriptor of the pipe for what is printed.
            parent: the process that watches.
        """
        kernel.die_with_parent(parent)
        os.setpgid(0, 0)
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        os.dup2(answers, _PIPE)
        os.close(0)
        os.closerange(_PIPE + 1, self.limits["descriptors"])
        _reseed()
        np.seterr(all="ignore")
        names = ("cpu_seconds", "address_bytes", "open_files", "processes")
        kernel.limit_resources(**{name: self.limits[name] for name in names})
        if self.filtered:
            kernel.filter_calls()
        try:
            score, select_kept = self._functions()
            _say(LOADED, b"")
            for index in order:
                context = contexts[index]
                scores = score(context)
                _say(ANSWERED, self._answer(scores, select_kept(scores, context)))
            sys.stdout.flush()
            _say(ENDED, b"")
            os._exit(0)
        except BaseException as error:  # exits too: a program that leaves early has not answered
            with suppress(BaseException):
                sys.stdout.flush()
            _say(RAISED, self._told(error).encode(errors="replace"))
            os._exit(1)

    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if self.bare:
            functions = self.program.functions()
            return functions.score_tokens, functions.select_tokens_to_keep
        here: dict[str, Any] = {"__builtins__": builtins, "__name__": "program", "np": np}
        exec(compile(self.program.source, f"<{self.program.name}>", "exec"), here)
        return here["score_tokens"], here["select_tokens_to_keep"]

    def _answer(self, *arrays: Any) -> bytes:
        packed = []
        for array in arrays:
            found = np.asarray(array)
            if found.dtype.hasobject:
                raise _Refused("dtype", f"an answer of type {type(array).__name__}, which is no array of numbers")
            if found.nbytes > self.most:
                raise _Refused("shape", f"an answer of shape {found.shape}")
            packed.append(_header(found.shape, found.dtype) + found.tobytes())
        return INNER_ANSWER.pack(len(packed[0])) + b"".join(packed)

    def _told(self, error: BaseException) -> str:
        """A reason and a message, with the line of the program."""
        try:
            text = str(error)
        except BaseException:
            text = "an exception that cannot be printed"
        reason = "crash"
        if isinstance(error, _Refused):
            reason = error.reason
        elif isinstance(error, MemoryError):
            reason = "memory"
        elif isinstance(error, KeyError) and text.strip("'") in ("score_tokens", "select_tokens_to_keep"):
            reason = "missing"
        elif isinstance(error, ValueError) and ("read-only" in text or "WRITEABLE" in text):
            reason = "mutation"
        trace, line = error.__traceback__, ""
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == f"<{self.program.name}>":
                line = f" in line {trace.tb_lineno}"
            trace = trace.tb_next
        return f"{reason}\n{type(error).__name__}: {text[:_TOLD]}{line}"


class _Refused(Exception):
    """An answer that cannot be sent."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@lru_cache(maxsize=64)
def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """What numpy's format, version 1, puts in front of an array; to write it takes longer than most answers."""
    stream = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()


def _reseed() -> None:
    """Let chance be another one in each pass, where it is loaded at all: a fork inherits its state."""
    if "random" in sys.modules:
        sys.modules["random"].seed(os.urandom(8))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(int.from_bytes(os.urandom(4), "little"))


def _say(kind: int, payload: bytes) -> None:
    """To the process that watches."""
    write(_PIPE, INNER.pack(kind, len(payload)) + payload)
