"""Session: text in, small cache, questions and answers, over several turns.

A session speaks the model's chat template. The template is split around the user's words once, so that a text can be
ingested before its question is known, and so that every turn continues the cache instead of starting it anew.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvkeep.budget import Budget
from kvkeep.errors import CacheStateError
from kvkeep.hf import saving
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.generation import Answer, check_options, generate_answer
from kvkeep.hf.marks import Mark
from kvkeep.hf.policy_table import PolicyLike
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.spans import Span
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.hf.turns import JOINT, TurnTexts, check_words, encode_after


@dataclass
class _State:
    """Where in the template the cache stands."""

    turn: Literal["start", "user", "assistant"] = "start"
    pending: list[int] = field(default_factory=list)  # tokens that belong to the text but are not in the cache yet
    question: str | None = None  # ingested with the text and not answered yet
    tail: str = ""  # the end of the user's words, where they go on


class Session:
    """One conversation over one compressed cache.

    Args:
        model: a supported transformers model.
        tokenizer: its tokenizer; its chat template is used if it has one.
        policy: see `KeepCache`.
        compression_ratio: see `KeepCache`; exactly one way to give a budget.
        entries: see `KeepCache`.
        bytes: see `KeepCache`.
        budget: see `KeepCache`.
        protect: position ranges that stay; `session.header_tokens` tells where the template's header ends.
        system: a system prompt, in place of the template's own.
        chunk_tokens: process texts in chunks of so many tokens and cut after each, so that no more than the budget and
            one chunk is ever held; see `cut_chunks` of `KeepCache`. None: each text at once.
        rerotate_keys: see `KeepCache`.

    Every `ingest` judges everything that is held, old and new, so that the budget holds for the whole conversation;
    questions and answers come on top until the next `ingest`. An online policy holds its cap at every step; beside it
    the session keeps what was held after the last `ingest`, to rewind to, which the ledger counts as state. A session
    whose cache is empty begins anew, whoever emptied it.

    Raises:
        UnsupportedError: a model that kvkeep has not checked, or a chat template that cannot be split; rotations that
            `rerotate_keys` cannot turn.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        policy: PolicyLike = "full",
        *,
        compression_ratio: float | None = None,
        entries: int | None = None,
        bytes: int | str | None = None,
        budget: Budget | None = None,
        protect: Sequence[Span] = (),
        system: str | None = None,
        chunk_tokens: int | None = None,
        rerotate_keys: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.texts = TurnTexts.of(tokenizer, system)
        self.cache = KeepCache(
            model,
            policy,
            compression_ratio=compression_ratio,
            entries=entries,
            bytes=bytes,
            budget=budget,
            protect=protect,
            rerotate_keys=rerotate_keys,
        )
        self._prepare_cache()
        self.chunk_tokens = self.cache.read_chunk_tokens(chunk_tokens)
        self._state = _State()
        self._ingested: tuple[Mark, _State] | None = None
        self.prefill_seconds = 0.0

    @property
    def header_tokens(self) -> int:
        """Tokens of the template before the first user's words."""
        return len(self._encode_header())

    @property
    def question(self) -> str | None:
        """The question that was ingested with the text and waits for `answer()`, if there is one."""
        self._follow_cache()
        return self._state.question

    def question_tokens(self, question: str) -> list[int]:
        """The tokens that `ask` would process before the model's first word, the template's included."""
        check_words("a question", question)
        ids, before, lead = self._open_user_turn()
        separator = "\n\n" if self._state.turn == "user" else lead
        return ids + self._encode(before, f"{separator}{question}") + self._encode(question, self.texts.footer)

    def ingest(self, text: str, *, question: str | None = None) -> int:
        """Process a text and cut the cache to its budget.

        Args:
            text: what to remember. A later text continues the user's turn, or opens a new one after an answer.
            question: makes the decision query-aware: the question is processed and judged with the text. Follow with
                `answer()`.

        Returns:
            Tokens processed.

        Raises:
            CacheStateError: no text, or an empty one; a question beside `chunk_tokens`, which hides it from most cuts,
                or for an online policy.
        """
        check_words("a text", text)
        if question is not None:
            check_words("a question", question)
            if self.cache.is_online:
                raise CacheStateError(
                    expected="a text without its question, which an online policy would not know while it reads",
                    received=f"question={question!r}",
                    remedy="ask(question) after the text",
                )
            if self.chunk_tokens is not None:
                raise CacheStateError(
                    expected="a text without its question: chunk_tokens cuts most of it before the question arrives",
                    received=f"question={question!r}",
                    remedy="ask(question) after the text, or make the session without chunk_tokens",
                )
        ids, before, lead = self._open_user_turn()
        ids = ids + self._encode(before, f"{lead}{text}")
        span = None
        if question is not None:
            start = self.cache.get_seq_length() + len(ids)
            ids += self._encode(text, f"\n\n{question}")
            span = (start, self.cache.get_seq_length() + len(ids))
            ids += self._encode(question, self.texts.footer)
        # The last token of a visible question waits: generation needs one token to begin with.
        ids, waiting = (ids, []) if question is None else (ids[:-1], ids[-1:])
        self.cache.question = span
        started = time.perf_counter()
        self._ingest(ids)
        self.prefill_seconds += time.perf_counter() - started
        self._state = _State("user" if question is None else "assistant", waiting, question, text[-JOINT:])
        self._ingested = (self.cache.mark(), self._state)
        return len(ids)

    def ask(
        self,
        question: str,
        *,
        max_new_tokens: int = 64,
        keep: bool = True,
        on_text: Callable[[str], None] | None = None,
        **generate: Any,
    ) -> Answer:
        """Ask a question of what the cache holds.

        Args:
            question: the user's words.
            max_new_tokens: at most so many.
            keep: leave question and answer in the cache for the next turn; false forgets them.
            on_text: called with each piece of the answer as it comes.
            generate: anything else that `model.generate` takes (`do_sample`, `temperature`, `stop_strings`, ...).

        Raises:
            CacheStateError: no question, or an empty one.
            UnsupportedError: an option of generate that does not lead to one answer in words.
        """
        return self._answer(self.question_tokens(question), max_new_tokens, keep, on_text, generate)

    def answer(
        self,
        *,
        max_new_tokens: int = 64,
        keep: bool = True,
        on_text: Callable[[str], None] | None = None,
        **generate: Any,
    ) -> Answer:
        """Answer the question that was ingested with the text; arguments as for `ask`.

        Raises:
            CacheStateError: no question was ingested, or it has been answered.
            UnsupportedError: as for `ask`.
        """
        self._follow_cache()
        if self._state.question is None:
            raise CacheStateError(
                expected="a question ingested with its text",
                received="no open question",
                remedy="call ingest(text, question=...) first, or use ask(question)",
            )
        return self._answer(list(self._state.pending), max_new_tokens, keep, on_text, generate)

    def rewind(self) -> None:
        """Forget every question and answer since the last `ingest`.

        Raises:
            CacheStateError: nothing was ingested.
        """
        self._follow_cache()
        if self._ingested is None:
            raise CacheStateError(expected="an ingested text", received="none", remedy="call ingest(text) first")
        self._restore(self._ingested)

    def reset(self) -> None:
        """Begin anew, with the same policy and budget; also the way out after an error in the middle of a forward."""
        self.cache.reset()
        self.cache.cut_on_request()
        self._follow_cache()

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file that `Session.load` reads in another process; see `KeepCache.save`."""
        self._follow_cache()
        saving.save(self.cache, Path(path), session=self._facts())

    @classmethod
    def load(
        cls, path: str | Path, model: Any, tokenizer: PreTrainedTokenizerBase, *, policy: PolicyLike | None = None
    ) -> Session:
        """Go on with a conversation that `save` wrote; `rewind` goes back to where it was saved.

        Args:
            path: the file.
            model: the model that the cache was made with.
            tokenizer: its tokenizer.
            policy: only for caches whose policy has no name.

        Raises:
            CacheStateError: not such a file, a damaged one, or one of another model.
        """
        facts = saving.read_session(Path(path))
        session = cls(model, tokenizer)
        session.cache = KeepCache.load(path, model, policy=policy)
        session.texts = TurnTexts(**facts["texts"])
        session._prepare_cache()
        session._state = _State(**facts["state"])
        session.chunk_tokens = facts.get("chunk_tokens")
        session._ingested = session._checkpoint()
        return session

    def _facts(self) -> dict[str, Any]:
        return {"texts": asdict(self.texts), "state": asdict(self._state), "chunk_tokens": self.chunk_tokens}

    # -- inside ----------------------------------------------------------------------------------------------------

    def _prepare_cache(self) -> None:
        self.cache.cut_on_request()
        if self.cache.repeats_texts:
            self.cache.repeat_prompt = RepeatPrompt.of(self.tokenizer, self.texts.footer)

    def _follow_cache(self) -> None:
        if self.cache.get_seq_length() == 0:
            self._state, self._ingested, self.prefill_seconds = _State(), None, 0.0

    def _encode(self, before: str, text: str) -> list[int]:
        return encode_after(self.tokenizer, before, text)

    def _encode_header(self) -> list[int]:
        header = self.texts.header.rstrip(" ")
        # A template writes its own special tokens; plain text begins with what the tokenizer puts before it.
        special = not getattr(self.tokenizer, "chat_template", None)
        return list(self.tokenizer(header, add_special_tokens=special)["input_ids"]) if header or special else []

    def _open_user_turn(self) -> tuple[list[int], str, str]:
        """Tokens before the user's words, the text that they end, and spaces that share a token with the words."""
        self._follow_cache()
        if self._state.turn == "user":
            return [], self._state.tail, ""
        if self._state.turn == "start":
            header = self.texts.header.rstrip(" ")
            return self._encode_header(), header, self.texts.header[len(header) :]
        text = self.texts.between.rstrip(" ")
        between = self._encode("\n", text)
        pending = self._state.pending
        if pending and between and pending[-1] == between[0]:  # the answer's end token opens the text between turns
            pending = pending[:-1]
        return pending + between, f"\n{text}", self.texts.between[len(text) :]

    def _checkpoint(self) -> tuple[Mark, _State]:
        return self.cache.mark(), self._state

    def _restore(self, point: tuple[Mark, _State]) -> None:
        mark, state = point
        if mark.columns:
            self.cache.rewind(mark)
        elif self.cache.get_seq_length() or self.cache.is_broken:
            self.cache.reset()
        self._state = state

    def _answer(
        self,
        ids: list[int],
        max_new_tokens: int,
        keep: bool,
        on_text: Callable[[str], None] | None,
        generate: dict[str, Any],
    ) -> Answer:
        """Generate; if that fails or is interrupted, the conversation stands where it stood."""
        generate = check_options(generate)
        before = self._checkpoint()
        try:
            answer = self._generate(ids, max_new_tokens, on_text, generate)
        except BaseException:
            self._restore(before)  # nothing is cut while an answer is written, so that half a forward can be undone
            raise
        if not keep:
            self._restore(before)
        return answer

    def _ingest(self, ids: list[int]) -> None:
        """Process a text, in chunks if wanted; an interruption between two of them leaves what was processed."""
        self._warn_if_too_long(len(ids))
        chunk = self.chunk_tokens or len(ids)
        for start in range(0, len(ids), chunk):
            tokens = ids[start : start + chunk]
            self.cache.cut_next(coming=len(ids) - start - len(tokens))
            try:
                self._forward(tokens)
            except BaseException:
                self.cache.cut_next(False)
                if start and not self.cache.is_broken:
                    self.cache.end_text()
                    self._state = _State("user", tail=str(self.tokenizer.decode(ids[:start]))[-JOINT:])
                    self._ingested = self._checkpoint()
                raise

    def _forward(self, ids: list[int]) -> None:
        with torch.no_grad():
            self.model(input_ids=self._tensor(ids), use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: self.cache})

    def _generate(
        self, ids: list[int], max_new_tokens: int, on_text: Callable[[str], None] | None, generate: dict[str, Any]
    ) -> Answer:
        self._warn_if_too_long(len(ids) + max_new_tokens)
        answer, pending = generate_answer(
            self.model,
            self.tokenizer,
            self.cache,
            ids,
            max_new_tokens=max_new_tokens,
            on_text=on_text,
            options=generate,
        )
        self._state = _State("assistant", pending)
        return answer

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)

    def _warn_if_too_long(self, new: int) -> None:
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        total = self.cache.get_seq_length() + new
        if most is not None and total > most:
            warnings.warn(
                f"{total} tokens for a model that was trained on positions up to {most}: answers may be poor. "
                "Eviction frees memory; it does not shorten positions.",
                stacklevel=3,
            )
