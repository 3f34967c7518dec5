"""Random numbers, words, names and ids of a row, which depend on the row alone.

Every row has its own generators, one for each purpose, seeded by a hash of (task, length, seed, index). So a row is the
same whatever rows were made before it, and whichever sizes were tried until its length was right.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random

from kvkeep.errors import TaskError

Make = Callable[[Random], str]

_TRIES = 100  # of one maker, before the spare one, or giving up


@dataclass(frozen=True)
class Draws:
    """The randomness of one row.

    Attributes:
        task: name of the task.
        length: that was asked for, in tokens.
        seed: of the run.
        index: of the row.
    """

    task: str
    length: int
    seed: int
    index: int

    def stream(self, purpose: str) -> Random:
        """A generator that starts anew at each call, and is like no other one."""
        key = "/".join(("kvkeep", self.task, str(self.length), str(self.seed), str(self.index), purpose))
        return Random(int.from_bytes(hashlib.sha256(key.encode()).digest(), "big"))


class Distinct:
    """Draws strings that are all different, and not among those that are forbidden.

    Args:
        rng: what the makers draw from.
        forbidden: tells strings that may not be drawn, such as those that stand in the haystack by chance.
    """

    def __init__(self, rng: Random, forbidden: Callable[[str], bool] = lambda text: False) -> None:
        self._rng = rng
        self._forbidden = forbidden
        self._used: set[str] = set()

    def draw(self, make: Make, spare: Make | None = None) -> str:
        """One more string.

        Args:
            make: draws a candidate.
            spare: draws one where `make` has hardly any left.

        Raises:
            TaskError: a hundred candidates in a row were taken.
        """
        for maker in (make,) if spare is None else (make, spare):
            for _ in range(_TRIES):
                text = maker(self._rng)
                if text not in self._used and not self._forbidden(text):
                    self._used.add(text)
                    return text
        raise TaskError(
            expected=f"enough different strings, such as {text!r}",
            received=f"{_TRIES} in a row that were taken or stand in the text, after {len(self._used)} good ones",
            remedy="ask for a shorter length",
        )


@cache
def adjectives() -> tuple[str, ...]:
    """English adjectives of one lower-case word, sorted; none is among the nouns."""
    return tuple(_words()["adjectives"])


@cache
def nouns() -> tuple[str, ...]:
    """English nouns of one lower-case word, sorted."""
    return tuple(_words()["nouns"])


@cache
def _words() -> dict[str, list[str]]:
    content: dict[str, list[str]] = json.loads((files("kvkeep.tasks") / "data" / "words.json").read_text("utf-8"))
    return content


def number(rng: Random) -> str:
    """Seven digits, the first of which is not 0."""
    return str(rng.randrange(1_000_000, 10_000_000))


def uuid4(rng: Random) -> str:
    """A version-4 UUID, 36 characters."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def word_pair(rng: Random) -> str:
    """Such as `brave-lantern`."""
    return f"{rng.choice(adjectives())}-{rng.choice(nouns())}"


def made_up_pair(rng: Random) -> str:
    """Two made-up words, where English ones have run out."""
    return f"{made_up_word(rng)}-{made_up_word(rng)}"


def made_up_word(rng: Random) -> str:
    """Three or four syllables that can be pronounced, such as `tolevarik`."""
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((3, 4))))
    return word + rng.choice(_CODAS)


def made_up_name(rng: Random) -> str:
    """Two syllables with a capital, such as `Drolas`."""
    inner = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2))
    return (inner + rng.choice(_CODAS)).capitalize()


_ONSETS = (*"bdfghklmnprstvz", "br", "dr", "kl", "pl", "st", "tr")
_VOWELS = "aeiou"
_CODAS = ("l", "m", "n", "r", "rk", "s", "sk", "t", "x", "nd")
