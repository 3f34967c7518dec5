"""Recorded samples on disk: under a limit of bytes, each made once, and made again where it is damaged.

A sample is two files in one folder: `<key>.safetensors`, and `<key>.json` with its facts and the hash of the former,
which is written last. The key is a hash of all that the tensors hang on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors.torch import save_file

from kvkeep.errors import CacheStateError
from kvkeep.evolve.recording import record, recorded_bytes
from kvkeep.evolve.samples import SPLITS, Asked, Facts, Recorded, SampleSettings, Split, split_samples
from kvkeep.hf.embedded import kvkeep_home, sha256_of
from kvkeep.hf.models import model_sha256
from kvkeep.hf.prompting import Prompting
from kvkeep.tasks.protocols import Sample, Task

FORMAT = 1
DEFAULT_BYTES = 8 * 2**30


@dataclass(frozen=True)
class SampleSet:
    """Recorded samples by split.

    Attributes:
        splits: the samples of each split that was asked for.
    """

    splits: Mapping[Split, tuple[Recorded, ...]]

    def __getitem__(self, split: Split) -> tuple[Recorded, ...]:
        return self.splits[split]

    def of(self, *splits: Split) -> list[Recorded]:
        """The samples of some splits, one after the other."""
        return [sample for split in splits for sample in self.splits[split]]


class SampleStore:
    """A folder of recorded samples that never holds more than a limit.

    Args:
        folder: made if it is not there; None for `samples` in kvkeep's cache folder.
        limit_bytes: of all files together; the samples that were used longest ago go first.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.folder = folder or kvkeep_home() / "samples"
        self.limit_bytes = limit_bytes

    def collect(
        self,
        model: Any,
        tokenizer: Any,
        tasks: Iterable[Task],
        settings: SampleSettings,
        *,
        splits: tuple[Split, ...] = SPLITS,
        on_sample: Callable[[int, int], None] = lambda done, total: None,
    ) -> SampleSet:
        """The samples of some splits, recorded where they are not there yet.

        Args:
            model: a supported model.
            tokenizer: its tokenizer.
            tasks: where samples come from.
            settings: which samples.
            splits: those that are wanted.
            on_sample: told after each sample how many there are, and how many there will be.

        Raises:
            CacheStateError: they would take more than the limit.
            TaskError: as `split_samples` and `Asked.of`.
        """
        prompting = Prompting(tokenizer, settings.template)
        drawn = split_samples(tasks, tokenizer, settings, splits)
        asked = {
            sample.key: Asked.of(sample, prompting, settings.protocol) for found in drawn.values() for sample in found
        }
        needed = sum(recorded_bytes(model, len(each.ids)) for each in asked.values())
        if needed > self.limit_bytes:
            raise CacheStateError(
                expected=f"recorded samples of at most {self.limit_bytes:,} bytes",
                received=f"{len(asked)} samples of about {needed:,} bytes together",
                remedy="raise --sample-cache-bytes, or ask for fewer or shorter samples",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        sha, done = model_sha256(model), 0
        found: dict[Split, list[Recorded]] = {split: [] for split in splits}
        keys = {
            sample.key: self._key(model, sha, sample, asked[sample.key], settings.protocol)
            for samples in drawn.values()
            for sample in samples
        }
        with FileLock(self.folder / ".lock"):
            for split, samples in drawn.items():
                for sample in samples:
                    key, tokens = keys[sample.key], asked[sample.key]
                    recorded = self._read(key)
                    if recorded is None:
                        self._make_room(recorded_bytes(model, len(tokens.ids)), set(keys.values()))
                        recorded = self._write(key, *record(model, sample, tokens, settings.protocol))
                    found[split].append(recorded)
                    done += 1
                    on_sample(done, len(asked))
        return SampleSet({split: tuple(samples) for split, samples in found.items()})

    def nbytes(self) -> int:
        """Bytes of the files that are there."""
        return sum(path.stat().st_size for path in self.folder.glob("*.*") if path.suffix in (".safetensors", ".json"))

    @staticmethod
    def _key(model: Any, sha: str, sample: Sample, asked: Asked, protocol: str) -> str:
        parts = {
            "format": FORMAT,
            "features": _features_sha256(),
            "model": sha,
            "dtype": str(model.dtype),
            "sample": sample.key,
            "protocol": protocol,
            "ids": asked.ids,
            "prompt": asked.prompt,
            "reference": asked.reference,
            "question": asked.question,
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _read(self, key: str) -> Recorded | None:
        """A sample that is there and whole; else None."""
        path, facts = self._paths(key)
        try:
            told = json.loads(facts.read_bytes())
            if told["sha256"] != sha256_of(path):
                return None
            recorded = Recorded(Facts.from_dict(told["facts"]), path)
        except (OSError, ValueError, KeyError, TypeError):  # half a file, or one of another form: it is made again
            return None
        os.utime(facts)
        return recorded

    def _write(self, key: str, facts: Facts, tensors: dict[str, Any]) -> Recorded:
        path, told = self._paths(key)
        draft = path.with_suffix(".draft")
        save_file(tensors, draft)
        sha = sha256_of(draft)
        told.unlink(missing_ok=True)  # from here on the pair is not whole until the last step
        os.replace(draft, path)
        draft.write_text(json.dumps({"sha256": sha, "facts": facts.to_dict()}), encoding="utf-8")
        os.replace(draft, told)
        return Recorded(facts, path)

    def _make_room(self, needed: int, keep: set[str]) -> None:
        """Delete what was used longest ago until `needed` bytes more fit; what this run uses stays."""
        for draft in self.folder.glob("*.draft"):
            draft.unlink(missing_ok=True)
        total = self.nbytes()
        others = [path for path in self.folder.glob("*.json") if path.stem not in keep]
        for facts in sorted(others, key=lambda path: path.stat().st_mtime):
            if total + needed <= self.limit_bytes:
                return
            for path in (self._paths(facts.stem)[0], facts):
                total -= path.stat().st_size if path.exists() else 0
                path.unlink(missing_ok=True)

    def _paths(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.safetensors", self.folder / f"{key}.json"


@cache
def _features_sha256() -> str:
    """Of the files that say what features are: other formulas, other samples."""
    hasher = hashlib.sha256()
    for name in ("context.py", "features.py", "recording.py"):
        hasher.update(files("kvkeep.evolve").joinpath(name).read_bytes())
    return hasher.hexdigest()
