"""How much of a cache may stay, and the one rule that rounds it.

A budget is stated as a ratio, as entries per cell, or as bytes. All three end as one whole number: the entries that a
cell keeps *on average*. How that average is shared over heads and layers is an allocator's business.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from kvkeep.errors import BudgetError

# Bytes of bookkeeping of one kept entry (its int32 position) and of one cell (its int32 offset): see store/ragged.py.
POSITION_BYTES = 4
OFFSET_BYTES = 4

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class LayerShape:
    """What an entry of one evictable layer costs.

    Attributes:
        kv_heads: KV heads of the layer.
        entry_bytes: bytes of one key vector plus one value vector.
    """

    kv_heads: int
    entry_bytes: int

    def bytes_for(self, rows: int, entries: int) -> int:
        """Bytes that a cut layer holds for `entries` kept entries per cell in each of `rows` rows."""
        cells = rows * self.kv_heads
        return cells * entries * (self.entry_bytes + POSITION_BYTES) + (cells + 1) * OFFSET_BYTES


@dataclass(frozen=True)
class Budget:
    """How much of a cache may stay. Exactly one of the three is set.

    Attributes:
        compression_ratio: fraction of entries removed, 0 <= r < 1 (kvpress's convention).
        entries: entries that a cell keeps on average; a text shorter than that is kept whole.
        bytes: bytes that the whole cache may hold when it has been cut: payload, positions and offsets of the evictable
            layers, and the windows of sliding layers. What is generated afterwards comes on top.

    Raises:
        BudgetError: none or more than one is set, or the value is out of range.
    """

    compression_ratio: float | None = None
    entries: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in vars(self).items() if v is not None}
        if len(given) != 1:
            raise BudgetError(
                expected="exactly one of compression_ratio, entries, bytes",
                received=", ".join(f"{k}={v}" for k, v in given.items()) or "none of them",
                remedy="set one; compression_ratio=0 keeps everything",
            )
        name, number = next(iter(given.items()))
        if isinstance(number, bool) or not isinstance(number, numbers.Real):  # numpy's numbers are welcome
            raise BudgetError(
                expected=f"a number for {name}",
                received=f"{number!r} of type {type(number).__name__}",
                remedy="pass a number (bytes as text such as '64MiB' go through parse_bytes)",
            )
        value = float(number)
        if name == "compression_ratio" and not 0 <= value < 1:
            raise BudgetError(
                expected="a compression_ratio with 0 <= ratio < 1",
                received=f"{value}",
                remedy="it is the fraction that is removed: 0.75 keeps a quarter",
            )
        if name != "compression_ratio" and not (1 <= value < math.inf and value == int(value)):
            raise BudgetError(
                expected=f"a whole number of {name}, at least 1",
                received=f"{value}",
                remedy="an empty cache cannot be attended to; keep at least one entry per cell",
            )
        object.__setattr__(self, name, value if name == "compression_ratio" else int(value))

    def entries_per_cell(
        self, lengths: Sequence[int], shapes: Sequence[LayerShape], reserved_bytes: int = 0
    ) -> list[int]:
        """Entries that a cell of each row keeps on average.

        Args:
            lengths: logical length of each row at the cut, in tokens.
            shapes: the evictable layers.
            reserved_bytes: bytes that are taken already (windows of sliding layers); counts for a byte budget only.

        Returns:
            One number for each row, at least 1 and at most its length.

        Raises:
            BudgetError: a byte budget that cannot hold one entry per cell.
        """
        if self.compression_ratio is not None:
            return [ratio_to_entries(length, self.compression_ratio) for length in lengths]
        if self.entries is not None:
            return [min(int(self.entries), length) for length in lengths]
        limit = int(self.bytes or 0) - reserved_bytes

        def cost(entries: int) -> int:
            # A cell of a short row cannot keep more than its row is long.
            fixed = sum(shape.bytes_for(len(lengths), 0) for shape in shapes)
            return fixed + sum(
                shape.bytes_for(1, min(entries, length)) - shape.bytes_for(1, 0)
                for shape in shapes
                for length in lengths
            )

        if cost(1) > limit:
            raise BudgetError(
                expected=f"at least {cost(1) + reserved_bytes} bytes, which hold one entry per cell",
                received=f"bytes={self.bytes}",
                remedy="raise the budget, or shorten the batch",
            )
        low, high = 1, max(lengths)  # cost(low) fits
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(middle) <= limit else (low, middle - 1)
        return [min(low, length) for length in lengths]

    def describe(self) -> dict[str, float | int]:
        """The one field that is set, as it goes into results."""
        return {k: v for k, v in vars(self).items() if v is not None}

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.describe().items())


def read_budget(
    budget: Budget | None = None,
    *,
    compression_ratio: float | None = None,
    entries: int | None = None,
    bytes: int | str | None = None,
) -> Budget | None:
    """The budget that a caller's arguments give, or None if they give none.

    Args:
        budget: a whole one,
        compression_ratio: or one of the three numbers; see `Budget`.
        entries: see `Budget`.
        bytes: see `Budget`; as text (`"64MiB"`) too.

    Raises:
        BudgetError: more than one is given, or something that is none.
    """
    numbers_given = {
        name: value
        for name, value in (("compression_ratio", compression_ratio), ("entries", entries), ("bytes", bytes))
        if value is not None
    }
    if budget is None:
        size = parse_bytes(bytes) if isinstance(bytes, str) else bytes
        return Budget(compression_ratio, entries, size) if numbers_given else None
    if not isinstance(budget, Budget):
        raise BudgetError(
            expected="a kvkeep.Budget as budget",
            received=f"{budget!r} of type {type(budget).__name__}",
            remedy="for example budget=Budget(entries=512), or entries=512 alone",
        )
    if numbers_given:
        raise BudgetError(
            expected="one budget",
            received=f"budget={budget!r} beside {', '.join(f'{k}={v!r}' for k, v in numbers_given.items())}",
            remedy="leave budget out, or the others",
        )
    return budget


def ratio_to_entries(length: int, compression_ratio: float) -> int:
    """Entries that stay of `length`: `floor(length * (1 - r) + 1e-9)`, at least one.

    The small constant undoes binary rounding: 100 * (1 - 0.8) is 19.999999999999996, and 20 is meant.
    """
    return max(1, math.floor(length * (1 - compression_ratio) + 1e-9))


def parse_bytes(text: str | int) -> int:
    """A number of bytes from text such as `64MiB`, `1.5 GB` or `100000`.

    Raises:
        BudgetError: the text is not a number with one of the units B, kB, MB, GB, KiB, MiB, GiB.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise BudgetError(
            expected="bytes such as 64MiB, 1.5GB or 100000",
            received=f"{text!r}",
            remedy="units: B, kB, MB, GB, KiB, MiB, GiB",
        )
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])
