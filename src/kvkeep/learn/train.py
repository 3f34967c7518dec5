"""Trains scorers on a frozen model: text in, a folder with a scorer out.

For each sequence the model runs once; as each layer is shown, the target is computed, and the loss of the layer's cells
goes back into their scorers, so that one layer is held at a time. Scorers see detached keys and values, so their
gradient is that of the paper for a fixed backbone (KVpop, arXiv 2607.05061, section 3); the backbone does not adapt.

A folder holds `rows.jsonl` (a record for each step and each look at held-out texts), `run.json` (the settings),
`checkpoint.safetensors`, and the scorer, as `KVpopScorer.save_pretrained` writes it. The same call goes on where a
killed run stood: what is drawn at a step depends on the seed and the step alone.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep import __version__
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.support import unwrap
from kvkeep.learn.checkpoint import read_checkpoint, write_checkpoint
from kvkeep.learn.config import STATE_ITEMSIZE, LearnError
from kvkeep.learn.fidelity import stray
from kvkeep.learn.loss import LossSettings, boundary_loss, sample_queries
from kvkeep.learn.measures import Choice
from kvkeep.learn.policy import KVpop
from kvkeep.learn.scorers import InputStatistics, KVpopScorer
from kvkeep.learn.settings import Cost, TrainSettings
from kvkeep.learn.texts import Corpus, Window, as_batch, windows_of
from kvkeep.learn.traces import LayerTrace, shape_of, trace
from kvkeep.results.keyed import KeyedLog

# Where gamma of a regressed score stands: its target has all the future in it and needs no decay.
_ALPHA_OF_REGRESSION = 6.0


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: done.
        steps: in all.
        loss: of the last step.
        seconds_left: at the speed so far.
        look: what held-out texts said last; None before the first look.
    """

    step: int
    steps: int
    loss: float
    seconds_left: float
    look: dict[str, Any] | None


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
    shape = shape_of(inner)
    geometry = settings.geometry(shape, inner.dtype.itemsize)
    needed = max(settings.sequences, settings.statistics)
    windows = windows_of(corpus.train, tokenizer, length=settings.length, count=needed, part="training")
    heldout = windows_of(corpus.heldout, tokenizer, length=settings.length, count=settings.heldout, part="held-out")
    facts = {
        "kind": "kvpop",
        "model": name,
        "model_fingerprint": shape.fingerprint,
        "dtype": str(inner.dtype).removeprefix("torch."),
        "corpus": corpus.name,
        "digest": corpus.digest,
        "warm_start": warm_start,
        "geometry": asdict(geometry),
        "settings": settings.to_dict(),
        "version": __version__,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        scorer = KVpopScorer(settings.config, shape).to(inner.device)
    with KeyedLog(out, facts) as log:
        run = _Run(inner, scorer, settings, out, log)
        if not run.resumed():
            run.begin(windows, warm_start, on_cost)
        run.steps(windows, heldout, on_progress)
        scorer.zero_grad()
        scorer.eval().save_pretrained(out)
    return scorer


class _Run:
    def __init__(self, model: Any, scorer: KVpopScorer, settings: TrainSettings, out: Path, log: KeyedLog) -> None:
        self.model, self.scorer, self.settings, self.out, self.log = model, scorer, settings, out, log
        self.geometry = settings.geometry(scorer.shape, model.dtype.itemsize)
        self.step = 0
        self.deviation = torch.ones(scorer.shape.cells)  # of each cell's target
        self.optimizer = torch.optim.AdamW(
            scorer.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )

    # -- beginning and going on ------------------------------------------------------------------------------------

    def resumed(self) -> bool:
        """Whether there is a checkpoint, which is then taken up."""
        found = read_checkpoint(self.out, self.scorer, self.optimizer)
        if found is None:
            return False
        facts, more = found
        self.step, self.deviation = int(facts["step"]), more["deviation"]
        return True

    def begin(self, windows: Sequence[Window], warm_start: str, on_cost: Callable[[Cost], None]) -> None:
        """Statistics of the first sequences, initial values, and one sequence on trial to know how long it takes."""
        settings, shape, config = self.settings, self.scorer.shape, self.settings.config
        inputs = InputStatistics(shape.cells, self.scorer.scorer.size)
        targets = InputStatistics(shape.cells, 1)

        def see(layer: LayerTrace) -> None:
            cells = shape.cells_of(layer.ordinal)
            inputs.add(layer.inputs(config.inputs), cells)
            targets.add(layer.target(config)[..., None], cells)

        for window in windows[: settings.statistics]:
            trace(self.model, as_batch(window, self.model.device), see)
        mean, deviation = targets.result()
        self.deviation = deviation[:, 0]
        self.scorer.scorer.standardise(inputs)
        if warm_start:
            self._warm_start(warm_start)
        elif settings.objective == "regression":
            with torch.no_grad():
                self.scorer.alpha.fill_(_ALPHA_OF_REGRESSION)
                for parameter_name, parameter in self.scorer.scorer.named_parameters():
                    if parameter_name == "out_bias":
                        parameter.copy_(mean[:, 0])
        started = time.perf_counter()
        self._sequence(windows[0], 0, 1.0)
        self.optimizer.zero_grad()
        on_cost(self._cost(time.perf_counter() - started))
        self._save()

    def _warm_start(self, folder: str) -> None:
        given = KVpopScorer.from_pretrained(folder, model=self.scorer.shape)
        ours, theirs = ({**c.to_dict()} for c in (self.scorer.config, given.config))
        free = {"budget", "sinks", "window", "aggregate", "eps", "decay", "delayed"}
        differing = sorted(key for key in ours if key not in free and ours[key] != theirs[key])
        if differing:
            raise LearnError(
                expected="a scorer of the same kind to begin with",
                received=f"{folder}, with another {', '.join(differing)}",
                remedy=f"train with its {', '.join(f'{key}={theirs[key]}' for key in differing)}",
            )
        self.scorer.load_state_dict(given.state_dict())

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

    def steps(
        self, windows: Sequence[Window], heldout: Sequence[Window], on_progress: Callable[[Progress], None]
    ) -> None:
        """All that are left."""
        settings = self.settings
        started, first = time.perf_counter(), self.step
        looks = [record for record in self.log.records if record["key"].startswith("look")]
        look = looks[-1] if looks else None
        while self.step < settings.steps:
            loss = self._step(windows)
            last = self.step == settings.steps
            if last or self.step % settings.evaluate_every == 0:
                look = self._look(heldout)
            if last or self.step % settings.checkpoint_every == 0:
                self._save()
            pace = (time.perf_counter() - started) / (self.step - first)
            on_progress(Progress(self.step, settings.steps, loss, pace * (settings.steps - self.step), look))

    def _step(self, windows: Sequence[Window]) -> float:
        settings, started = self.settings, time.perf_counter()
        first = self.step * settings.batch
        numbers = range(first, min(first + settings.batch, settings.sequences))
        rate = learning_rate(self.step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        sums: dict[str, float] = {}
        for number in numbers:
            window = windows[place_of(number, len(windows), settings.seed)]
            for key, value in self._sequence(window, number, 1 / len(numbers)).items():
                sums[key] = sums.get(key, 0.0) + value
        norm = float(torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), settings.clip))
        self.optimizer.step()
        self.step += 1
        loss = sums.pop("loss")
        if not math.isfinite(loss):
            raise LearnError(
                expected="a finite loss",
                received=f"{loss} in step {self.step}",
                remedy="a lower --learning-rate; the checkpoint before it is still there",
            )
        pairs = sums.pop("pairs", 0)
        record: dict[str, Any] = {"key": f"step-{self.step:06d}", "step": self.step, "loss": loss, "norm": norm}
        record |= {name: count / pairs for name, count in sums.items()} if pairs else {}
        record |= {"rate": rate, "seconds": round(time.perf_counter() - started, 3)}
        self.log.append(record)
        return loss

    def _sequence(self, window: Window, number: int, share: float) -> dict[str, float]:
        """Add the gradient of one sequence, and return sums over its layers; the loss in the mean over them."""
        settings, shape, config = self.settings, self.scorer.shape, self.settings.config
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
        queries = sample_queries(settings.length, self.geometry, settings.pairs, generator=generator)
        sums = {"loss": 0.0, "pairs": 0.0, "kept": 0.0, "own": 0.0, "agreed": 0.0}

        def see(layer: LayerTrace) -> None:
            cells = shape.cells_of(layer.ordinal)
            target = layer.target(config)
            with torch.enable_grad():
                scores = self.scorer(layer.inputs(config.inputs), cells)
                if settings.objective == "regression":
                    loss = self._squared_error(scores, target, cells)
                else:
                    gamma = self.scorer.log_gamma(cells)
                    found = boundary_loss(
                        scores, target, gamma, queries.to(scores.device), self.geometry, settings=LossSettings()
                    )
                    loss = found.loss
                    for name in ("pairs", "kept", "own", "agreed"):
                        sums[name] += getattr(found, name)
                weighed = loss * (share / shape.layers)
                if weighed.requires_grad:  # not of a scorer that has nothing to learn
                    weighed.backward()  # type: ignore[no-untyped-call]
            sums["loss"] += float(weighed.detach())

        trace(self.model, as_batch(window, self.model.device), see)
        return sums

    def _squared_error(self, scores: Tensor, target: Tensor, cells: slice) -> Tensor:
        deviation = self.deviation[cells, None].to(scores.device)
        return (((scores - target) / deviation) ** 2).mean()

    # -- looking ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _look(self, heldout: Sequence[Window]) -> dict[str, Any]:
        """Held-out texts: the loss, what the cells would hold, and KL of what the model says under the cache."""
        settings, shape, config = self.settings, self.scorer.shape, self.settings.config
        queries = sample_queries(
            settings.length, self.geometry, settings.pairs, generator=torch.Generator().manual_seed(settings.seed)
        )
        losses, errors, agreed, choices = [], [], [], []

        def see(layer: LayerTrace) -> None:
            cells = shape.cells_of(layer.ordinal)
            target, x = layer.target(config), layer.inputs(config.inputs)
            gamma, scores = self.scorer.log_gamma(cells), self.scorer(x, cells)
            found = boundary_loss(scores, target, gamma, queries.to(scores.device), self.geometry)
            losses.append(float(found.loss))
            errors.append(float(self._squared_error(scores, target, cells)))
            agreed.append(found.agreed / found.pairs)
            priorities = self.scorer.priorities(x, cells)
            choices.append(Choice.of(priorities.cpu(), target.cpu(), gamma.cpu(), self.geometry, x.shape[2]))

        for window in heldout:
            trace(self.model, as_batch(window, self.model.device), see)
        record: dict[str, Any] = {
            "key": f"look-{self.step:06d}",
            "step": self.step,
            "loss": _mean(losses),
            "squared_error": _mean(errors),
            "agreed": _mean(agreed),
            **asdict(Choice.mean(choices)),
        }
        if settings.divergence:
            record |= self._divergence(heldout[: settings.divergence])
        self.log.append(record)
        return record

    def _divergence(self, texts: Sequence[Window]) -> dict[str, float]:
        policy = KVpop(copy.deepcopy(self.scorer))
        found = []
        for window in texts:
            cache = KeepCache(self.model, policy, entries=self.settings.config.budget)
            ids = as_batch(window, self.model.device)
            found.append(stray(self.model, ids, {"kvpop": cache}, self.geometry.held)["kvpop"])
        return {
            "kl": _mean([one.kl for one in found]),
            "nll": _mean([one.nll for one in found]),
            "full_nll": _mean([one.full_nll for one in found]),
        }

    def _save(self) -> None:
        write_checkpoint(self.out, self.scorer, self.optimizer, {"step": self.step}, deviation=self.deviation)


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Of a step, from 0: a linear rise, then a cosine down to the final rate."""
    warm_up = settings.warm_up_steps
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    share = (step - warm_up) / max(1, settings.steps - warm_up)
    low, high = min(settings.final_learning_rate, settings.learning_rate), settings.learning_rate
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2


def place_of(number: int, count: int, seed: int) -> int:
    """Which of `count` texts sequence `number` is: all of them in a new order, again and again."""
    turn, place = divmod(number, count)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    return int(torch.randperm(count, generator=generator)[place])


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
