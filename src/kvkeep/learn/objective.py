"""What scorers are trained and judged by, layer by layer; the same whether the model is frozen or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvkeep.learn.config import LearnError
from kvkeep.learn.loss import LossSettings, boundary_loss, sample_queries
from kvkeep.learn.measures import Choice
from kvkeep.learn.scorers import InputStatistics, KVpopScorer
from kvkeep.learn.settings import TrainSettings
from kvkeep.learn.texts import Window, as_batch
from kvkeep.learn.traces import LayerTrace, trace
from kvkeep.policies.online import Geometry

# Where gamma of a regressed score stands: its target has all the future in it and needs no decay.
_ALPHA_OF_REGRESSION = 6.0

COUNTS = ("pairs", "kept", "own", "agreed")  # of pairs, in records as shares of `pairs`


class ScorerObjective:
    """The loss of the scorers of a model.

    Args:
        scorer: of all cells.
        settings: of the run.
        geometry: of a cell.

    Attributes:
        deviation: `[C]` of each cell's target; a regression is measured by it.
    """

    def __init__(self, scorer: KVpopScorer, settings: TrainSettings, geometry: Geometry) -> None:
        self.scorer, self.settings, self.geometry = scorer, settings, geometry
        self.deviation = torch.ones(scorer.shape.cells)

    def begin(self, model: Any, windows: Sequence[Window], warm_start: str) -> None:
        """Standardise the inputs by some texts that the model reads, and set initial values.

        Args:
            model: as it is before the first step.
            windows: texts.
            warm_start: folder of a scorer to begin with; empty for none.

        Raises:
            LearnError: that scorer is of another kind, or of another model.
        """
        shape, config = self.scorer.shape, self.settings.config
        inputs = InputStatistics(shape.cells, self.scorer.scorer.size)
        targets = InputStatistics(shape.cells, 1)

        def see(layer: LayerTrace) -> None:
            cells = shape.cells_of(layer.ordinal)
            inputs.add(layer.inputs(config.inputs), cells)
            targets.add(layer.target(config)[..., None], cells)

        for window in windows:
            trace(model, as_batch(window, model.device), see)
        mean, deviation = targets.result()
        self.deviation = deviation[:, 0]
        self.scorer.scorer.standardise(inputs)
        if warm_start:
            self._warm_start(warm_start)
        elif self.settings.objective == "regression":
            with torch.no_grad():
                self.scorer.alpha.fill_(_ALPHA_OF_REGRESSION)
                for parameter_name, parameter in self.scorer.scorer.named_parameters():
                    if parameter_name == "out_bias":
                        parameter.copy_(mean[:, 0])

    def queries(self, number: int) -> Tensor:
        """Positions to compare at in the sequence of this number, the same in every run."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)
        return sample_queries(self.settings.length, self.geometry, self.settings.pairs, generator=generator)

    def learn(self, layer: LayerTrace, queries: Tensor, share: float) -> tuple[Tensor, dict[str, float]]:
        """Add the gradient of one layer of one sequence to the scorers; nothing else gets one.

        Args:
            layer: detached from the model.
            queries: to compare at.
            share: weight of the layer's loss.

        Returns:
            The scores `[B, H_kv, S - w]`, detached; and the loss times its share, and counts of pairs.
        """
        cells = self.scorer.shape.cells_of(layer.ordinal)
        target = layer.target(self.settings.config)
        sums = dict.fromkeys(COUNTS, 0.0)
        with torch.enable_grad():
            scores = self.scorer(layer.inputs(self.settings.config.inputs), cells)
            if self.settings.objective == "regression":
                loss = self._squared_error(scores, target, cells)
            else:
                gamma, at = self.scorer.log_gamma(cells), queries.to(scores.device)
                found = boundary_loss(scores, target, gamma, at, self.geometry, settings=LossSettings())
                loss = found.loss
                sums = {name: float(getattr(found, name)) for name in COUNTS}
            weighed = loss * share
            if weighed.requires_grad:  # not of a scorer that has nothing to learn
                weighed.backward()  # type: ignore[no-untyped-call]
        return scores.detach(), {"loss": float(weighed.detach()), **sums}

    def _squared_error(self, scores: Tensor, target: Tensor, cells: slice) -> Tensor:
        deviation = self.deviation[cells, None].to(scores.device)
        return (((scores - target) / deviation) ** 2).mean()

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


class HeldOut:
    """What held-out texts say of scorers: the loss, and what the cells would hold; layer by layer.

    Args:
        objective: of the run.
    """

    def __init__(self, objective: ScorerObjective) -> None:
        self._objective = objective
        self._queries = objective.queries(0)
        self._numbers: dict[str, list[float]] = {"loss": [], "squared_error": [], "agreed": []}
        self._choices: list[Choice] = []

    @torch.no_grad()
    def see(self, layer: LayerTrace) -> Tensor:
        """Take in one layer of one text; returns the static priorities `[B, H_kv, S - w]` of its entries."""
        objective = self._objective
        scorer, config, geometry = objective.scorer, objective.settings.config, objective.geometry
        cells = scorer.shape.cells_of(layer.ordinal)
        target, x = layer.target(config), layer.inputs(config.inputs)
        gamma, scores = scorer.log_gamma(cells), scorer(x, cells)
        found = boundary_loss(scores, target, gamma, self._queries.to(scores.device), geometry)
        self._numbers["loss"].append(float(found.loss))
        self._numbers["squared_error"].append(float(objective._squared_error(scores, target, cells)))
        self._numbers["agreed"].append(found.agreed / found.pairs)
        priorities = scorer.priorities(x, cells)
        self._choices.append(Choice.of(priorities.cpu(), target.cpu(), gamma.cpu(), geometry, x.shape[2]))
        return priorities

    def result(self) -> dict[str, Any]:
        """Means over texts and layers."""
        return {name: mean(numbers) for name, numbers in self._numbers.items()} | asdict(Choice.mean(self._choices))


def mean(numbers: Sequence[float]) -> float:
    """Of at least one number."""
    return sum(numbers) / len(numbers)
