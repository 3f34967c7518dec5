"""Trains a model together with its scorers, so that it answers from what is held as it would from everything.

Each sequence is read twice: by the dense teacher, the model as it was, and by the student, under the cap that its
scorers decide (`evicting`). The student's weights follow the KL to the teacher (`distill`); the scorers follow the
ranking of the student's own attention (`objective`). No gradient goes from the one to the other: which entry stays is
not differentiable, and scorers see detached keys and values (KVpop, arXiv 2607.05061, section 4).

Two controls are trained alike: the fixed pattern of StreamingLLM, which the paper calls StreamingLLM+, and the dense
model. `accelerate launch` shares a run among several processes and devices (data parallel, or FSDP).

The folder of a run holds what that of `train` does, and the model in `model/`, ready to be loaded by its path.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.hf.convert import quiet
from kvkeep.hf.models import load_model
from kvkeep.hf.scoring import kl_divergence
from kvkeep.hf.support import unwrap
from kvkeep.learn.adapters import adapted, merged
from kvkeep.learn.checkpoint import read_checkpoint, write_checkpoint
from kvkeep.learn.config import STATE_ITEMSIZE
from kvkeep.learn.distill import Likeliest, distance, likeliest
from kvkeep.learn.evicting import Decide, evicting
from kvkeep.learn.loop import Loop, Progress, learning_rate
from kvkeep.learn.objective import HeldOut, ScorerObjective, mean
from kvkeep.learn.processes import Processes, SavedBytes
from kvkeep.learn.ranking import evict_at, static_priority
from kvkeep.learn.scorers import KVpopScorer
from kvkeep.learn.settings import Cost, FinetuneSettings
from kvkeep.learn.texts import Corpus, Window, as_batch
from kvkeep.learn.traces import LayerTrace, shape_of
from kvkeep.learn.train import facts_of, new_scorer, optimizer_of, texts_of
from kvkeep.results.keyed import KeyedLog

MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"
_PIECE = 256  # positions whose whole distributions are compared at once


@dataclass(frozen=True)
class Finetuned:
    """What came out, in the process that writes.

    Attributes:
        model: folder of the model.
        scorer: as it was saved; None of a control.
        parameters: numbers that were trained.
    """

    model: Path
    scorer: KVpopScorer | None
    parameters: int


def finetune(
    model: Any,
    tokenizer: Any,
    corpus: Corpus,
    settings: FinetuneSettings,
    out: Path,
    *,
    name: str = "",
    warm_start: str = "",
    on_cost: Callable[[Cost], None] = lambda cost: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Finetuned | None:
    """Train a model under a cap, or go on with it.

    Args:
        model: supported; it is changed. Of any dtype; what is trained is trained in it.
        tokenizer: its tokenizer.
        corpus: texts to train on, and texts to judge by.
        settings: of the run.
        out: folder, made if it is not there; the scorer is in it and the model in `model/` when this returns.
        name: of the model, for records.
        warm_start: folder of a scorer to begin with, that was trained on the frozen model.
        on_cost: told before the first step what it will take; not where a run goes on.
        on_progress: told after each step.

    Returns:
        What was saved; None in processes that do not write.

    Raises:
        LearnError: texts that are too short; a budget that holds no slot, or whole sequences; another kind of scorer to
            begin with; sequences that several processes cannot share; adapters without peft.
        ResultsError: a folder of a run with other settings, or one that another process writes to.
        UnsupportedError: a model that kvkeep has not checked.
    """
    inner = unwrap(model)
    scorer = new_scorer(inner, settings.scorers)
    windows, heldout = texts_of(corpus, tokenizer, settings.scorers)
    facts = facts_of(inner, scorer, corpus, settings.scorers, name=name, warm_start=warm_start)
    facts |= {"kind": "kvpop, the model trained with it", "finetune": settings.to_dict()}
    processes = Processes(inner.device, settings.scorers.batch, settings.scorers.sequences)
    log: AbstractContextManager[KeyedLog | None] = KeyedLog(out, facts) if processes.writes else nullcontext()
    with log as open_log:
        run = _Run(inner, scorer, settings, out, open_log, processes)
        if not run.resumed():
            run.begin(windows, warm_start, on_cost)
        run.run(windows, heldout, on_progress if processes.writes else lambda progress: None)
        return run.finish(tokenizer)


class _Run(Loop):
    def __init__(
        self,
        model: Any,
        scorer: KVpopScorer,
        settings: FinetuneSettings,
        out: Path,
        log: KeyedLog | None,
        processes: Processes,
    ) -> None:
        super().__init__(settings.scorers, log)
        self.out, self.how, self.processes = out, settings, processes
        self.geometry = settings.scorers.geometry(scorer.shape, model.dtype.itemsize)
        self.scorer = scorer.to(processes.device)
        self.objective = ScorerObjective(self.scorer, settings.scorers, self.geometry)
        self.scorer_optimizer = optimizer_of(self.scorer.parameters(), self.settings, self.settings.learning_rate)
        self.teacher: Any = None
        if settings.lora_rank is None:
            self.teacher = copy.deepcopy(model).requires_grad_(False).eval().to(processes.device)
            student = model.requires_grad_(True)
        else:
            processes.refuse_sharding("adapters")
            student = adapted(model, settings.lora_rank, self.settings.seed)
        if settings.recompute:
            _recompute(model)
        optimizer = optimizer_of(
            [p for p in student.parameters() if p.requires_grad], self.settings, settings.learning_rate
        )
        self.trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
        self.trained_bytes = sum(p.numel() * p.element_size() for p in student.parameters() if p.requires_grad)
        self.model, self.optimizer = processes.prepare(student, optimizer)
        self._training(True)

    @property
    def inner(self) -> Any:
        """The student itself, not what several processes wrap it in; adapters belong to it."""
        return self.processes.unwrapped(self.model)

    # -- beginning, going on, ending -------------------------------------------------------------------------------

    def resumed(self) -> bool:
        """Whether there is a checkpoint, which is then taken up."""
        found = read_checkpoint(self.out, self.scorer, self.scorer_optimizer)
        if found is None:
            return False
        facts, more = found
        self.step, self.objective.deviation = int(facts["step"]), more.pop("deviation")
        self.processes.take_up(self.model, self.optimizer, more)
        return True

    def begin(self, windows: Sequence[Window], warm_start: str, on_cost: Callable[[Cost], None]) -> None:
        """Statistics of the first sequences, initial values, and one sequence on trial to know what it takes."""
        if self.how.control is None:
            base = self.teacher if self.teacher is not None else unwrap(self.inner)
            self.objective.begin(base, windows[: self.settings.statistics], warm_start)
        started = time.perf_counter()
        counted = SavedBytes(self.inner)
        with counted:
            self.gradients(windows[0], 0, 1.0, last=True)
        self.begin_step()
        if self.processes.writes:
            on_cost(self._cost(time.perf_counter() - started, counted.total))
        self.save()

    def finish(self, tokenizer: Any) -> Finetuned | None:
        """Write the model, and the scorer with the model's new fingerprint."""
        folder = self.out / MODEL_FOLDER
        state = self.processes.whole_state(self.model)
        if not self.processes.writes:
            return None
        model = self.inner.eval()
        with quiet():
            if self.how.lora_rank is not None:
                model.save_pretrained(self.out / ADAPTER_FOLDER)
                model, state = merged(model), None
            model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
        if self.how.control is not None:
            return Finetuned(folder, None, self.trained)
        saved, _ = load_model(folder)
        self.scorer.zero_grad()
        self.scorer.shape = replace(self.scorer.shape, fingerprint=shape_of(saved).fingerprint)
        self.scorer.eval().save_pretrained(self.out)
        return Finetuned(folder, self.scorer, self.trained + sum(p.numel() for p in self.scorer.parameters()))

    def _cost(self, seconds: float, graph: int) -> Cost:
        learns = self.how.control is None
        numbers = sum(parameter.numel() for parameter in self.scorer.parameters()) if learns else 0
        teacher = 0 if self.teacher is None else sum(p.numel() * p.element_size() for p in self.teacher.parameters())
        looks = -(-self.settings.steps // self.settings.evaluate_every)
        # A look reads without gradients, by teacher and student, and by the student once more with nothing evicted.
        sequences = self.settings.sequences / self.processes.count + looks * self.settings.heldout
        bytes_ = 3 * self.trained_bytes + 4 * numbers * STATE_ITEMSIZE
        return Cost(self.trained + numbers, bytes_, 0, seconds * sequences, teacher, graph)

    def save(self) -> None:
        """See `Loop.save`."""
        tensors = self.processes.state_of(self.model, self.optimizer if self.step else None)
        if self.processes.writes:
            facts = {"step": self.step}
            more = {"deviation": self.objective.deviation, **tensors}
            write_checkpoint(self.out, self.scorer, self.scorer_optimizer, facts, **more)
        self.processes.wait()

    # -- steps -----------------------------------------------------------------------------------------------------

    def share_of(self, numbers: Sequence[int]) -> tuple[Sequence[int], float]:
        """See `Loop.share_of`; processes average their gradients."""
        return numbers[self.processes.index :: self.processes.count], self.processes.count / len(numbers)

    def over_all(self, sums: dict[str, float]) -> dict[str, float]:
        """See `Loop.over_all`."""
        return self.processes.averaged(sums)

    def begin_step(self) -> float:
        """See `Loop.begin_step`; the model's rate is the same at every step."""
        rate = learning_rate(self.step, self.settings)
        for group in self.scorer_optimizer.param_groups:
            group["lr"] = rate
        self.scorer_optimizer.zero_grad()
        self.optimizer.zero_grad()
        return rate

    def gradients(self, window: Window, number: int, share: float, *, last: bool) -> dict[str, float]:
        """See `Loop.gradients`."""
        ids = as_batch(window, self.processes.device)
        teacher = self._teacher(ids)
        queries = self.objective.queries(number)
        sums: dict[str, float] = {}

        def decide(layer: LayerTrace) -> Tensor:
            cells = self.scorer.shape.cells_of(layer.ordinal)
            scores, found = self.objective.learn(layer, queries, share / self.scorer.shape.layers)
            sums.update({key: sums.get(key, 0.0) + value for key, value in found.items()})
            return self._evicted(static_priority(scores, self.scorer.log_gamma(cells).detach()), ids.shape[1])

        alone = nullcontext() if last else self.processes.alone(self.model)
        with alone, self._reading(decide):
            found = distance(teacher, self._logits(ids), ids[0])
            kl, nll = found.kl.mean(), found.nll.mean()
            self.processes.backward((kl + self.how.text_loss * nll) * share)
        ranking = sums.pop("loss", 0.0)
        told = {"kl": float(kl.detach()) * share, "nll": float(nll.detach()) * share}
        loss = told["kl"] + self.how.text_loss * told["nll"] + ranking
        return {"loss": loss, **told, **({"ranking": ranking, **sums} if self.how.control is None else {})}

    def update(self) -> dict[str, float]:
        """See `Loop.update`."""
        norms = {"model_norm": self.processes.clip(self.model, self.settings.clip)}
        self.optimizer.step()
        if self.how.control is None:
            self.processes.average_gradients(self.scorer)
            norms["norm"] = float(torch.nn.utils.clip_grad_norm_(self.scorer.parameters(), self.settings.clip))
            self.scorer_optimizer.step()
        return norms

    # -- looking ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, heldout: Sequence[Window]) -> dict[str, Any]:
        """Held-out texts: KL to the teacher under the cap and with nothing evicted; and what scorers would hold."""
        found = HeldOut(self.objective)

        def decide(layer: LayerTrace) -> Tensor:
            return self._evicted(found.see(layer), layer.keys.shape[2])

        numbers: dict[str, list[float]] = {"kl": [], "nll": [], "full_nll": [], "dense_kl": []}
        self._training(False)
        for window in heldout:
            ids = as_batch(window, self.processes.device)
            with self._without_adapters() as teacher:
                expected = teacher(input_ids=ids, use_cache=False).logits[0]
            with self._reading(decide):
                held = self._logits(ids)
            numbers["full_nll"].append(self._nll(expected, ids))
            numbers["nll"].append(self._nll(held, ids))
            numbers["kl"].append(self._kl(expected, held))
            dense = held if self.how.control == "dense" else self._logits(ids)
            numbers["dense_kl"].append(self._kl(expected, dense))
        self._training(True)
        record = {name: mean(values) for name, values in numbers.items()}
        if self.how.control is None:
            told = found.result()
            record |= {"ranking": told.pop("loss"), **told}
        loss = record["kl"] + self.how.text_loss * record["nll"] + record.get("ranking", 0.0)
        return {"loss": loss, **record}

    def _kl(self, expected: Tensor, found: Tensor) -> float:
        """Of whole distributions, from the first prediction on that entries have to leave for."""
        total, last = 0.0, len(found) - 1
        for start in range(self.geometry.held, last, _PIECE):
            rows = slice(start, min(start + _PIECE, last))
            full, other = (logits[rows].float().log_softmax(-1) for logits in (expected, found))
            total += float(kl_divergence(full, other).double().sum())
        return total / (last - self.geometry.held)

    def _nll(self, logits: Tensor, ids: Tensor) -> float:
        first, total = self.geometry.held, 0.0
        for start in range(first, len(logits) - 1, _PIECE):
            stop = min(start + _PIECE, len(logits) - 1)
            told = logits[start:stop].float().log_softmax(-1).gather(1, ids[0, start + 1 : stop + 1, None])
            total -= float(told.double().sum())
        return total / (len(logits) - 1 - first)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    @torch.no_grad()
    def _teacher(self, ids: Tensor) -> Likeliest:
        with self._without_adapters() as teacher:
            return likeliest(teacher(input_ids=ids, use_cache=False).logits[0], self.how.top)

    @contextmanager
    def _without_adapters(self) -> Iterator[Any]:
        """The model as it was."""
        if self.teacher is not None:
            yield self.teacher
            return
        with self.inner.disable_adapter():
            yield unwrap(self.inner)

    def _reading(self, decide: Decide) -> AbstractContextManager[None]:
        """How the student reads: as its scorers decide, under the fixed pattern, or with nothing evicted."""
        if self.how.control == "dense":
            return nullcontext()
        return evicting(self.inner, decide if self.how.control is None else self._newest)

    def _newest(self, layer: LayerTrace) -> Tensor:
        """Sinks and the newest entries."""
        length = layer.keys.shape[2]
        positions = torch.arange(length, device=layer.keys.device, dtype=torch.float32)
        return self._evicted(positions.expand(*layer.keys.shape[:2], length), length)

    def _evicted(self, priorities: Tensor, length: int) -> Tensor:
        return evict_at(priorities, self.geometry, length)

    def _training(self, on: bool) -> None:
        """Layers are computed again only in training mode; without need for that the model's dropout stays out."""
        self.inner.train(on and self.how.recompute)


def _recompute(model: Any) -> None:
    """Let transformers compute layers again for their gradients; what that is called changed in 5.24."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
