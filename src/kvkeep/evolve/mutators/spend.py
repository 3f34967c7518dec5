"""How many tokens were granted, how many are spent, and no request that could take more than is left."""

from __future__ import annotations

import threading

from kvkeep.evolve.mutators.protocol import MutatorError, SpendLimitReached

# Characters of a token, where nobody counted: low, so that the estimate is rather too large.
_CHARACTERS = 3


def estimated_tokens(text: str) -> int:
    """At least as many as most tokenizers make of such text."""
    return -(-len(text) // _CHARACTERS)


class Spend:
    """Tokens of one search, counted from several threads.

    Args:
        limit: prompt and completion tokens in all; None for no limit.

    Raises:
        MutatorError: a limit below 1.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise MutatorError(
                expected="a limit of at least 1 token",
                received=f"{limit}",
                remedy="None is no limit; the grammar is free",
            )
        self.limit, self.spent = limit, 0
        self._reserved = 0
        self._lock = threading.Lock()

    def reserve(self, tokens: int) -> None:
        """Set aside the most that a request may take, before it is sent.

        Raises:
            SpendLimitReached: it may take more than is left.
        """
        with self._lock:
            if self.limit is not None and self.spent + self._reserved + tokens > self.limit:
                raise SpendLimitReached(
                    expected=f"at most {self.limit} tokens",
                    received=f"{self.spent} spent, {self._reserved} set aside for open requests, "
                    f"and a request that may take {tokens}",
                    remedy="the search so far stands; grant more tokens, shorten max_tokens, or go on with the grammar",
                )
            self._reserved += tokens

    def settle(self, reserved: int, used: int) -> None:
        """Give back what was set aside, and count what was used."""
        with self._lock:
            self._reserved -= reserved
            self.spent += used
