"""When a cache cuts: nothing in transformers' interface tells a prompt from its chunks, a question or an answer."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.errors import CacheStateError


@dataclass
class Schedule:
    """Where a cache stands among its cuts.

    Attributes:
        prompt_tokens: columns of a prompt that comes in chunks; None: the first forward is the prompt.
        cut_chunks: cut after each of its chunks.
        never: an online policy holds a cap at every step instead.
        on_request: cut only where `cut_next` asks for it.
        requested: a cut that is asked for, as the columns of the same text that come after it; None for none.
        cuts: made so far.
        coming: columns of a text that has begun and not ended.
    """

    prompt_tokens: int | None
    cut_chunks: bool
    never: bool
    on_request: bool = False
    requested: int | None = None
    cuts: int = 0
    coming: int = 0

    def plan(self, seen: int, new: int) -> tuple[bool, int]:
        """Whether to cut at the end of a forward, and how many columns of its text come after it.

        Args:
            seen: columns before the forward.
            new: its columns.

        Raises:
            CacheStateError: the forward goes beyond the prompt that was announced.
        """
        if self.never:
            return False, 0
        if self.requested is not None:
            return True, self.requested
        if self.on_request:
            return False, 0
        if self.prompt_tokens is None:
            return seen == 0, 0
        if self.cuts and (not self.cut_chunks or seen >= self.prompt_tokens):
            return False, 0
        coming = self.prompt_tokens - seen - new
        if coming < 0:
            raise CacheStateError(
                expected=f"a prompt that ends at prompt_tokens={self.prompt_tokens}",
                received=f"a forward that reaches token {seen + new}",
                remedy="set prompt_tokens to the length of input_ids, padding included",
            )
        return self.cut_chunks or coming == 0, coming

    def reserve(self, seen: int, cutting: bool) -> int:
        """Columns to make room for at once: those of a prompt in chunks, until its last chunk."""
        waiting = not self.cut_chunks and not self.cuts and (not cutting or seen > 0)
        return self.prompt_tokens or 0 if waiting else 0

    def note(self, cut: bool, coming: int) -> None:
        """A forward is done.

        Args:
            cut: whether the cache was cut at its end.
            coming: columns of its text that are still to come.
        """
        if cut:
            self.cuts += 1
            self.requested = None
        self.coming = coming

    def restart(self) -> None:
        """Nothing was seen; what was asked for once and for all still holds."""
        self.cuts = self.coming = 0
        self.requested = None

    def refuse_unfinished(self, seen: int) -> None:
        """Refuse what needs a whole text.

        Args:
            seen: columns so far.

        Raises:
            CacheStateError: more of the text is to come.
        """
        if self.coming:
            raise CacheStateError(
                expected=f"a text of {seen + self.coming} tokens, processed to its end",
                received=f"the first {seen} of them",
                remedy="process the rest of the text first; a fork can be made at any time",
            )
