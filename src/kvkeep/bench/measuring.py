"""One sample under every policy and budget: a shared prefill, answers decoded together, and what they score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.bench.prefilling import NamedCut, Prefill, Text, check_memory
from kvkeep.bench.rollouts import problem_of
from kvkeep.bench.settings import Protocol, Settings, is_online
from kvkeep.budget import Budget
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.decoding import decode_batch, end_tokens, greedy
from kvkeep.hf.prompting import Context, Prompting
from kvkeep.hf.scoring import kl_divergence
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
        prefill_s: seconds of the forward that it was cut from.
    """

    policy: str
    budget: Budget
    cache: KeepCache
    memory: Memory
    entries: tuple[tuple[int, ...], ...]
    prefill_s: float


class Measurer:
    """Runs samples on a model.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        settings: of the run.
        identity: name and hash of the model.
        versions: of what the numbers hang on.
        batch_rows: at most so many rows are decoded together.
        memory_limit: bytes that a prefill which is shared by all policies may hold; above it each cache reads the text
            by itself. None for no limit.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        *,
        identity: tuple[str, str],
        versions: dict[str, str],
        batch_rows: int = 32,
        memory_limit: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.prompting = Prompting(tokenizer, settings.template)
        self._identity, self._versions, self._batch_rows = identity, versions, batch_rows
        self._memory_limit = memory_limit
        self._stop_tokens = end_tokens(model, tokenizer)
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

    def check_memory(self, sample: Sample) -> None:
        """Refuse a sample of which not even one cache fits into the memory limit; nothing is run.

        Raises:
            BudgetError: with what it would need.
        """
        if self._memory_limit is None:
            return
        context = self.prompting.context(sample.context)
        texts = []
        if "query-agnostic" in self.settings.protocols:
            texts.append(self._text_of(context))
        if "query-aware" in self.settings.protocols:
            texts += [self._text_with(context, turn)[0] for turn in sample.turns if is_asked_aware(turn)]
        for text in texts:
            check_memory(self.model, text, self.settings.cuts, self._memory_limit, sample.key)

    # -- protocols -------------------------------------------------------------------------------------------------

    def _agnostic(self, sample: Sample, context: Context, wanted: Callable[[Key], bool]) -> Iterator[Row]:
        """One cut for all questions."""
        cuts = self._wanted(sample, range(len(sample.turns)), "query-agnostic", wanted)
        if not cuts:
            return
        prefill = self._prefill(self._text_of(context), cuts)
        talks = any(turn.continues for turn in sample.turns)
        yardsticks: dict[int, Tensor] = {}
        for group in self._groups(prefill, cuts):
            if talks:
                yield from self._conversations(sample, context, group, yardsticks)
                continue
            for index, turn in enumerate(sample.turns):
                place = _Place(sample, index, context, "query-agnostic")
                follows = turn.metric == CONTINUATION
                ask = self.prompting.continuation if follows else self.prompting.question
                yield from self._turn(place, group, ask(context.end, turn), yardsticks)

    def _aware(self, sample: Sample, context: Context, index: int, wanted: Callable[[Key], bool]) -> Iterator[Row]:
        """A cut for this question, which stands at the text's end when it is made."""
        turn = sample.turns[index]
        cuts = self._wanted(sample, [index], "query-aware", wanted)
        if not cuts or not is_asked_aware(turn):
            return
        text, last = self._text_with(context, turn)
        prefill = self._prefill(text, cuts)
        yardsticks: dict[int, Tensor] = {}
        for group in self._groups(prefill, cuts):
            place = _Place(sample, index, context, "query-aware")
            yield from self._turn(place, group, last, yardsticks)

    def _conversations(
        self,
        sample: Sample,
        context: Context,
        group: Sequence[Cut],
        yardsticks: dict[int, Tensor],
    ) -> Iterator[Row]:
        """Questions of which some go on from the answers before them: each cache has a talk of its own."""
        for cut in group:
            answer, talk = list[int](), cut.cache.fork()
            for index, turn in enumerate(sample.turns):
                if turn.continues:
                    # The last token of an answer is not in the cache yet.
                    ids = answer[-1:] + self.prompting.follow_up(turn)
                else:
                    talk = cut.cache.fork()
                    ids = self.prompting.question(context.end, turn)
                place = _Place(sample, index, context, "query-agnostic")
                ids = self._read_question(talk, turn, ids)
                fidelity = self._fidelity([cut], talk.fork(), ids, turn, index, yardsticks)[0]
                answer = self._decode(place, talk, [ids])[0]
                yield self._row(place, _weighed(cut, talk), answer, fidelity)

    def _turn(
        self, place: _Place, group: Sequence[Cut], ids: Sequence[int], yardsticks: dict[int, Tensor]
    ) -> Iterator[Row]:
        """One question, asked of all caches of a group together."""
        stacked = _copy_of(group)
        if place.turn.metric == CONTINUATION:
            fidelity = self._fidelity(group, stacked, ids[:1], place.turn, place.index, yardsticks, ids[1:])
            answers: list[list[int]] = [[] for _ in group]
        else:
            ids = self._read_question(stacked, place.turn, ids)
            fidelity = self._fidelity(group, stacked.fork(), ids, place.turn, place.index, yardsticks)
            answers = self._decode(place, stacked, [ids] * len(group))
        for cut, answer, closeness in zip(group, answers, fidelity, strict=True):
            yield self._row(place, _weighed(cut, stacked), answer, closeness)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _text_of(self, context: Context) -> Text:
        """The context alone."""
        return Text(context.ids, None, self.prompting.repeat_prompt())

    def _text_with(self, context: Context, turn: Turn) -> tuple[Text, list[int]]:
        """The context with a question behind it, and what is left to read: generation needs a token to begin with."""
        ids = [*context.ids, *self.prompting.question(context.end, turn)]
        words = len(ids) - len(self.prompting.footer(turn))
        question = (len(context.ids), max(words, len(context.ids) + 1))
        return Text(ids[:-1], question, self.prompting.repeat_prompt()), ids[-1:]

    def _prefill(self, text: Text, cuts: Sequence[NamedCut]) -> Prefill:
        return Prefill(self.model, text, cuts, self._memory_limit)

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

    def _groups(self, prefill: Prefill, cuts: Sequence[NamedCut]) -> Iterator[list[Cut]]:
        for names in prefill.groups(cuts, self._batch_rows):
            group = []
            for policy, budget in names:
                cache, seconds = prefill.cut(policy, budget)
                group.append(Cut(policy, budget, cache, Memory(**cache.ledger.to_dict()), _entries(cache), seconds))
            yield group

    def _decode(self, place: _Place, cache: KeepCache, questions: Sequence[Sequence[int]]) -> list[list[int]]:
        most, turn, sampling = self.settings.max_new_tokens, place.turn, self.settings.sampling
        # The same random numbers for all policies, other ones for each rollout.
        seed = self.settings.seed, place.sample.key, place.index
        return decode_batch(
            self.model,
            cache,
            questions,
            max_new_tokens=min(most, turn.max_new_tokens) if most else turn.max_new_tokens,
            stop_tokens=self._stop_tokens,
            # A list may stand on several lines.
            stop=self._is_line if self.settings.stop_at_line and not turn.wants_list else None,
            choose=greedy if sampling is None else sampling.chooser(*seed),
        )

    def _is_line(self, row: int, answer: list[int]) -> bool:
        """Whether the answer ends with a line break behind a word."""
        token = answer[-1]
        if token not in self._breaks:
            self._breaks[token] = "\n" in self.tokenizer.decode([token])
        return self._breaks[token] and any(letter.isalnum() for letter in self._text(answer))

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
        if text is None and not self._has_reference(turn):
            return [Fidelity()] * len(group)
        reference = list(text) if text is not None else self.prompting.reference(turn)
        if not reference:
            return [Fidelity()] * len(group)
        logits = self._read(stacked, [*ids, *reference[:-1]], len(reference))
        found = []
        target = torch.tensor(reference, device=logits.device)[:, None]
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

    def _has_reference(self, turn: Turn) -> bool:
        """Whether predictions are measured along the turn's reference answer."""
        return self.settings.fidelity and bool(turn.references) and not turn.reasoned

    def _read_question(self, cache: KeepCache, turn: Turn, ids: Sequence[int]) -> list[int]:
        """Read a question but for its last token, where the reference and the answer both go on from it.

        Returns:
            What is left to read.
        """
        if not self._has_reference(turn) or len(ids) < 2:
            return list(ids)
        self._read(cache, ids[:-1])
        return list(ids[-1:])

    @torch.no_grad()
    def _read(self, stacked: KeepCache, ids: Sequence[int], logits: int = 1) -> Tensor:
        """Feed the same tokens to all rows; the logits `[rows, n, V]` of the last so many."""
        inputs = torch.tensor([list(ids)] * len(stacked.lengths), device=self.model.device)
        start = torch.tensor(stacked.lengths, device=inputs.device)[:, None]
        found: Tensor = self.model(
            input_ids=inputs,
            position_ids=start + torch.arange(inputs.shape[1], device=inputs.device),
            use_cache=True,
            logits_to_keep=logits,
            **{CACHE_ARGUMENT: stacked},
        ).logits
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
            cluster=problem_of(sample),
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
            times=Times(prefill_s=cut.prefill_s, evict_s=cut.cache.evict_seconds),
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
    protocol: Protocol

    @property
    def turn(self) -> Turn:
        return self.sample.turns[self.index]


