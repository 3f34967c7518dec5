"""One sample of an audit: every selection stored in every way, weighed and scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.budget import Budget, ratio_to_entries
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.decoding import decode_batch, end_tokens
from kvkeep.hf.dense import kept_masks, masked_decode, masked_logits, uniform_cache
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.scoring import kl_divergence
from kvkeep.hf.shared_prompt import SharedPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.hf.weighing import measure_bytes
from kvkeep.lab.audit_settings import OWN, PROTOCOLS, AuditSettings, audit_key, family_of, protocols_of
from kvkeep.lab.audit_storage import (
    STORAGES,
    DocumentRows,
    Stored,
    masked_memory,
    ragged_memory,
    uniform_memory,
)
from kvkeep.policies import PromptPolicy, parse_prompt_policy
from kvkeep.results import FULL, Fidelity, Key, Memory, Row, Times
from kvkeep.tasks.metrics import score
from kvkeep.tasks.protocols import CONTINUATION, Sample, Turn

_NOTHING_REMOVED = Budget(compression_ratio=0.0)


class Prompts(Protocol):
    """How texts become tokens; `kvkeep.hf.prompting.Prompting` does it."""

    @property
    def overhead(self) -> int:
        """Tokens that a chat template adds, at most."""
        ...

    def context(self, text: str) -> Any:
        """The context: `ids`, and `end`, its last words."""
        ...

    def question(self, end: str, turn: Turn) -> list[int]:
        """A question behind it, up to the answer's first token."""
        ...

    def footer(self, turn: Turn) -> list[int]:
        """From the question's last word to the answer's first token."""
        ...

    def continuation(self, end: str, turn: Turn) -> list[int]:
        """The text that follows the context."""
        ...

    def reference(self, turn: Turn) -> list[int]:
        """The right answer."""
        ...

    def repeat_prompt(self) -> RepeatPrompt:
        """Asks for the repetition of a text, for policies that judge by it."""
        ...


