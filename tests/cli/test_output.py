from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from kvkeep.cli.output import WrappedStream, size


def written(pieces, width=20):
    file = StringIO()
    stream = WrappedStream(Console(file=file, width=width), Text("A "), indent="  ")
    for piece in pieces:
        stream.write(piece)
    stream.end()
    return file.getvalue()


TEXT = "The ferry leaves at nine: Donaudampfschifffahrtsgesellschaft runs it.\nNobody  knows why.\n\n渡し船は九時に出る"


def test_a_stream_breaks_at_spaces_and_keeps_every_word():
    lines = written([TEXT]).splitlines()
    assert lines[0] == "A The ferry leaves"
    assert all(line.startswith("  ") for line in lines[1:])
    assert max(sum(2 if ord(letter) > 0x2E80 else 1 for letter in line) for line in lines) <= 20
    assert "".join(written([TEXT])[2:].split()) == "".join(TEXT.split())


@pytest.mark.parametrize("step", [1, 2, 7])
def test_it_does_not_matter_how_a_text_is_cut_into_pieces(step):
    pieces = [TEXT[start : start + step] for start in range(0, len(TEXT), step)]
    assert written(pieces) == written([TEXT])


def test_an_empty_answer_is_a_line():
    assert written([]) == "A \n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (24 * 2**20, "24.0 MiB"),
        (512 * 2**20, "512 MiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_sizes_have_few_digits(count, text):
    assert size(count) == text
