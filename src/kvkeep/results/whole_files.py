"""Files that appear under their names when they are whole; a former one stays until then."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file, whole or not at all.

    Args:
        path: in a folder that exists.
        content: of the file; a text is written in UTF-8, with a question mark for half of a surrogate pair.
        durable: it must survive a loss of power, too.

    Raises:
        OSError: a path that cannot be written to.
    """
    draft = path.with_name(f".{path.name}.new")
    with open(draft, "wb") as file:
        file.write(content.encode("utf-8", errors="replace") if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(draft, path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make new names durable, which they are only when their folder is."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