def _entries(cache: KeepCache) -> tuple[tuple[int, ...], ...]:
    """Held by each cell of a single row, `[layer][KV head]`."""
    return tuple(tuple(rows[0]) for rows in cache.ledger.entries_per_cell)


def _weighed(cut: Cut, after: KeepCache) -> Cut:
    """What a row tells of a cache: as it was cut, or behind its answer where the policy held a cap all the way."""
    if not is_online(cut.policy):
        return cut
    ledger = after.ledger.to_dict()
    memory = Memory(**{**ledger, "peak_bytes": max(cut.memory.peak_bytes, ledger["peak_bytes"])})
    return replace(cut, cache=after, memory=memory, entries=_entries(after))


def _copy_of(group: Sequence[Cut]) -> KeepCache:
    """The rows of a group, to be used up; of one cache alone nothing is copied until it is written to."""
    return group[0].cache.fork() if len(group) == 1 else KeepCache.stack([cut.cache for cut in group])


def is_asked_aware(turn: Turn) -> bool:
    """Whether a question can be visible when the text is cut: it is one, and known by then."""
    return not turn.continues and turn.metric != CONTINUATION


def kept_shares(cache: KeepCache, positions: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """The share of some positions that each cell of a single row holds, `[layer][KV head]`."""
    wanted = torch.tensor(sorted(set(positions)))
    return tuple(
        tuple(
            float(torch.isin(wanted, cache.kept_positions(layer.index, 0, head).cpu()).float().mean())
            for head in range(layer.store.kv_heads)
        )
        for layer in cache.evictable_layers
    )
