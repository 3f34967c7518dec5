"""A tiny model in a folder, a text, and the command line called in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli import main
from kvkeep.testing import fake_model

TEXT = "The ferry leaves at nine <b>sharp</b> & the café opens at ten.\nNobody knows why.\n\nThe harbour is cold. " * 2


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "gemma", "gemma3", layers=4)


def saved_model(path: Path, architecture: str, **sizes: int) -> Path:
    model, tokenizer = fake_model(architecture, **sizes)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def context(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def kvkeep(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Call a command as in a pipe of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: Any) -> Ran:
        try:
            status = main([str(word) for word in words])
        except SystemExit as error:  # cyclopts ends a command line that it cannot parse
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return call


def check_text(ran: Ran, width: int = 80) -> None:
    """Text for a pipe: no escape codes, no line beyond the width, and no error.

    A path counts as a short word: it stays in one piece, so that it can be copied, and is as long as the test's folder.
    """
    assert ran.status == 0, ran.err
    assert "\x1b" not in ran.out + ran.err
    assert max(len(re.sub(r"/\S+", "/path", line)) for line in (ran.out + ran.err).splitlines()) <= width
