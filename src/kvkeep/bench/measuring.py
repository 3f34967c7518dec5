"""One sample under every policy and budget: a shared prefill, answers decoded together, and what they score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.bench.prompting import Context, Prompting
from kvkeep.bench.settings import Protocol, Settings
from kvkeep.budget import Budget
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.decoding import decode_batch
from kvkeep.hf.scoring import kl_divergence
from kvkeep.hf.shared_prompt import SharedPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.results import FULL, Fidelity, Key, Memory, Row, Times, row_key
from kvkeep.tasks.metrics import score
from kvkeep.tasks.protocols import CONTINUATION, Sample, Turn


@dataclass
class Cut:
    """One policy at one budget, for one text.

    Attributes:
        policy: as in results.
        budget: that was asked for.
        cache: after the cut.
        memory: measured right after it.
        entries: held by each cell right after it, `[layer][KV head]`.
    """

    policy: str
    budget: Budget
    cache: KeepCache
    memory: Memory
    entries: tuple[tuple[int, ...], ...]


class Measurer:
    """Runs samples on a model.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        settings: of the run.
        identity: name and hash of the model.
        versions: of what the numbers hang on.
        batch_rows: at most so many rows are decoded together.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        *,
        identity: tuple[str, str],
        versions: dict[str, str],
        batch_rows: int = 16,
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.prompting = Prompting(tokenizer, settings.template)
        self._identity, self._versions, self._batch_rows = identity, versions, batch_rows
        ends = getattr(model.generation_config, "eos_token_id", None)
        given = ends if isinstance(ends, list | tuple) else [ends]
        self._stop_tokens = {int(end) for end in given if end is not None} | self.prompting.stop_tokens
        self._breaks: dict[int, bool] = {}

    def rows(self, sample: Sample, wanted: Callable[[Key], bool] = lambda key: True) -> Iterator[Row]:
        """The rows of a sample, as they are measured.

        Args:
            sample: the context and its questions.
            wanted: false for rows that are there already.
        """
        context = self.prompting.context(sample.context)
        for protocol in self.settings.protocols:
            if protocol == "query-agnostic":
                yield from self._agnostic(sample, context, wanted)
            else:
                for index in range(len(sample.turns)):
                    yield from self._aware(sample, context, index, wanted)

    # -- protocols -------------------------------------------------------------------------------------------------

    def _agnostic(self, sample: Sample, context: Context, wanted: Callable[[Key], bool]) -> Iterator[Row]:
        """One cut for all questions."""
        cuts = self._wanted(sample, range(len(sample.turns)), "query-agnostic", wanted)
        if not cuts:
            return
        shared = self._share(context.ids, cuts)
        talks = any(turn.continues for turn in sample.turns)
        yardsticks: dict[int, Tensor] = {}
        for group in self._groups(shared, cuts):
            if talks:
                yield from self._conversations(sample, context, group, shared, yardsticks)
                continue
            for index, turn in enumerate(sample.turns):
                place = _Place(sample, index, context, shared, "query-agnostic")
                follows = turn.metric == CONTINUATION
                ask = self.prompting.continuation if follows else self.prompting.question
                yield from self._turn(place, group, ask(context.end, turn), yardsticks)

    def _aware(self, sample: Sample, context: Context, index: int, wanted: Callable[[Key], bool]) -> Iterator[Row]:
        """A cut for this question, which stands at the text's end when it is made."""
        turn = sample.turns[index]
        cuts = self._wanted(sample, [index], "query-aware", wanted)
        if not cuts or turn.continues or turn.metric == CONTINUATION:
            return
        ids = [*context.ids, *self.prompting.question(context.end, turn)]
        words = len(ids) - len(self.prompting.footer(turn))
        # The last token waits: generation needs one to begin with.
        question = (len(context.ids), max(words, len(context.ids) + 1))
        shared = self._share(ids[:-1], cuts, question)
        yardsticks: dict[int, Tensor] = {}
        for group in self._groups(shared, cuts):
            place = _Place(sample, index, context, shared, "query-aware")
            yield from self._turn(place, group, ids[-1:], yardsticks)

    def _conversations(
        self,
        sample: Sample,
        context: Context,
        group: Sequence[Cut],
        shared: SharedPrompt,
        yardsticks: dict[int, Tensor],
    ) -> Iterator[Row]:
        """Questions of which some go on from the answers before them: each cache has a talk of its own."""
        for cut in group:
            answer: list[int] = []
            for index, turn in enumerate(sample.turns):
                if turn.continues:
                    # The last token of an answer is not in the cache yet.
                    ids = answer[-1:] + self.prompting.follow_up(turn)
                else:
                    cut.cache.rewind()
                    ids = self.prompting.question(context.end, turn)
                fidelity = self._fidelity([cut], cut.cache.fork(), ids, turn, index, yardsticks)[0]
                answer = self._decode(cut.cache, [ids], turn)[0]
                yield self._row(_Place(sample, index, context, shared, "query-agnostic"), cut, answer, fidelity)

    def _turn(
        self, place: _Place, group: Sequence[Cut], ids: Sequence[int], yardsticks: dict[int, Tensor]
    ) -> Iterator[Row]:
        """One question, asked of all caches of a group together."""
        stacked = KeepCache.stack([cut.cache for cut in group])
        if place.turn.metric == CONTINUATION:
            fidelity = self._fidelity(group, stacked, ids[:1], place.turn, place.index, yardsticks, ids[1:])
            answers: list[list[int]] = [[] for _ in group]
        else:
            fidelity = self._fidelity(group, stacked.fork(), ids, place.turn, place.index, yardsticks)
            answers = self._decode(stacked, [ids] * len(group), place.turn)
        for cut, answer, closeness in zip(group, answers, fidelity, strict=True):
            yield self._row(place, cut, answer, closeness)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _share(
        self, ids: Sequence[int], cuts: Sequence[tuple[str, Budget]], question: tuple[int, int] | None = None
    ) -> SharedPrompt:
        policies = [policy for policy, _ in cuts]
        prompt = self.prompting.repeat_prompt()
        return SharedPrompt(self.model, ids, policies, question=question, repeat_prompt=prompt)

    def _wanted(
        self, sample: Sample, turns: Iterable[int], protocol: Protocol, wanted: Callable[[Key], bool]
    ) -> list[tuple[str, Budget]]:
        """The cuts of which some row is missing; the full cache first, if others are measured against it."""
        missing = [
            (policy, budget)
            for policy, budget in self.settings.cuts
            if any(wanted(row_key(sample.key, turn, policy, budget.describe(), protocol)) for turn in turns)
        ]
        full = self.settings.cuts[0]
        # The full cache's predictions are the yardstick of all others.
        return [full, *missing] if missing and missing[0] != full else missing

    def _groups(self, shared: SharedPrompt, cuts: Sequence[tuple[str, Budget]]) -> Iterator[list[Cut]]:
        for first in range(0, len(cuts), self._batch_rows):
            group = []
            for policy, budget in cuts[first : first + self._batch_rows]:
                cache = shared.cut(policy, budget)
                entries = tuple(tuple(rows[0]) for rows in cache.ledger.entries_per_cell)
                group.append(Cut(policy, budget, cache, Memory(**cache.ledger.to_dict()), entries))
            yield group

    def _decode(self, cache: KeepCache, questions: Sequence[Sequence[int]], turn: Turn) -> list[list[int]]:
        most = self.settings.max_new_tokens
        return decode_batch(
            self.model,
            cache,
            questions,
            max_new_tokens=min(most, turn.max_new_tokens) if most else turn.max_new_tokens,
            stop_tokens=self._stop_tokens,
            stop=self._is_line if self.settings.stop_at_line else None,
        )

    def _is_line(self, row: int, answer: list[int]) -> bool:
        """Whether the answer ends with a line break behind a word."""
        token = answer[-1]
        if token not in self._breaks:
            self._breaks[token] = "\n" in self.tokenizer.decode([token])
        return self._breaks[token] and bool(self._text(answer).strip())

    def _fidelity(
        self,
        group: Sequence[Cut],
        stacked: KeepCache,
        ids: Sequence[int],
        turn: Turn,
        index: int,
        yardsticks: dict[int, Tensor],
        text: Sequence[int] | None = None,
    ) -> list[Fidelity]:
        """How likely the reference answer is, and how far the predictions along it are from the full cache's.

        Args:
            group: whose rows the stacked cache holds; it is used up.
            stacked: the caches of the group.
            ids: the question.
            turn: that is asked.
            index: of the turn.
            yardsticks: log-probabilities `[T, V]` of the full cache, by turn; filled where the group has them.
            text: what is fed and scored; None for the reference answer.
        """
        if text is None and not (self.settings.fidelity and turn.references):
            return [Fidelity()] * len(group)
        reference = list(text) if text is not None else self.prompting.reference(turn)
        if not reference:
            return [Fidelity()] * len(group)
        inputs = torch.tensor([[*ids, *reference[:-1]]] * len(group), device=self.model.device)
        start = torch.tensor(stacked.lengths, device=inputs.device)[:, None]
        positions = start + torch.arange(inputs.shape[1], device=inputs.device)
        with torch.no_grad():
            logits: Tensor = self.model(
                input_ids=inputs,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=len(reference),
                **{CACHE_ARGUMENT: stacked},
            ).logits
        found = []
        target = torch.tensor(reference, device=inputs.device)[:, None]
        for cut, row in zip(group, logits, strict=True):
            predicted = row.float().log_softmax(-1)
            if cut.policy == FULL:
                yardsticks[index] = predicted
            full = yardsticks[index]
            found.append(
                Fidelity(
                    reference_logprob=None if text is not None else float(predicted.gather(1, target).mean()),
                    nll=None if text is None else -float(predicted.gather(1, target).mean()),
                    kl=max(0.0, float(kl_divergence(full, predicted).mean())),  # rounding may leave less than zero
                    top1=float((full.argmax(-1) == predicted.argmax(-1)).float().mean()),
                )
            )
        return found

    @staticmethod
    def _score(turn: Turn, prediction: str) -> float | None:
        if turn.metric == CONTINUATION or not turn.references:  # some published sets keep theirs
            return None
        return score(turn.metric, prediction, turn.references)

    def _text(self, answer: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(answer), skip_special_tokens=True))

    def _row(self, place: _Place, cut: Cut, answer: Sequence[int], fidelity: Fidelity) -> Row:
        sample, turn = place.sample, place.turn
        prediction = self._text(answer)
        needles = self.prompting.needles(place.context, turn)
        shares = kept_shares(cut.cache, needles) if needles else None
        return Row(
            sample=sample.key,
            task=sample.task,
            cluster=sample.key,
            policy=cut.policy,
            budget=cut.budget.describe(),
            protocol=place.protocol,
            memory=cut.memory,
            model=self._identity[0],
            model_sha256=self._identity[1],
            turn=place.index,
            length=sample.length,
            options=dict(sample.options),
            metric=turn.metric,
            score=self._score(turn, prediction),
            fidelity=fidelity,
            question=turn.question,
            prediction=prediction,
            references=turn.references,
            entries_per_cell=cut.entries,
            kept_needle_share=None if shares is None else sum(map(sum, shares)) / sum(map(len, shares)),
            kept_needle_share_per_cell=shares,
            times=Times(prefill_s=place.shared.prefill_seconds, evict_s=cut.cache.evict_seconds),
            seeds={"samples": self.settings.seed},
            versions=self._versions,
            provider=sample.provider,
        )


@dataclass(frozen=True)
class _Place:
    """Where a row comes from."""

    sample: Sample
    index: int
    context: Context
    shared: SharedPrompt
    protocol: Protocol

    @property
    def turn(self) -> Turn:
        return self.sample.turns[self.index]


def kept_shares(cache: KeepCache, positions: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """The share of some positions that each cell of a single row holds, `[layer][KV head]`."""
    wanted = torch.tensor(sorted(set(positions)))
    return tuple(
        tuple(
            float(torch.isin(wanted, cache.kept_positions(layer.index, 0, head).cpu()).float().mean())
            for head in range(layer.store.kv_heads)
        )
        for layer in cache.keep_layers
    )
