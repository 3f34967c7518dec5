"""What a choice of entries is worth: a cache of only those, and how likely the model finds the right answer with it.

A program names positions; everything else is done here. The entries are cut from the recorded ones, and before the
model sees the cache, its entries, bytes and logical lengths are compared with what was named, on the storages
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.budget import OFFSET_BYTES, POSITION_BYTES
from kvkeep.errors import PolicyError
from kvkeep.evolve.program import Indices
from kvkeep.evolve.samples import Recorded
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.decoding import decode_batch, end_tokens
from kvkeep.hf.models import load_model
from kvkeep.hf.pools import Pool
from kvkeep.hf.scoring import batch_logprobs
from kvkeep.observation import Observation
from kvkeep.policies import PromptPolicy
from kvkeep.policies.protocols import chosen_masks
from kvkeep.tasks.metrics import score


@dataclass(frozen=True, eq=False)
class Job:
    """A choice of entries for one sample.

    Attributes:
        sample: recorded.
        kept: for each evictable layer `[1, H_kv, L]`, or `[1, 1, L]` where all heads keep the same; true stays.
    """

    sample: Recorded
    kept: tuple[Tensor, ...]


@dataclass(frozen=True)
class Reading:
    """What one sample says of a choice.

    Attributes:
        logprobs: of each token of the reference answer, nats.
        score: of the generated answer, 0 to 1, where one was generated.
        text: the generated answer.
    """

    logprobs: tuple[float, ...]
    score: float | None = None
    text: str = ""

    @property
    def logprob(self) -> float:
        """Their mean."""
        return sum(self.logprobs) / len(self.logprobs)


Reader = Callable[[Sequence[Job]], list[Reading]]


def job_of(sample: Recorded, selections: Sequence[Indices]) -> Job:
    """The job for the positions that a program named, one array of them for each evictable layer."""
    kept = []
    for indices in selections:
        mask = torch.zeros(1, 1, sample.facts.length, dtype=torch.bool)
        mask[0, 0, torch.from_numpy(np.asarray(indices, dtype=np.int64))] = True
        kept.append(mask)
    return Job(sample, tuple(kept))


def jobs_of(samples: Sequence[Recorded], selections: Sequence[Indices]) -> list[Job]:
    """The jobs for what a program named: its selections come sample by sample, layer by layer."""
    named = iter(selections)
    return [job_of(sample, [next(named) for _ in sample.facts.layers]) for sample in samples]


def job_of_policy(sample: Recorded, policy: PromptPolicy, entries: int) -> Job:
    """The job for what a built-in policy chooses, heads apart where it tells them apart.

    Args:
        sample: recorded.
        policy: one that needs no more than the last queries.
        entries: of a cell, on average.

    Raises:
        PolicyError: it needs more.
    """
    needs, have = policy.needs(), sample.tensors["layers.0.queries"].shape[2]
    few = have < sample.facts.length and (needs.queries is None or needs.queries > have)
    if few or needs.rotary or needs.output_weight or needs.second_passes:
        raise PolicyError(
            expected=f"a policy that judges by at most the last {have} queries",
            received=f"one that needs {needs}",
            remedy="nothing else of a text is recorded; choose another policy",
        )
    count = have if needs.queries is None else needs.queries
    judgements = [policy.judge(_last_queries(observation, count)) for observation in sample.observations(entries)]
    if policy.scope == "layer":
        return Job(sample, tuple(chosen_masks(policy, [judgement])[0] for judgement in judgements))
    return Job(sample, tuple(chosen_masks(policy, judgements)))


def random_job(sample: Recorded, entries: int, seed: int = 0) -> Job:
    """The job for positions drawn at random, others in each layer: what knowing nothing is worth."""
    generator = np.random.default_rng([seed, *sample.facts.sample.encode()])
    length, layers = sample.facts.length, len(sample.facts.layers)
    return job_of(sample, [generator.choice(length, size=min(entries, length), replace=False) for _ in range(layers)])


def full_job(sample: Recorded) -> Job:
    """The job that keeps everything."""
    everything = torch.ones(1, 1, sample.facts.length, dtype=torch.bool)
    return Job(sample, (everything,) * len(sample.facts.layers))


class Evaluator:
    """Reads jobs on a model.

    Args:
        model: the one that the samples were recorded with.
        tokenizer: its tokenizer.
        generate: also generate answers, and score them as the samples' tasks do.
        batch_rows: at most so many jobs are read by one forward.
    """

    def __init__(self, model: Any, tokenizer: Any, *, generate: bool = False, batch_rows: int = 16) -> None:
        self.model, self.tokenizer, self.generate, self.batch_rows = model, tokenizer, generate, batch_rows
        self._stop_tokens = end_tokens(model, tokenizer)

    def read(self, jobs: Sequence[Job]) -> list[Reading]:
        """One reading for each job, in their order; jobs may be about different samples and candidates.

        Raises:
            PolicyError: a cache that does not hold what was named, and nothing else.
        """
        return in_batches(self.batches(jobs), jobs, map(self.read_together, self._lists(jobs)))

    def read_on(self, pool: Pool) -> Reader:
        """As `read`, in a pool whose workers are made by `ReaderMaker`; batches are the same, and so are results."""

        def read(jobs: Sequence[Job]) -> list[Reading]:
            return in_batches(self.batches(jobs), jobs, pool.map(list(self._lists(jobs))))

        return read

    def cache_of(self, jobs: Sequence[Job]) -> KeepCache:
        """A cache with one row for each job, which holds the entries that it names, checked.

        Raises:
            PolicyError: as `read`.
        """
        device = self.model.device
        cache = KeepCache(self.model, "full")
        for ordinal, layer in enumerate(cache.keep_layers):
            held = [job.sample.held(ordinal, device) for job in jobs]
            masks = [job.kept[ordinal].to(device).expand_as(rows.valid) for job, rows in zip(jobs, held, strict=True)]
            layer.cut(masks, held)
        windows = [job.sample.windows(device) for job in jobs]
        joined = [
            (torch.cat([k for k, _, _ in rows]), torch.cat([v for _, v, _ in rows]), rows[0][2])
            for rows in zip(*windows, strict=True)
        ]
        lengths = [job.sample.facts.length for job in jobs]
        cache.begin_with(lengths, max(lengths), joined)
        check_cache(cache, jobs)
        return cache

    def read_together(self, jobs: Sequence[Job]) -> list[Reading]:
        """Read some jobs by one forward."""
        cache = self.cache_of(jobs)
        facts = [job.sample.facts for job in jobs]
        prompts, references = [each.prompt for each in facts], [each.reference for each in facts]
        writing = cache.fork() if self.generate else None
        found = [Reading(tuple(row.tolist())) for row in batch_logprobs(self.model, cache, prompts, references)]
        if writing is None:
            return found
        answers = decode_batch(
            self.model,
            writing,
            prompts,
            max_new_tokens=[each.max_new_tokens for each in facts],
            stop_tokens=self._stop_tokens,
        )
        texts = [str(self.tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
        return [
            Reading(reading.logprobs, score(each.metric, text, each.references), text)
            for reading, each, text in zip(found, facts, texts, strict=True)
        ]

    def batches(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Places of jobs that are read together: where windows slide, only such as need no padding."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, job in enumerate(jobs):
            facts = job.sample.facts
            alike = (facts.length, len(facts.prompt), len(facts.reference)) if facts.windows_seen else ()
            groups.setdefault(alike, []).append(place)
        return [
            places[first : first + self.batch_rows]
            for places in groups.values()
            for first in range(0, len(places), self.batch_rows)
        ]

    def _lists(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        return ([jobs[place] for place in places] for places in self.batches(jobs))


def read_side_by_side(read: Reader, jobs: Sequence[Sequence[Job]]) -> list[list[Reading]]:
    """Readings of several contestants, each with one job for each of the same samples.

    They are read sample by sample, so that rows which are read together have read the same text.

    Args:
        read: such as `Evaluator.read`.
        jobs: `[contestants][samples]`.

    Returns:
        `[contestants][samples]`.
    """
    rows = [job for of_sample in zip(*jobs, strict=True) for job in of_sample]
    found = read(rows)
    return [list(found[at :: len(jobs)]) for at in range(len(jobs))]


@dataclass(frozen=True)
class ReaderMaker:
    """Makes in another process what reads jobs there.

    Attributes:
        model: name, folder or hub id.
        dtype: of the model.
        device: of the model.
        generate: see `Evaluator`.
    """

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    generate: bool = False

    def __call__(self) -> Callable[[Sequence[Job]], list[Reading]]:
        """Load the model."""
        model, tokenizer = load_model(self.model, dtype=self.dtype, device=self.device)
        return Evaluator(model, tokenizer, generate=self.generate).read_together


def in_batches(
    batches: Sequence[Sequence[int]], jobs: Sequence[Job], found: Iterable[Sequence[Reading]]
) -> list[Reading]:
    """Readings of batches, back in the order of the jobs."""
    readings: dict[int, Reading] = {}
    for places, batch in zip(batches, found, strict=True):
        readings |= dict(zip(places, batch, strict=True))
    return [readings[place] for place in range(len(jobs))]


def check_cache(cache: KeepCache, jobs: Sequence[Job]) -> None:
    """Compare what a cache holds with what was named, by the storages and not by what anybody says.

    Args:
        cache: just made, a row for each job.
        jobs: in the order of the rows.

    Raises:
        PolicyError: other entries, other bytes, or another logical length.
    """
    expected_bytes = 0
    for ordinal, layer in enumerate(cache.keep_layers):
        store = layer.store
        named = [job.kept[ordinal].expand(1, store.kv_heads, -1).nonzero()[:, 2] for job in jobs]
        counts = torch.cat([job.kept[ordinal].sum(-1).expand(1, store.kv_heads) for job in jobs])
        held = torch.empty(0) if store.prefix is None else store.prefix.positions.cpu().long()
        if not torch.equal(held, torch.cat(named)) or not torch.equal(store.cell_counts().cpu(), counts):
            raise _not_what_was_named(f"other entries in layer {layer.index}")
        cells = len(jobs) * store.kv_heads
        expected_bytes += int(counts.sum()) * (store.entry_bytes + POSITION_BYTES) + (cells + 1) * OFFSET_BYTES
    if cache.ledger.held_bytes != expected_bytes:
        raise _not_what_was_named(f"{cache.ledger.held_bytes:,} bytes in the place of {expected_bytes:,}")
    lengths = [job.sample.facts.length for job in jobs]
    if cache.lengths != lengths:
        raise _not_what_was_named(f"logical lengths {cache.lengths} in the place of {lengths}")


def _not_what_was_named(received: str) -> PolicyError:
    return PolicyError(
        expected="a cache of the entries that were named, and of nothing else",
        received=received,
        remedy="this is a bug of kvkeep; please report it",
    )


def _last_queries(observation: Observation, count: int) -> Observation:
    """The same layer, judged by the last `count` queries: what a policy declares is what it is given."""
    first = max(0, observation.queries.shape[2] - count)
    return replace(
        observation,
        queries=observation.queries[:, :, first:],
        query_positions=observation.query_positions[:, first:],
    )
