"""Trains scorers on a frozen model: text in, a folder with a scorer out.

For each sequence the model runs once; as each layer is shown, the target is computed, and the loss of the layer's cells
goes back into their scorers, so that one layer is held at a time. Scorers see detached keys and values, so their
gradient is that of the paper for a fixed backbone (KVpop, arXiv 2607.05061, section 3); the backbone does not adapt
(`finetune` is where it does).

A folder holds `rows.jsonl` (a record for each step and each look at held-out texts), `run.json` (the settings),
`checkpoint.safetensors`, and the scorer, as `KVpopScorer.save_pretrained` writes it. The same call goes on where a
killed run stood: what is drawn at a step depends on the seed and the step alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvkeep import __version__
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.support import unwrap
from kvkeep.learn.checkpoint import read_checkpoint, write_checkpoint
from kvkeep.learn.config import STATE_ITEMSIZE
from kvkeep.learn.fidelity import stray
from kvkeep.learn.loop import Loop, Progress, learning_rate
from kvkeep.learn.objective import HeldOut, ScorerObjective, mean
from kvkeep.learn.policy import KVpop
from kvkeep.learn.scorers import KVpopScorer
from kvkeep.learn.settings import Cost, TrainSettings
from kvkeep.learn.texts import Corpus, Window, as_batch, windows_of
from kvkeep.learn.traces import LayerTrace, shape_of, trace
from kvkeep.results.keyed import KeyedLog


def train(
    model: Any,
    tokenizer: Any,
    corpus: Corpus,
    settings: TrainSettings,
    out: Path,
    *,
    name: str = "",
    warm_start: str = "",
    on_cost: Callable[[Cost], None] = lambda cost: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> KVpopScorer:
    """Train scorers for every cell of a model, or go on with it.

    Args:
        model: supported, of any dtype; it is not changed.
        tokenizer: its tokenizer.
        corpus: texts to train on, and texts to judge by.
        settings: of the run.
        out: folder, made if it is not there; the scorer is in it when this returns.
        name: of the model, for records.
        warm_start: folder of a scorer to begin with, of the same kind; such as one that was regressed.
        on_cost: told before the first step what it will take; not where a run goes on.
        on_progress: told after each step.

    Returns:
        The scorer, as it was saved.

    Raises:
        LearnError: texts that are too short; a budget that holds no slot, or whole sequences; another kind of scorer to
            begin with.
        ResultsError: a folder of a run with other settings, or one that another process writes to.
        UnsupportedError: a model that kvkeep has not checked.
    """
    inner = unwrap(model)
    scorer = new_scorer(inner, settings)
    windows, heldout = texts_of(corpus, tokenizer, settings)
    with KeyedLog(out, facts_of(inner, scorer, corpus, settings, name=name, warm_start=warm_start)) as log:
        run = _Run(inner, scorer, settings, out, log)
        if not run.resumed():
            run.begin(windows, warm_start, on_cost)
        run.run(windows, heldout, on_progress)
        scorer.zero_grad()
        scorer.eval().save_pretrained(out)
    return scorer


def new_scorer(model: Any, settings: TrainSettings) -> KVpopScorer:
    """An untrained scorer for a model, the same for the same seed.

    Raises:
        LearnError: sequences that fit into a cell, or a cell without a slot.
    """
    shape = shape_of(model)
    settings.geometry(shape, model.dtype.itemsize)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return KVpopScorer(settings.config, shape).to(model.device)


def texts_of(corpus: Corpus, tokenizer: Any, settings: TrainSettings) -> tuple[list[Window], list[Window]]:
    """The pieces to train on, and those to judge by.

    Raises:
        LearnError: texts that are too short.
    """
    needed = max(settings.sequences, settings.statistics)
    return (
        windows_of(corpus.train, tokenizer, length=settings.length, count=needed, part="training"),
        windows_of(corpus.heldout, tokenizer, length=settings.length, count=settings.heldout, part="held-out"),
    )


def facts_of(
    model: Any, scorer: KVpopScorer, corpus: Corpus, settings: TrainSettings, *, name: str, warm_start: str
) -> dict[str, Any]:
    """What the numbers of a run hang on."""
    return {
        "kind": "kvpop",
        "model": name,
        "model_fingerprint": scorer.shape.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "corpus": corpus.name,
        "digest": corpus.digest,
        "warm_start": warm_start,
        "geometry": asdict(settings.geometry(scorer.shape, model.dtype.itemsize)),
        "settings": settings.to_dict(),
        "version": __version__,
    }


def optimizer_of(parameters: Any, settings: TrainSettings, rate: float) -> torch.optim.AdamW:
    """The paper's optimizer."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay)


