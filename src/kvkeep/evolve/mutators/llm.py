"""The mutator that asks a language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvkeep.evolve.mutators.answers import AnswerRejected, child_of
from kvkeep.evolve.mutators.endpoint import Answer, Endpoint, Options
from kvkeep.evolve.mutators.prompting import Prompt, Style, build, shown
from kvkeep.evolve.mutators.protocol import Mutator, MutatorError, Parent, Proposal, SpendLimitReached, first_of
from kvkeep.evolve.mutators.rendering import named
from kvkeep.evolve.mutators.spend import Spend

# Requests that fail one after the other, each after its retries, before the search stops.
PATIENCE = 8

# What an answer lacks that was cut off at max_tokens.
_SIGNS_OF_A_CUT = ("empty", "no_code", "syntax")


class LanguageModel(Mutator):
    """Shows a model a program, its score and what its evaluation reported, and reads the answer as a new program.

    An answer that is no valid program costs its tokens, and is a rejection with a reason. So is a request that fails;
    only when `PATIENCE` of them fail one after the other, or the server refuses the key or the model, it gives up.

    Args:
        options: whom to ask, and how.
        style: ask for whole functions (`rewrite`), or for SEARCH/REPLACE changes (`diff`), which small models often get
            wrong. Answers of either kind are understood.
        concurrency: requests at a time in `propose_many`.
        token_limit: prompt and completion tokens in all, over all calls and restarts; no request is sent that could
            take more than is left. None for no limit.

    Raises:
        MutatorError: the package `openai` or a key is missing; an option out of range.
    """

    name = "llm"

    def __init__(
        self, options: Options, style: Style = "rewrite", concurrency: int = 4, token_limit: int | None = None
    ) -> None:
        if concurrency < 1:
            raise MutatorError(expected="concurrency >= 1", received=f"{concurrency}", remedy="1 asks one by one")
        self.spend = Spend(token_limit)
        self.requests = 0
        self.rejections: Counter[str] = Counter()
        self._failures, self._last_failure = 0, ""
        self._endpoint = Endpoint(options, self.spend)
        self._style, self._concurrency = style, concurrency

    def propose(self, parents: Sequence[Parent], random: np.random.Generator) -> Proposal:
        """A child of the first parent, or a rejection; the next two parents are shown as examples.

        Raises:
            SpendLimitReached: a request could take more tokens than are left.
            MutatorError: no parent; an endpoint that is of no use.
        """
        return self.propose_many([parents], [random])[0]

    def propose_many(
        self, batches: Sequence[Sequence[Parent]], randoms: Sequence[np.random.Generator]
    ) -> list[Proposal]:
        """As `propose` for each batch, several at a time; the order of the answers does not matter.

        Raises:
            SpendLimitReached: no request could be sent. If some could, the others are rejections `spend`.
            MutatorError: as `propose`, if no request was answered; else what was not answered is a rejection.
        """
        for parents in batches:
            first_of(parents)
        if self._failures >= PATIENCE:
            raise self._gone()
        asked = [
            (build(parents, self._style, random), int(random.integers(2**31)))
            for parents, random in zip(batches, randoms, strict=True)
        ]
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = list(pool.map(self._ask, *zip(*asked, strict=True))) if asked else []
        errors = [answer for answer in answers if isinstance(answer, MutatorError)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return [self._proposal(parents, answer) for parents, answer in zip(batches, answers, strict=True)]

    def state(self) -> dict[str, Any]:
        """Tokens, requests, and rejections by reason. Failures in a row are not in it: a new start has new patience."""
        return {"spent": self.spend.spent, "requests": self.requests, "rejections": dict(self.rejections)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Count on from there.

        Raises:
            MutatorError: no such state.
        """
        try:
            self.spend.spent = int(state["spent"])
            self.requests = int(state["requests"])
            self.rejections = Counter({str(reason): int(count) for reason, count in state["rejections"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MutatorError(
                expected="the state of the mutator llm", received=f"{error!r}", remedy="pass what its state() gave"
            ) from error

    def _ask(self, prompt: Prompt, seed: int) -> Answer | MutatorError:
        try:
            return self._endpoint.ask(prompt, seed)
        except MutatorError as error:  # what the other threads are told must not be lost
            return error

    def _proposal(self, parents: Sequence[Parent], answer: Answer | MutatorError) -> Proposal:
        used = tuple(one.program.digest for one in shown(parents))
        if isinstance(answer, MutatorError):
            return self._rejected(used, "spend" if isinstance(answer, SpendLimitReached) else "endpoint", str(answer))
        self.requests += 1
        if answer.failure:
            self._failures += 1
            self._last_failure = answer.note
            return self._rejected(used, answer.failure, answer.note, answer.tokens)
        self._failures = 0
        try:
            program = named(child_of(parents[0].program, answer.text), self.name)
        except AnswerRejected as error:
            reason = "cut_off" if answer.cut_off and error.reason in _SIGNS_OF_A_CUT else error.reason
            return self._rejected(used, reason, error.note, answer.tokens)
        if program.digest in {parent.program.digest for parent in parents}:
            return self._rejected(used, "unchanged", "the program of a parent", answer.tokens)
        return Proposal(program, self.name, used, f"{self._style} by a language model", answer.tokens)

    def _rejected(self, parents: tuple[str, ...], reason: str, note: str, tokens: int = 0) -> Proposal:
        self.rejections[reason] += 1
        return Proposal(None, self.name, parents, note, tokens, rejection=reason)

    def _gone(self) -> MutatorError:
        return MutatorError(
            expected="a language model that answers now and then",
            received=f"{self._failures} failures in a row, the last one: {self._last_failure}",
            remedy="see to the server, then run the same search again: it goes on where it stopped",
        )
