"""Files that appear under their names when they are whole; a former one stays until then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Within the block, a draft is written, which takes the file's place at its end; it is dropped if the block fails.

    Args:
        path: in a folder that exists.
        durable: the file must survive a loss of power, too.

    Yields:
        Path of the draft.

    Raises:
        OSError: a path that cannot be written to.
    """
    draft = path.with_name(f".{path.name}.new")
    try:
        yield draft
        if durable:
            with draft.open("r+b") as file:  # some systems sync only what could be written to
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file, whole or not at all.

    Args:
        path: in a folder that exists.
        content: of the file; a text is written in UTF-8, with a question mark for half of a surrogate pair.
        durable: it must survive a loss of power, too.

    Raises:
        OSError: a path that cannot be written to.
    """
    with replacing(path, durable=durable) as draft:
        draft.write_bytes(content.encode("utf-8", errors="replace") if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Make new names durable, which they are only when their folder is."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