class _Run(Loop):
    def __init__(self, model: Any, scorer: KVpopScorer, settings: TrainSettings, out: Path, log: KeyedLog) -> None:
        super().__init__(settings, log)
        self.model, self.scorer, self.out = model, scorer, out
        self.geometry = settings.geometry(scorer.shape, model.dtype.itemsize)
        self.objective = ScorerObjective(scorer, settings, self.geometry)
        self.optimizer = optimizer_of(scorer.parameters(), settings, settings.learning_rate)

    # -- beginning and going on ------------------------------------------------------------------------------------

    def resumed(self) -> bool:
        """Whether there is a checkpoint, which is then taken up."""
        found = read_checkpoint(self.out, self.scorer, self.optimizer)
        if found is None:
            return False
        facts, more = found
        self.step, self.objective.deviation = int(facts["step"]), more["deviation"]
        return True

    def begin(self, windows: Sequence[Window], warm_start: str, on_cost: Callable[[Cost], None]) -> None:
        """Statistics of the first sequences, initial values, and one sequence on trial to know how long it takes."""
        self.objective.begin(self.model, windows[: self.settings.statistics], warm_start)
        started = time.perf_counter()
        self.gradients(windows[0], 0, 1.0, last=True)
        self.optimizer.zero_grad()
        on_cost(self._cost(time.perf_counter() - started))
        self.save()

    def _cost(self, seconds: float) -> Cost:
        settings, shape = self.settings, self.scorer.shape
        numbers = sum(parameter.numel() for parameter in self.scorer.parameters())
        config = self.model.config.get_text_config(decoder=True)
        vectors = config.num_attention_heads + 2 * shape.kv_heads
        layer = settings.length * (
            vectors * shape.head_size * self.model.dtype.itemsize
            + shape.kv_heads * self.scorer.scorer.size * STATE_ITEMSIZE
        )
        looks = -(-settings.steps // settings.evaluate_every)
        # A look reads its texts as training does, and some of them twice more, in pieces and with the head.
        sequences = settings.sequences + looks * (settings.heldout + 3 * settings.divergence)
        return Cost(numbers, 4 * numbers * STATE_ITEMSIZE, layer, seconds * sequences)

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> float:
        """See `Loop.begin_step`."""
        rate = learning_rate(self.step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        return rate

    def gradients(self, window: Window, number: int, share: float, *, last: bool) -> dict[str, float]:
        """See `Loop.gradients`; of one sequence in the mean over its layers."""
        queries = self.objective.queries(number)
        sums: dict[str, float] = {}

        def see(layer: LayerTrace) -> None:
            _, found = self.objective.learn(layer, queries, share / self.scorer.shape.layers)
            sums.update({key: sums.get(key, 0.0) + value for key, value in found.items()})

        trace(self.model, as_batch(window, self.model.device), see)
        return sums

    def update(self) -> dict[str, float]:
        """See `Loop.update`."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), self.settings.clip))
        self.optimizer.step()
        return {"norm": norm}

    # -- looking ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, heldout: Sequence[Window]) -> dict[str, Any]:
        """Held-out texts: the loss, what the cells would hold, and KL of what the model says under the cache."""
        found = HeldOut(self.objective)
        for window in heldout:
            trace(self.model, as_batch(window, self.model.device), found.see)
        count = self.settings.divergence
        return found.result() | (self._divergence(heldout[:count]) if count else {})

    def _divergence(self, texts: Sequence[Window]) -> dict[str, float]:
        policy = KVpop(copy.deepcopy(self.scorer))
        found = []
        for window in texts:
            cache = KeepCache(self.model, policy, entries=self.settings.config.budget)
            ids = as_batch(window, self.model.device)
            found.append(stray(self.model, ids, {"kvpop": cache}, self.geometry.held)["kvpop"])
        return {
            "kl": mean([one.kl for one in found]),
            "nll": mean([one.nll for one in found]),
            "full_nll": mean([one.full_nll for one in found]),
        }

    def save(self) -> None:
        """See `Loop.save`."""
        facts = {"step": self.step}
        write_checkpoint(self.out, self.scorer, self.optimizer, facts, deviation=self.objective.deviation)
