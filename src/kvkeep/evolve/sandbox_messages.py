"""What the searching process and the process of programs tell each other: a job, and messages about it.

A message is a small header and bytes. Arrays of programs travel in numpy's own format, without pickles; contexts as
raw memory of a sealed file, which each process sees read-only: whatever trick a program finds to write to it, it would
write to a copy of its own, and the next pass would see the context as it was. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.evolve.context import FEATURES, SCALARS, PrefillContext
from kvkeep.evolve.program import Program

# Messages to the searching process: kind, program, length of what follows.
HEADER = struct.Struct("<BII")
READY, BEGIN, ANSWER, END, DONE, FAILED = range(6)
_ANSWER_HEADER = struct.Struct("<BII")  # pass, context, bytes of the first array
# At the start of the job: bytes of the JSON that follows.
JOB_HEADER = struct.Struct("<Q")
# A request to stop with a program, on standard input; its end means that nobody waits any more.
STOP = struct.Struct("<I")

# Messages of a program's own process to the one that watches it: kind, length of what follows.
INNER = struct.Struct("<BI")
LOADED, ANSWERED, ENDED, RAISED = range(4)
# In front of the two arrays of an answer: bytes of the first one.
INNER_ANSWER = struct.Struct("<I")


@dataclass(frozen=True)
class Contexts:
    """The contexts of a job, in read-only memory.

    Attributes:
        scalars: `[contexts, 5]`, int64.
        features: `[17 * sum of L]`, float32: each context's features one after the other.
        starts: where each context begins in `features`.
    """

    scalars: NDArray[np.int64]
    features: NDArray[np.float32]
    starts: NDArray[np.int64]

    def __getitem__(self, index: int) -> PrefillContext:
        """A new context, so that what a program hangs on one does not reach its next call."""
        scalars = dict(zip(SCALARS, self.scalars[index].tolist(), strict=True))
        length, start = scalars["L"], int(self.starts[index])
        rows = {
            name: self.features[start + row * length : start + (row + 1) * length] for row, name in enumerate(FEATURES)
        }
        # As it is: it was checked when it was made, and its arrays lie in memory that is read-only already.
        context = object.__new__(PrefillContext)
        context.__dict__.update(rows | scalars)
        return context


class Answer(NamedTuple):
    """What a program said of a context.

    Attributes:
        repeat: 0 in the first pass, 1 in the second.
        context: its index.
        scores: an array in numpy's format.
        indices: likewise.
    """

    repeat: int
    context: int
    scores: bytes
    indices: bytes

    @classmethod
    def from_bytes(cls, payload: bytes) -> Answer:
        """What `pack_answer` gave.

        Raises:
            struct.error: it is too short.
        """
        repeat, context, size = _ANSWER_HEADER.unpack_from(payload)
        start = _ANSWER_HEADER.size
        return cls(repeat, context, payload[start : start + size], payload[start + size :])


def pack_answer(repeat: int, context: int, arrays: bytes) -> bytes:
    """An answer, from what a program's process sent: the length of the first array, and both arrays."""
    (size,) = INNER_ANSWER.unpack_from(arrays)
    return _ANSWER_HEADER.pack(repeat, context, size) + arrays[INNER_ANSWER.size :]


class Verdict(NamedTuple):
    """How a program, or one pass of it, ended.

    Attributes:
        reason: why it is refused, or None.
        message: in words.
        seconds: that it took.
        printed: the beginning of what it printed.
    """

    reason: str | None
    message: str
    seconds: float
    printed: str

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Verdict:
        """What `to_bytes` gave; of anything else, a crash."""
        try:
            reason, message, seconds, printed = json.loads(payload)
            return cls(None if reason is None else str(reason), str(message), float(seconds), str(printed))
        except (ValueError, TypeError, RecursionError):
            return cls("crash", "a message that is no verdict", 0.0, "")


def longest_answer(contexts: Iterable[int]) -> int:
    """Bytes of an answer, at most: far more than two arrays of L numbers have.

    Args:
        contexts: L of each.
    """
    return 8192 + 64 * max(contexts, default=1)


def pack_job(
    contexts: Sequence[PrefillContext], programs: Sequence[Program], limits: dict[str, Any], *, bare: bool
) -> Iterator[bytes | memoryview]:
    """The bytes of a job, piece by piece.

    Args:
        contexts: what programs are asked about.
        programs: which.
        limits: as in `sandbox.Limits`.
        bare: give programs only the names that they may use; otherwise all of Python's.
    """
    told = json.dumps(
        {
            "programs": [[program.name, program.source] for program in programs],
            "contexts": len(contexts),
            "limits": limits,
            "bare": bare,
        }
    ).encode()
    # Arrays begin at a multiple of 64, which numpy computes fastest from.
    told += b" " * (-(JOB_HEADER.size + len(told)) % 64)
    scalars = np.array([[getattr(c, name) for name in SCALARS] for c in contexts], dtype=np.int64).tobytes()
    yield JOB_HEADER.pack(len(told)) + told
    yield scalars + b"\0" * (-len(scalars) % 64)
    for context in contexts:
        for name in FEATURES:
            yield memoryview(getattr(context, name)).cast("B")


def read_job(job: int) -> tuple[dict[str, Any], Contexts]:
    """What `pack_job` was told, and the contexts.

    Args:
        job: descriptor of a file with its bytes.
    """
    memory = mmap.mmap(job, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    (length,) = JOB_HEADER.unpack_from(memory)
    start = JOB_HEADER.size + length
    told = json.loads(memory[JOB_HEADER.size : start])
    count = told["contexts"] * len(SCALARS)
    scalars = np.frombuffer(memory, np.int64, count, start).reshape(-1, len(SCALARS))
    start += -(-count * 8 // 64) * 64
    sizes = scalars[:, SCALARS.index("L")] * len(FEATURES)
    features = np.frombuffer(memory, np.float32, int(sizes.sum()), start)
    return told, Contexts(scalars, features, np.cumsum(sizes) - sizes)


def write(descriptor: int, data: bytes) -> None:
    """All of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
