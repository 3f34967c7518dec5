"""How things are printed: two consoles, JSON, errors, sizes, and an answer that wraps while it streams."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvkeep.errors import KvkeepError


def stdout() -> Console:
    """Where results go. Texts are printed as they are, without markup."""
    return Console(markup=False, highlight=False, emoji=False)


def stderr() -> Console:
    """Where progress, notes and errors go, so that results can be piped."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def print_json(record: Mapping[str, Any]) -> None:
    """One JSON object on stdout, in ASCII: a pipe may have any encoding."""
    sys.stdout.write(json.dumps(record, indent=2) + "\n")


def print_error(error: KvkeepError, *, as_json: bool) -> None:
    """What was expected, what came, and what to do: for people on stderr, for programs on stdout."""
    if as_json:
        print_json(error.to_dict())
        return
    lines = Table.grid(padding=(0, 1, 0, 0))
    for label, text in (("expected", error.expected), ("received", error.received), ("remedy", error.remedy)):
        lines.add_row(Text(f"  {label}", style="dim"), Text(text.strip()))
    console = stderr()
    console.print(Text(type(error).__name__, style="bold red"))
    console.print(lines)


@contextmanager
def progress_bar(description: str, *left: ProgressColumn, **fields: Any) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on a terminal, with the time that has gone and the time left; nothing elsewhere.

    Args:
        description: stands before it at first.
        left: columns in the place of the time left.
        fields: of these columns.
    """
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=18), MofNCompleteColumn(), TimeElapsedColumn())
    # What is counted comes in bursts, such as the rows of a sample: the speed is that of the last minutes.
    with Progress(
        *columns,
        *(left or (TextColumn("left"), TimeRemainingColumn())),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=600,
    ) as bar:
        yield bar, bar.add_task(description, total=None, **fields)


def note(text: str) -> None:
    """A remark for people, on stderr."""
    stderr().print(f"note: {text}")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In the place of `warnings.showwarning`: the message, without the line of code that gave it."""
    note(str(message))


def size(count: int) -> str:
    """Bytes in binary units, three significant digits or so: `24.1 MiB`."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:  # four digits would be one too many
            return f"{count} B" if unit == "B" else f"{amount:.{1 if amount < 100 else 0}f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


class WrappedStream:
    """Prints a text piece by piece as it comes, broken at spaces so that it fits the console.

    Args:
        console: where to.
        first: put before the first line.
        indent: put before each other line.
    """

    def __init__(self, console: Console, first: Text, indent: str) -> None:
        self._console = console
        self._indent = indent
        self._word = self._gap = ""
        self._column = self._start = first.cell_len
        console.print(first, end="")

    def write(self, piece: str) -> None:
        """Print all but the last word, which may not be whole yet."""
        for letter in piece:
            if not letter.isspace():
                self._word += letter
                continue
            self._put_word()
            if letter == "\n":
                self._break()
            elif self._column > self._start:
                self._gap += " "
        self._console.file.flush()

    def end(self) -> None:
        """Print what is left, and end the line."""
        self._put_word()
        self._put("\n")
        self._console.file.flush()

    def _put_word(self) -> None:
        if not self._word:
            return
        if self._column + cell_len(self._gap + self._word) > self._console.width and self._column > self._start:
            self._break()
        self._put(self._gap)
        self._gap = ""
        while (room := self._console.width - self._column) < cell_len(self._word):  # longer than a line
            head = set_cell_size(self._word, room).rstrip() or self._word[0]
            self._put(head)
            self._word = self._word[len(head) :]
            self._break()
        self._put(self._word)
        self._word = ""

    def _break(self) -> None:
        self._put("\n" + self._indent)
        self._gap = ""
        self._column = self._start = len(self._indent)

    def _put(self, text: str) -> None:
        self._console.out(text, end="", highlight=False)
        self._column += cell_len(text)
