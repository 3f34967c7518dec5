"""The steps of a training run, its looks at held-out texts and its checkpoints; a run that goes on has the same ones.

What is drawn at a step depends on the seed and the step alone. A run may be shared by several processes, each of which
takes its part of a step's sequences; one of them writes.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.learn.config import LearnError
from kvkeep.learn.objective import COUNTS
from kvkeep.learn.settings import TrainSettings
from kvkeep.learn.texts import Window
from kvkeep.results.keyed import KeyedLog


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


class Loop(ABC):
    """A run.

    Args:
        settings: of the run.
        log: where records go; None in a process that does not write.
    """

    def __init__(self, settings: TrainSettings, log: KeyedLog | None) -> None:
        self.settings, self.log = settings, log
        self.step = 0

    @abstractmethod
    def gradients(self, window: Window, number: int, share: float, *, last: bool) -> dict[str, float]:
        """Add the gradient of one sequence.

        Args:
            window: the sequence.
            number: which one of the run it is.
            share: its weight in the step.
            last: whether it is the last of the step, in this process.

        Returns:
            Sums over the step's sequences are the numbers of its record; `loss` and others times their share, counts of
            pairs as they are.
        """

    @abstractmethod
    def update(self) -> dict[str, float]:
        """Change what is trained by its gradients, which are clipped and then gone; returns their norms."""

    @abstractmethod
    def look(self, heldout: Sequence[Window]) -> dict[str, Any]:
        """What held-out texts say."""

    @abstractmethod
    def save(self) -> None:
        """Write a checkpoint of this step."""

    @abstractmethod
    def begin_step(self) -> float:
        """Set learning rates, forget former gradients; returns the rate of the scorers."""

    def share_of(self, numbers: Sequence[int]) -> tuple[Sequence[int], float]:
        """This process's sequences of a step, and the weight of each in its mean."""
        return numbers, 1 / len(numbers)

    def over_all(self, sums: dict[str, float]) -> dict[str, float]:
        """The sums of all processes."""
        return sums

    def run(
        self, windows: Sequence[Window], heldout: Sequence[Window], on_progress: Callable[[Progress], None]
    ) -> None:
        """All steps that are left.

        Raises:
            LearnError: a loss that is not finite.
        """
        settings = self.settings
        started, first = time.perf_counter(), self.step
        records = [] if self.log is None else self.log.records
        looks = [record for record in records if record["key"].startswith("look")]
        look = looks[-1] if looks else None
        while self.step < settings.steps:
            loss = self._step(windows)
            last = self.step == settings.steps
            if last or self.step % settings.evaluate_every == 0:
                look = {"key": f"look-{self.step:06d}", "step": self.step, **self.look(heldout)}
                self._append(look)
            if last or self.step % settings.checkpoint_every == 0:
                self.save()
            pace = (time.perf_counter() - started) / (self.step - first)
            on_progress(Progress(self.step, settings.steps, loss, pace * (settings.steps - self.step), look))

    def _step(self, windows: Sequence[Window]) -> float:
        settings, started = self.settings, time.perf_counter()
        first = self.step * settings.batch
        numbers, share = self.share_of(range(first, min(first + settings.batch, settings.sequences)))
        rate = self.begin_step()
        sums: dict[str, float] = {}
        for place, number in enumerate(numbers, start=1):
            window = windows[place_of(number, len(windows), settings.seed)]
            found = self.gradients(window, number, share, last=place == len(numbers))
            sums = {key: sums.get(key, 0.0) + value for key, value in found.items()}
        sums = self.over_all(sums)
        loss = sums.pop("loss")
        if not math.isfinite(loss):
            raise LearnError(
                expected="a finite loss",
                received=f"{loss} in step {self.step + 1}",
                remedy="a lower learning rate; the last checkpoint is still there",
            )
        norms = self.update()
        self.step += 1
        counts = {name: sums.pop(name) for name in COUNTS if name in sums}
        pairs = counts.pop("pairs", 0)
        record: dict[str, Any] = {"key": f"step-{self.step:06d}", "step": self.step, "loss": loss, **sums, **norms}
        record |= {name: count / pairs for name, count in counts.items()} if pairs else {}
        record |= {"rate": rate, "seconds": round(time.perf_counter() - started, 3)}
        self._append(record)
        return loss

    def _append(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.append(record)


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
