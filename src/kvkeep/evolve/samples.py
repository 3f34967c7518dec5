"""Samples that a search looks at again and again: what the model made of each text, computed once.

A sample is a text that is cut, the tokens that follow it, and the answer that is waited for. Its keys, values, last
queries and features come from one prefill with the full cache, and stay on disk; a candidate is then judged without
another one. Splits share no sample:

    probe     what candidates do is looked at here: behaviour, canaries, reconstruction; nothing is scored
    stage1    the cheap gate
    stage2    the rest of the fitness
    heldout   what a search never sees; promotion is judged here
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.errors import TaskError
from kvkeep.evolve.context import PrefillContext
from kvkeep.hf.marks import Window
from kvkeep.hf.prompting import Prompting
from kvkeep.observation import Observation
from kvkeep.store import Held
from kvkeep.tasks.protocols import CONTINUATION, Sample, Task

Protocol = Literal["query-agnostic", "query-aware"]
Split = Literal["probe", "stage1", "stage2", "heldout"]
SPLITS: tuple[Split, ...] = ("probe", "stage1", "stage2", "heldout")


@dataclass(frozen=True)
class SampleSettings:
    """Which samples there are.

    Attributes:
        length: tokens of text, question, answer and chat template together.
        probe: samples of each task in that split; every task has equally many in each, so that splits are stratified.
        stage1: likewise.
        stage2: likewise.
        heldout: likewise.
        seed: of the tasks' generators.
        protocol: was the question hidden or visible when entries were evicted.
        template: use the model's chat template.
    """

    length: int
    probe: int = 1
    stage1: int = 2
    stage2: int = 6
    heldout: int = 8
    seed: int = 0
    protocol: Protocol = "query-aware"
    template: bool = True

    def __post_init__(self) -> None:
        counts = {split: getattr(self, split) for split in SPLITS}
        if min(counts["probe"], counts["stage1"], counts["stage2"]) < 1 or counts["heldout"] < 0 or self.length < 1:
            raise TaskError(
                expected="at least one sample of each task in probe, stage1 and stage2, and a length",
                received=f"{counts}, length {self.length}",
                remedy="ask for more samples",
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def split_samples(
    tasks: Iterable[Task], tokenizer: Any, settings: SampleSettings, splits: Sequence[Split] = SPLITS
) -> dict[Split, list[Sample]]:
    """The samples of each split; each task gives its first indices to the first split, the next ones to the next.

    Args:
        tasks: at least one.
        tokenizer: counts tokens.
        settings: which samples.
        splits: those that are wanted; the others keep their indices.

    Raises:
        TaskError: no task, or a length that is too small for one of them and the template.
    """
    room = settings.length - Prompting(tokenizer, settings.template).overhead
    chosen = list(tasks)
    if not chosen or room < 1:
        raise TaskError(
            expected="at least one task, and a length above that of the chat template",
            received=f"{len(chosen)} tasks, {settings.length} tokens of which {room} are left for the sample",
            remedy="name a task, or ask for more tokens",
        )
    found: dict[Split, list[Sample]] = {split: [] for split in splits}
    for task in chosen:
        first = 0
        for split in SPLITS:
            count = getattr(settings, split)
            if split in found and count:
                made = task.samples(tokenizer, length=room, count=count, seed=settings.seed, first=first)
                found[split] += [replace(sample, length=settings.length) for sample in made]
            first += count
    return found


@dataclass(frozen=True)
class Asked:
    """The tokens of a sample under a protocol.

    Attributes:
        ids: of the text that is cut.
        prompt: those that follow it before the answer, at least one.
        reference: of the first right answer.
        question: positions of the question in the text, where it is visible.
    """

    ids: tuple[int, ...]
    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    question: tuple[int, int] | None

    @classmethod
    def of(cls, sample: Sample, prompting: Prompting, protocol: Protocol) -> Asked:
        """The first question of a sample, as the benchmark asks it.

        Raises:
            TaskError: there is no reference answer, or the protocol wants a question and there is none.
        """
        context, turn = prompting.context(sample.context), sample.turns[0]
        follows = turn.metric == CONTINUATION
        if not turn.references or (follows and protocol == "query-aware"):
            raise TaskError(
                expected="a question with a reference answer" if not follows else "the protocol query-agnostic",
                received=f"{sample.task}, {protocol}",
                remedy="choose another task" if not follows else "a text that goes on asks nothing",
            )
        if follows:
            ids = prompting.continuation(context.end, turn)
            return cls(tuple(context.ids), tuple(ids[:1]), tuple(ids[1:]), None)
        asked = prompting.question(context.end, turn)
        reference = tuple(prompting.reference(turn))
        if protocol == "query-agnostic":
            return cls(tuple(context.ids), tuple(asked), reference, None)
        ids = [*context.ids, *asked]
        words = len(ids) - len(prompting.footer(turn))
        # The last token waits: an answer needs one to begin with.
        return cls(tuple(ids[:-1]), tuple(ids[-1:]), reference, (len(context.ids), max(words, len(context.ids) + 1)))


@dataclass(frozen=True)
class Facts:
    """What is known of a recorded sample beside its tensors; JSON-able.

    Attributes:
        sample: the sample's own key; it is what statistics draw.
        task: its task.
        length: tokens of the text that is cut, L.
        asked_length: the length that was asked for.
        prompt: tokens between the text and the answer.
        reference: tokens of the answer.
        question: positions of the question, where it is visible.
        protocol: of the sample.
        references: right answers, in words.
        metric: of a generated answer.
        max_new_tokens: of a generated answer.
        layers: the model's indices of the layers that can be evicted.
        scaling: factor on the dot products of each of them.
        windows_seen: tokens that each sliding layer has seen.
        full: log-probability of each token of the reference, given the full cache.
    """

    sample: str
    task: str
    length: int
    asked_length: int
    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    question: tuple[int, int] | None
    protocol: str
    references: tuple[str, ...]
    metric: str
    max_new_tokens: int
    layers: tuple[int, ...]
    scaling: tuple[float, ...]
    windows_seen: tuple[int, ...]
    full: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Facts:
        """What `to_dict` gave, read back from JSON."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        return cls(**values)

    @property
    def stratum(self) -> tuple[str, int]:
        """What means are taken within: the task at its length."""
        return self.task, self.asked_length

    @property
    def full_logprob(self) -> float:
        """Mean log-probability of the reference's tokens, given the full cache; nats."""
        return sum(self.full) / len(self.full)


