"""The contracts of a policy, and the composition that most policies are: scorer + allocator + selector.

A prompt policy decides in two steps, so that a layer's dense keys and values need not outlive its attention: `judge`
reduces one layer to a `Judgement` as soon as the layer's attention is done, and `choose` turns judgements into the
entries that stay. A policy with `scope = "layer"` chooses layer by layer; one with `scope = "model"` needs all of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from kvkeep.errors import BudgetError, PolicyError
from kvkeep.observation import Needs, Observation

Scope = Literal["layer", "model"]


@dataclass(frozen=True, eq=False)
class Judgement:
    """What a policy remembers of a layer until it chooses; no keys, no values, no queries.

    Attributes:
        scores: `[B, H_kv, N]` float32, higher stays; meaningless where `valid` is false.
        positions: `[B, H_kv, N]` logical positions of the held entries, ascending.
        valid: `[B, H_kv, N]` false where a cell holds fewer than N entries.
        protected: `[B, H_kv, N]` entries that stay whatever the scores say.
        budget: entries that a cell may keep on average.
        length: logical length of the rows.
        layer: index of the layer in the model.
        ordinal: which of the `layers` layers that share the budget this is.
        layers: number of layers that share the budget.
        protects: most entries that a cell of any layer may have to protect; the same number for all layers.
        notes: what the policy had to change to stay in the budget, in words.
        weights: `[B, H_kv, N]` float32, a second number for each entry, if the selector asked for one.
    """

    scores: Tensor
    positions: Tensor
    valid: Tensor
    protected: Tensor
    budget: int
    length: int
    layer: int
    ordinal: int
    layers: int
    protects: int = 0
    notes: tuple[str, ...] = ()
    weights: Tensor | None = None

    @classmethod
    def of(cls, observation: Observation, scores: Tensor, protected: Tensor, **more: Any) -> Judgement:
        """The judgement of what was observed.

        Args:
            observation: the layer.
            scores: see above.
            protected: see above.
            more: `protects`, `notes` and `weights`.
        """
        return cls(
            scores=scores,
            positions=observation.positions,
            valid=observation.valid,
            protected=protected,
            budget=observation.budget,
            length=observation.length,
            layer=observation.layer,
            ordinal=observation.ordinal,
            layers=observation.layers,
            **more,
        )

    @property
    def available(self) -> Tensor:
        """`[B, H_kv]` entries that each cell holds."""
        return self.valid.sum(-1)

    @property
    def pinned(self) -> Tensor:
        """`[B, H_kv]` protected entries of each cell."""
        return self.protected.sum(-1)

    def ranked_scores(self) -> Tensor:
        """Scores with protected entries at `+inf` and missing ones at `-inf`, for sorting."""
        scores = self.scores.masked_fill(self.protected, torch.inf)
        return scores.masked_fill(~self.valid, -torch.inf)


@runtime_checkable
class PromptPolicy(Protocol):
    """Decides once for each piece of text that is ingested which entries stay."""

    @property
    def scope(self) -> Scope:
        """Whether `choose` needs one layer at a time or all layers at once."""
        ...

    def needs(self) -> Needs:
        """What the adapter must gather."""
        ...

    def judge(self, observation: Observation) -> Judgement:
        """Reduce one layer to what `choose` needs."""
        ...

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """For each judgement a mask `[B, H_kv, N]` of the entries that stay; at least one in each row."""
        ...


class NameOfClass:
    """What a part is called that declares no name: the words of its class, `MyScorer` -> `my-scorer`."""

    def __get__(self, part: object, kind: type) -> str:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "-", kind.__name__)
        return words.strip("_").lower()


class Scorer(ABC):
    """Gives every held entry of a layer a score. Subclasses are frozen dataclasses; their fields are the options.

    Errors and notes call them by their `name`, if none is declared by that of the class: `my-scorer` for `MyScorer`.
    """

    name: ClassVar[str] = cast(str, NameOfClass())

    @abstractmethod
    def score(self, observation: Observation) -> Tensor:
        """Scores `[B, H_kv, N]`, float32, finite on valid entries; higher stays."""

    def needs(self) -> Needs:
        """What `score` uses beyond keys and values."""
        return Needs()

    def protects(self, observation: Observation) -> tuple[int, int]:
        """How many of the first and of the last positions the policy keeps whatever the scores say: (sinks, window)."""
        return 0, 0


class Allocator(ABC):
    """Shares the budget over cells. Subclasses are frozen dataclasses; their fields are the options."""

    name: ClassVar[str] = cast(str, NameOfClass())
    scope: ClassVar[Scope] = "layer"

    def protects(self, observation: Observation) -> tuple[int, int]:
        """Like `Scorer.protects`, for allocators with a floor of their own."""
        return 0, 0

    @abstractmethod
    def allocate(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """Entries that each cell keeps, `[B, H_kv]` int64 for each judgement, protected ones included.

        A count lies between the cell's protected and its available entries; the sum never exceeds the budget.
        """


class Selector(ABC):
    """Picks the entries of a cell, given how many. Subclasses are frozen dataclasses; their fields are the options."""

    name: ClassVar[str] = cast(str, NameOfClass())

    def needs(self) -> Needs:
        """What `weights` uses beyond keys and values."""
        return Needs()

    def weights(self, observation: Observation) -> Tensor | None:
        """A second number for each entry, beside its score: `[B, H_kv, N]` float32, finite on valid entries.

        `select` finds it in the judgement. None, as here, for selectors that look at scores alone.
        """
        return None

    @abstractmethod
    def select(self, judgement: Judgement, counts: Tensor) -> Tensor:
        """A mask `[B, H_kv, N]` that keeps every protected entry and at most `counts [B, H_kv]` of each cell."""


@dataclass(frozen=True)
class Policy:
    """A prompt policy made of three parts.

    Attributes:
        scorer: how much each entry matters.
        allocator: how the budget is shared over cells.
        selector: which entries a cell keeps, given scores and a count.
    """

    scorer: Scorer
    allocator: Allocator
    selector: Selector

    @property
    def scope(self) -> Scope:
        """The allocator's: some need all layers at once."""
        return self.allocator.scope

    def needs(self) -> Needs:
        """The scorer's needs and the selector's; allocators see scores only."""
        return self.scorer.needs() | self.selector.needs()

    def judge(self, observation: Observation) -> Judgement:
        """Score one layer.

        Raises:
            PolicyError: scores or weights of the wrong shape or type, or not finite.
            BudgetError: the caller protects more entries than the budget holds.
        """
        protected, protects, notes = self._protect(observation)
        scores = self.scorer.score(observation.with_protected(protected))
        check_scores(scores, observation, self.scorer.name)
        weights = self.selector.weights(observation)
        if weights is not None:
            check_scores(weights, observation, self.selector.name)
        return Judgement.of(observation, scores, protected, protects=protects, notes=notes, weights=weights)

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """The entries that stay, a mask `[B, H_kv, N]` for each judgement."""
        counts = self.allocator.allocate(judgements)
        return [self.selector.select(judgement, count) for judgement, count in zip(judgements, counts, strict=True)]

    def _protect(self, observation: Observation) -> tuple[Tensor, int, tuple[str, ...]]:
        """The caller's protected entries and the policy's own, these shrunk to at most half of the budget.

        Returns:
            The entries `[B, H_kv, N]`, how many of them a cell may have at most in any layer, and notes.
        """
        protected = caller_protected(observation)
        pinned = observation.protected_positions
        if pinned is None:
            pinned = int(protected.sum(-1).max())
        pinned = min(pinned, observation.budget)
        sinks, window = map(max, self.scorer.protects(observation), self.allocator.protects(observation))
        if not sinks and not window:
            return protected, pinned, ()
        room = min(observation.budget // 2, observation.budget - pinned)
        kept_sinks = min(sinks, room)
        kept_window = min(window, room - kept_sinks)
        own = observation.positions < kept_sinks
        own |= observation.recent(kept_window)
        notes: tuple[str, ...] = ()
        if (kept_sinks, kept_window) != (sinks, window) and observation.budget < observation.length:
            notes = (
                f"{self.scorer.name}: {sinks} sinks and a window of {window} shrank to {kept_sinks} and {kept_window}, "
                f"half of the {observation.budget} entries per cell",
            )
        return protected | (own & observation.valid), pinned + kept_sinks + kept_window, notes


def caller_protected(observation: Observation) -> Tensor:
    """The entries that the caller protects, checked against the budget.

    Raises:
        BudgetError: a cell would have to keep more protected entries than its budget.
    """
    if observation.protected is None:
        return torch.zeros_like(observation.valid)
    protected = observation.protected & observation.valid
    pinned = int(protected.sum(-1).max())
    if pinned > observation.budget:
        raise BudgetError(
            expected=f"at most {observation.budget} protected entries per cell, the whole budget",
            received=f"{pinned} protected entries in layer {observation.layer}",
            remedy="protect fewer positions or raise the budget",
        )
    return protected


def check_scores(scores: Tensor, observation: Observation, name: str) -> None:
    """Refuse scores that are not float32, not `[B, H_kv, N]`, or not finite where an entry is held.

    Raises:
        PolicyError: naming the policy, the layer and what is wrong.
    """
    expected = tuple(observation.positions.shape)
    if tuple(scores.shape) != expected or scores.dtype != torch.float32:
        raise PolicyError(
            expected=f"float32 scores of shape {expected} from {name}",
            received=f"{scores.dtype} of shape {tuple(scores.shape)} in layer {observation.layer}",
            remedy="return one float32 score for each held entry of each KV head",
        )
    bad = int((~torch.isfinite(scores) & observation.valid).sum())
    if bad:
        raise PolicyError(
            expected=f"finite scores from {name}",
            received=f"{bad} scores that are NaN or infinite in layer {observation.layer}",
            remedy="guard divisions and logarithms; what must stay belongs to `protects`, not to a big score",
        )


def chosen_masks(policy: PromptPolicy, judgements: Sequence[Judgement]) -> list[Tensor]:
    """What a policy chooses, checked: for each judgement a mask `[B, H_kv, N]` of the entries that stay.

    Raises:
        PolicyError: too few or too many masks, one of the wrong type or shape, one that names an entry which is not
            held, or one that leaves a row without any.
    """
    masks, name = policy.choose(judgements), type(policy).__name__
    if not isinstance(masks, Sequence) or len(masks) != len(judgements):
        raise PolicyError(
            expected=f"{len(judgements)} masks from {name}, one for each judgement",
            received=f"{len(masks)}" if isinstance(masks, Sequence) else f"{type(masks).__name__}",
            remedy="return a list with a mask [B, H_kv, N] for each judgement",
        )
    for mask, judgement in zip(masks, judgements, strict=True):
        expected = tuple(judgement.valid.shape)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != expected:
            shape = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise PolicyError(
                expected=f"a boolean mask of shape {expected} from {name}",
                received=f"{shape} in layer {judgement.layer}",
                remedy="true stands for an entry that stays",
            )
        if bool((mask & ~judgement.valid).any()) or not bool(mask.flatten(1).any(1).all()):
            raise PolicyError(
                expected=f"a mask from {name} of entries that are held, at least one in each row",
                received=f"entries that are not there, or none, in layer {judgement.layer}",
                remedy="leave out what is not `valid`, and keep something",
            )
    return list(masks)


@dataclass(frozen=True)
class Full:
    """Keeps everything. The yardstick of every comparison, and the policy of layers that must not be cut."""

    name: ClassVar[str] = "full"
    scope: ClassVar[Scope] = "layer"

    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    def judge(self, observation: Observation) -> Judgement:
        """All entries alike."""
        return Judgement.of(observation, observation.zeros(), protected=observation.valid)

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """Every valid entry."""
        return [judgement.valid for judgement in judgements]


def parts(policy: Policy) -> tuple[Scorer, Allocator, Selector]:
    """The three parts, in the order in which they are written."""
    return policy.scorer, policy.allocator, policy.selector


def with_part(policy: Policy, part: Allocator | Selector) -> Policy:
    """The policy with one part exchanged."""
    if isinstance(part, Allocator):
        return replace(policy, allocator=part)
    return replace(policy, selector=part)


def require(condition: bool, expected: str, received: str, remedy: str) -> None:
    """Refuse an option of a policy that makes no sense.

    Raises:
        PolicyError: the condition does not hold.
    """
    if not condition:
        raise PolicyError(expected=expected, received=received, remedy=remedy)
