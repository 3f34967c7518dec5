"""Files that are there whole or not at all."""

from __future__ import annotations

import os

import pytest

from kvkeep.whole_files import write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path, durable):
    path = tmp_path / "table.md"
    write_whole(path, b"first", durable=durable)
    write_whole(path, "second: \N{EURO SIGN}, \ud800\n", durable=durable)
    assert path.read_bytes() == b"second: \xe2\x82\xac, ?\n"
    assert os.listdir(tmp_path) == ["table.md"]


@pytest.mark.parametrize("durable", [False, True])
def test_the_former_file_stays_where_the_new_one_cannot_be_finished(tmp_path, monkeypatch, durable):
    path = tmp_path / "table.md"
    write_whole(path, "first")
    with pytest.raises(TypeError):
        write_whole(path, None, durable=durable)

    def fails(*names):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "second", durable=durable)
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["table.md"]