@dataclass(frozen=True, eq=False)
class Recorded:
    """A sample with what the model made of its text.

    Attributes:
        facts: all but tensors.
        path: of the tensors; they are mapped into memory when they are asked for, and not pickled.
    """

    facts: Facts
    path: Path
    _loaded: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorded, (self.facts, self.path)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Everything that is on disk, by name; see `recording`."""
        if not self._loaded:
            from safetensors.torch import load_file

            self._loaded.update(load_file(self.path))
        return self._loaded

    def close(self) -> None:
        """Let go of the tensors; they are mapped again when they are asked for."""
        self._loaded.clear()

    def contexts(self, entries: int) -> list[PrefillContext]:
        """What programs see of each layer, at a budget of `entries` per cell."""
        import numpy as np

        found = []
        for ordinal in range(len(self.facts.layers)):
            start = f"contexts.{ordinal}."
            arrays = {
                name.removeprefix(start): tensor.numpy()
                for name, tensor in self.tensors.items()
                if name.startswith(start)
            }
            found.append(PrefillContext.from_arrays(arrays | {"K": np.array(entries, dtype=np.int64)}))
        return found

    def observations(self, entries: int) -> list[Observation]:
        """What built-in policies judge of each layer: the last queries are there, rotations and weights are not."""
        length = self.facts.length
        found = []
        for ordinal, layer in enumerate(self.facts.layers):
            keys, values, queries = (self.tensors[f"layers.{ordinal}.{name}"] for name in ("keys", "values", "queries"))
            count = queries.shape[2]
            found.append(
                Observation(
                    queries=queries,
                    query_positions=torch.arange(length - count, length)[None],
                    keys=keys,
                    values=values,
                    positions=self._positions.expand(1, keys.shape[1], -1),
                    valid=torch.ones(1, keys.shape[1], length, dtype=torch.bool),
                    scaling=self.facts.scaling[ordinal],
                    length=length,
                    budget=entries,
                    layer=layer,
                    ordinal=ordinal,
                    layers=len(self.facts.layers),
                    question=self.facts.question,
                )
            )
        return found

    def held(self, ordinal: int, device: Any = None) -> Held:
        """All entries of an evictable layer, for the store to cut from.

        Args:
            ordinal: which of the evictable layers.
            device: where to; None for where they are.
        """
        keys = self.tensors[f"layers.{ordinal}.keys"].to(device)
        values = self.tensors[f"layers.{ordinal}.values"].to(device)
        positions = self._positions.to(device).expand(1, keys.shape[1], -1)
        return Held((0, 1), keys, values, positions, torch.ones_like(positions, dtype=torch.bool))

    def windows(self, device: Any = None) -> list[Window]:
        """What each sliding layer held at the end of the text."""
        found: list[Window] = []
        for index, seen in enumerate(self.facts.windows_seen):
            pair = (self.tensors[f"windows.{index}.{name}"].to(device) for name in ("keys", "values"))
            found.append((*pair, seen))  # type: ignore[arg-type]
        return found

    def entries(self, budget: Budget) -> int:
        """Entries of a cell at a budget in entries or as a ratio."""
        return budget.entries_per_cell([self.facts.length], [])[0]

    @cached_property
    def _positions(self) -> Tensor:
        return torch.arange(self.facts.length)[None, None]