class Auditor:
    """Weighs and scores the samples of an audit.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        settings: of the audit.
        prompts: makes tokens of texts.
        identity: name and hash of the model.
        versions: of what the numbers hang on.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: AuditSettings,
        prompts: Prompts,
        *,
        identity: tuple[str, str],
        versions: dict[str, str],
    ) -> None:
        self.model, self.tokenizer, self.settings, self.prompts = model, tokenizer, settings, prompts
        self._identity, self._versions = identity, versions
        self._policies = {name: parse_prompt_policy(name) for name in settings.policies}
        self._stop_tokens = end_tokens(model, tokenizer)

    def keys(self, sample: Sample) -> list[Key]:
        """The keys of all rows of a sample."""
        keys = []
        for index, turn in enumerate(sample.turns):
            for protocol in protocols_of(turn):
                keys.append(audit_key(sample, index, "ragged", protocol, FULL, 0.0))
                for policy, ratio in self._cuts:
                    keys += [audit_key(sample, index, storage, protocol, policy, ratio) for storage in STORAGES]
        if self._weighs_alone(sample):
            keys += [audit_key(sample, 0, OWN, "hidden", policy, ratio) for policy, ratio in self._cuts]
        return keys

    def rows(self, sample: Sample, wanted: Callable[[Key], bool] = lambda key: True) -> Iterator[Row]:
        """The rows of a sample, as they are measured.

        Args:
            sample: the context and its questions.
            wanted: false for rows that are there already.
        """
        context = self.prompts.context(sample.context)
        if self._weighs_alone(sample):
            yield from self._own_prefills(sample, context.ids, wanted)
        for index, turn in enumerate(sample.turns):
            for view in self._views(sample, context, index, turn) if protocols_of(turn) else ():
                yield from self._view(view, wanted)

    @property
    def _cuts(self) -> list[tuple[str, float]]:
        return [(policy, ratio) for policy in self._policies for ratio in self.settings.ratios]

    def _weighs_alone(self, sample: Sample) -> bool:
        """One text is enough: bytes hang on its length, and little on its words."""
        return sample.index == 0 and any(turn.metric == CONTINUATION for turn in sample.turns)

    # -- one text --------------------------------------------------------------------------------------------------

    def _views(self, sample: Sample, context: Any, index: int, turn: Turn) -> list[_View]:
        """The texts that are cut for a turn, and what is read after the cut."""
        if turn.metric == CONTINUATION:
            ids = self.prompts.continuation(context.end, turn)
            return [_View(sample, index, ("hidden",), tuple(context.ids), ids[:1], ids[1:])]
        asked, reference = self.prompts.question(context.end, turn), self.prompts.reference(turn)
        hidden = _View(sample, index, ("hidden",), tuple(context.ids), asked, reference)
        ids = [*context.ids, *asked]
        # The last token waits: an answer needs one to begin with.
        words = max(len(ids) - len(self.prompts.footer(turn)), len(context.ids) + 1)
        seen = ("visible", "document")
        question = (len(context.ids), min(words, len(ids) - 1))
        return [hidden, _View(sample, index, seen, tuple(ids[:-1]), ids[-1:], reference, question)]

    def _view(self, view: _View, wanted: Callable[[Key], bool]) -> Iterator[Row]:
        """One prefill; all protocols, policies and ratios are cut from it."""
        missing = [
            (protocol, policy, ratio)
            for protocol in view.protocols
            for policy, ratio in self._cuts
            if any(wanted(view.key(storage, protocol, policy, ratio)) for storage in STORAGES)
        ]
        bare = [p for p in view.protocols if wanted(view.key("ragged", p, FULL, 0.0))]
        if not missing and not bare:
            return
        ranked = {
            (protocol, name): self._ranking(view, protocol, policy)
            for protocol in view.protocols
            for name, policy in self._policies.items()
        }
        prompt = self.prompts.repeat_prompt()
        shared = SharedPrompt(self.model, view.ids, ranked.values(), question=view.question, repeat_prompt=prompt)
        full = shared.cut(FULL, _NOTHING_REMOVED)
        memory = ragged_memory(full, "layer")
        [(yardstick, answer)] = self._ask([full], view)
        for protocol in bare:
            fidelity = self._fidelity(view, yardstick, yardstick)
            yield self._row(view, "ragged", protocol, FULL, 0.0, memory, fidelity, answer, full, shared)
        for protocol, policy, ratio in missing:
            cuts = _Cuts(self.model, shared, ranked[protocol, policy], ratio)
            heard = self._ask(list(cuts.caches.values()), view)
            heard.append(self._ask_masked(full, cuts.kept, view))
            memories = {**cuts.memories, "masked": masked_memory(full, uniform_cache(full), cuts.kept)}
            caches = {**cuts.caches, "masked": full}
            for (storage, memory), (predicted, answer) in zip(memories.items(), heard, strict=True):
                if wanted(view.key(storage, protocol, policy, ratio)):
                    fidelity = self._fidelity(view, yardstick, predicted)
                    cache = caches[storage]
                    yield self._row(view, storage, protocol, policy, ratio, memory, fidelity, answer, cache, shared)

    def _ranking(self, view: _View, protocol: str, policy: PromptPolicy) -> PromptPolicy:
        if protocol != "document" or view.question is None:
            return policy
        return DocumentRows(policy, len(view.ids) - view.question[0])

    def _own_prefills(self, sample: Sample, ids: Sequence[int], wanted: Callable[[Key], bool]) -> Iterator[Row]:
        """The text by itself under every policy: nothing is shared, and what is left is weighed."""
        view = _View(sample, 0, ("hidden",), tuple(ids), [], [])
        for policy, ratio in self._cuts:
            if not wanted(view.key(OWN, "hidden", policy, ratio)):
                continue
            prompt = self.prompts.repeat_prompt()
            cache = KeepCache(self.model, self._policies[policy], compression_ratio=ratio, repeat_prompt=prompt)
            with torch.no_grad():
                inputs = torch.tensor([list(ids)], device=self.model.device)
                self.model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
            weighed = measure_bytes(cache)
            memory = Memory(**cache.ledger.to_dict())
            more = {"weighed_bytes": weighed.total, "weighed_keys_values": weighed.keys_values}
            yield self._row(view, OWN, "hidden", policy, ratio, memory, Fidelity(), [], cache, None, more)

    # -- what a cache says -----------------------------------------------------------------------------------------

    def _ask(self, caches: Sequence[KeepCache], view: _View) -> list[tuple[Tensor, list[int]]]:
        """For each cache log-probabilities `[T, V]` along what follows, and its own answer."""
        stacked = KeepCache.stack(caches)
        logits = self._along(stacked.fork(), view, len(caches))
        answers: list[list[int]] = [[] for _ in caches]
        if view.turn.metric != CONTINUATION:
            answers = decode_batch(
                self.model,
                stacked,
                [view.ask] * len(caches),
                max_new_tokens=self._most(view.turn),
                stop_tokens=self._stop_tokens,
            )
        return [(row.float().log_softmax(-1), answer) for row, answer in zip(logits, answers, strict=True)]

    @torch.no_grad()
    def _along(self, stacked: KeepCache, view: _View, rows: int) -> Tensor:
        inputs = torch.tensor([view.fed] * rows, device=self.model.device)
        positions = len(view.ids) + torch.arange(inputs.shape[1], device=inputs.device)
        logits: Tensor = self.model(
            input_ids=inputs,
            position_ids=positions.expand(rows, -1),
            use_cache=True,
            logits_to_keep=len(view.follows),
            **{CACHE_ARGUMENT: stacked},
        ).logits
        return logits

    def _ask_masked(self, full: KeepCache, kept: dict[int, Tensor], view: _View) -> tuple[Tensor, list[int]]:
        logits = masked_logits(self.model, uniform_cache(full), kept, view.fed, len(view.follows))
        answer: list[int] = []
        if view.turn.metric != CONTINUATION:
            answer = masked_decode(
                self.model,
                uniform_cache(full),
                kept,
                view.ask,
                max_new_tokens=self._most(view.turn),
                stop_tokens=self._stop_tokens,
            )
        return logits.float().log_softmax(-1), answer

    def _most(self, turn: Turn) -> int:
        most = self.settings.max_new_tokens
        return min(most, turn.max_new_tokens) if most else turn.max_new_tokens

    @staticmethod
    def _fidelity(view: _View, full: Tensor, predicted: Tensor) -> Fidelity:
        target = torch.tensor(view.follows, device=predicted.device)[:, None]
        likely = float(predicted.gather(1, target).mean())
        text = view.turn.metric == CONTINUATION
        return Fidelity(
            reference_logprob=None if text else likely,
            nll=-likely if text else None,
            kl=max(0.0, float(kl_divergence(full, predicted).mean())),  # rounding may leave less than zero
            top1=float((full.argmax(-1) == predicted.argmax(-1)).float().mean()),
        )

    def _row(
        self,
        view: _View,
        storage: str,
        protocol: str,
        policy: str,
        ratio: float,
        memory: Memory,
        fidelity: Fidelity,
        answer: Sequence[int],
        cache: KeepCache,
        shared: SharedPrompt | None,
        more: dict[str, int] | None = None,
    ) -> Row:
        turn, key = view.turn, view.key(storage, protocol, policy, ratio)
        answers = bool(turn.references) and turn.metric != CONTINUATION
        said = str(self.tokenizer.decode(list(answer), skip_special_tokens=True)) if answers else ""
        return Row(
            sample=key.sample,
            task=f"{family_of(storage, protocol)}/{view.sample.task}",
            cluster=view.sample.key,
            policy=policy,
            budget={"compression_ratio": ratio},
            protocol=PROTOCOLS[protocol],
            memory=memory,
            model=self._identity[0],
            model_sha256=self._identity[1],
            turn=view.index,
            length=view.sample.length,
            options={**dict(view.sample.options), "storage": storage, "ranking": protocol, **(more or {})},
            metric=turn.metric,
            score=score(turn.metric, said, turn.references) if answers else None,
            fidelity=fidelity,
            question=turn.question,
            prediction=said,
            references=turn.references if answers else (),
            entries_per_cell=tuple(tuple(rows[0]) for rows in cache.ledger.entries_per_cell),
            times=Times(prefill_s=None if shared is None else shared.prefill_seconds, evict_s=cache.evict_seconds),
            seeds={"samples": self.settings.seed},
            versions=self._versions,
            provider=view.sample.provider,
        )


@dataclass(frozen=True, eq=False)
class _View:
    """A text that is cut for a turn, and what is read afterwards.

    Attributes:
        sample: where it comes from.
        index: of the turn.
        protocols: under which it is cut.
        ids: the text.
        ask: tokens that are read before an answer.
        follows: the right answer, or the text that goes on.
        question: its positions in the text, where it is a part of it.
    """

    sample: Sample
    index: int
    protocols: tuple[str, ...]
    ids: tuple[int, ...]
    ask: Sequence[int]
    follows: Sequence[int]
    question: tuple[int, int] | None = None

    @property
    def turn(self) -> Turn:
        return self.sample.turns[self.index]

    @property
    def fed(self) -> list[int]:
        return [*self.ask, *self.follows[:-1]]

    def key(self, storage: str, protocol: str, policy: str, ratio: float) -> Key:
        return audit_key(self.sample, self.index, storage, protocol, policy, ratio)


class _Cuts:
    """One selection, stored in every way.

    Attributes:
        caches: by storage, right after the cut; the entries are those that this way of storing them keeps.
        memories: by storage, weighed.
        kept: what the ragged one keeps.
    """

    def __init__(self, model: Any, shared: SharedPrompt, policy: PromptPolicy, ratio: float) -> None:
        entries = ratio_to_entries(shared.length, ratio)
        self.caches: dict[str, KeepCache] = {}
        self.memories: dict[str, Memory] = {}
        for storage in STORAGES:
            if storage == "masked":
                continue
            # What is not enforced may hold more than was asked for.
            budget = _NOTHING_REMOVED if storage == "not-enforced" else Budget(compression_ratio=ratio)
            cache = shared.cut(Stored(policy, storage, entries), budget)
            weigh = ragged_memory if storage == "ragged" else uniform_memory
            self.caches[storage] = cache
            self.memories[storage] = weigh(cache, policy.scope, policy.needs().second_passes)
        self.kept = kept_masks(self.caches["ragged"], shared.length)
