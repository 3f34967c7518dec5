"""A trained scorer as an online policy: `kvpop:FOLDER`, or `kvpop` for the one that comes with kvkeep for a model."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.learn.config import LearnError, ModelShape
from kvkeep.learn.scorers import KVpopScorer, scorer_inputs
from kvkeep.learn.stepping import Stepper, stepper_of
from kvkeep.policies.fitting import ServedModel
from kvkeep.policies.online import Arrivals, Cells, OnlinePolicy, State, StaticPolicy, quarter
from kvkeep.store.digest import sha256_of

SHIPPED = Path(__file__).with_name("shipped")  # a folder for each scorer that comes with kvkeep
_WITH_DIGEST = re.compile(r"(.*)@([0-9a-f]{8,64})", re.DOTALL)
_SCORERS = {"kvpop": "mlstm", "kvpop-mlp": "mlp"}


@dataclass(frozen=True)
class KVpop(StaticPolicy):
    """Keeps what a trained scorer expects to be looked at.

    KVpop (arXiv 2607.05061), section 3. The priority of a token that leaves the window is `r_t - t log gamma` (equation
    20); which entries stay is then as in `kvkeep.learn.ranking`. The scorer's memory of a cell is counted in the
    cap. The cap may be another one than in training; sinks and window are those of training.

    Attributes:
        scorer: trained, or new, which makes it StreamingLLM. It is not written to; change a copy.
        place: the folder that it was read from, if that is to be found in results.
        layers: the model's indices of the layers that the scorer's cells belong to; None for all from 0 on. `fit` sets
            it.
    """

    scorer: KVpopScorer = field(compare=False, repr=False)
    place: str = field(default="", compare=False)
    layers: tuple[int, ...] | None = None
    digest: str = field(init=False)
    name: ClassVar[str] = "kvpop"

    def __post_init__(self) -> None:
        config = self.scorer.config
        facts = f"{sorted(config.to_dict().items())} {asdict(self.scorer.shape)}"
        tensors = {name: tensor.detach().cpu() for name, tensor in self.scorer.state_dict().items()}
        object.__setattr__(self, "digest", sha256_of(facts, tensors))
        # Of this policy and not of the class: only one of three kinds of inputs undoes rotations.
        object.__setattr__(self, "needs_rotary", config.inputs == "unrotated")

    @property
    def text(self) -> str | None:
        """What names this scorer and no other: `kvpop:FOLDER@` and the first digits of its digest."""
        return f"kvpop:{self.place}@{self.digest[:12]}" if self.place else None

    def fit(self, model: ServedModel) -> KVpop:
        """See `FittingPolicy.fit`.

        Raises:
            LearnError: a model that the scorer was not made for.
        """
        fingerprint = model.fingerprint() if self.scorer.shape.fingerprint else ""
        self.scorer.check_model(ModelShape(len(model.layers), model.kv_heads, model.head_size, fingerprint))
        scorer = self.scorer
        if scorer.alpha.device != model.device:
            scorer = copy.deepcopy(scorer).to(model.device)
        return replace(self, scorer=scorer, layers=model.layers)

    def protects(self, entries: int) -> tuple[int, int]:
        """Sinks and window, as in training."""
        return self.scorer.config.sinks, self.scorer.config.protected_window

    def begin(self, cells: Cells) -> State:
        """The scorer's memory of a layer."""
        device = cells.device if cells.device.type == "meta" else self.scorer.alpha.device
        return self._steppers[self._ordinal(cells.layer)].start(cells.rows, device)

    @torch.no_grad()
    def priorities(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        """See `StaticPolicy.priorities`."""
        at = self._ordinal(arrivals.layer)
        scores, after = self._steppers[at].read(*self._inputs(arrivals), state)
        return self._decayed(scores, arrivals, at), after

    @torch.no_grad()
    def step(self, arrivals: Arrivals, state: State) -> tuple[Tensor, State]:
        """See `StaticPolicy.step`."""
        at = self._ordinal(arrivals.layer)
        scores, after = self._steppers[at].step(*self._inputs(arrivals), state)
        return self._decayed(scores, arrivals, at), after

    def _inputs(self, arrivals: Arrivals) -> tuple[Tensor, Tensor]:
        kind, rotary = self.scorer.config.inputs, arrivals.rotary
        new = (arrivals.keys, arrivals.values, arrivals.positions)
        leaving = (arrivals.leaving_keys, arrivals.leaving_values, arrivals.leaving_positions)
        first, second = (
            scorer_inputs(keys, values, kind, positions=positions, rotary=rotary)
            for keys, values, positions in (new, leaving)
        )
        home = self.scorer.alpha.device
        return (first, second) if first.device == home else (first.to(home), second.to(home))

    def _decayed(self, scores: Tensor, arrivals: Arrivals, at: int) -> Tensor:
        positions = arrivals.leaving_positions[:, None].to(scores.device, torch.float32)
        return torch.addcmul(scores.float(), positions, self._falls[at], value=-1).to(arrivals.keys.device)

    @cached_property
    def _steppers(self) -> list[Stepper]:
        shape = self.scorer.shape
        return [stepper_of(self.scorer.scorer, shape.cells_of(ordinal)) for ordinal in range(shape.layers)]

    @cached_property
    def _falls(self) -> list[Tensor]:
        """`log gamma [C, 1]` of each layer."""
        shape = self.scorer.shape
        return [self.scorer.log_gamma(shape.cells_of(at)).detach().float()[:, None] for at in range(shape.layers)]

    @cached_property
    def _ordinals(self) -> Mapping[int, int]:
        known = range(self.scorer.shape.layers) if self.layers is None else self.layers
        return {layer: ordinal for ordinal, layer in enumerate(known)}

    def _ordinal(self, layer: int) -> int:
        if layer not in self._ordinals:
            raise LearnError(
                expected=f"a layer of those that the scorer was made for: {sorted(self._ordinals)}",
                received=f"{layer}",
                remedy="use the policy with the model that it was trained for",
            )
        return self._ordinals[layer]


@dataclass(frozen=True)
class ShippedKVpop(OnlinePolicy):
    """The scorer that comes with kvkeep for a model, looked up by the model's weights when a cache is made.

    Where there are several for a model, the one that was trained with the nearest cap.

    Attributes:
        kind: `kvpop`, whose scorer has a memory, or `kvpop-mlp`.
    """

    kind: str = "kvpop"
    name: ClassVar[str] = "kvpop"

    @property
    def text(self) -> str:
        """What names it."""
        return self.kind

    def protects(self, entries: int) -> tuple[int, int]:
        """The usual ones; those of the scorer are known when it is found."""
        return 4, quarter(entries)

    def fit(self, model: ServedModel) -> KVpop:
        """See `FittingPolicy.fit`.

        Raises:
            LearnError: there is none for this model.
        """
        known = [KVpopScorer.from_pretrained(path) for path in sorted(SHIPPED.glob("*")) if path.is_dir()]
        known = [scorer for scorer in known if scorer.config.scorer == _SCORERS[self.kind]]
        fingerprint = model.fingerprint() if known else ""
        suiting = [scorer for scorer in known if scorer.shape.fingerprint == fingerprint]
        if not suiting:
            raise LearnError(
                expected=f"a model that kvkeep has a trained scorer for, since {self.kind!r} names no folder",
                received=f"one without ({len(known)} of this kind come with kvkeep, for other weights)",
                remedy="train one: kvkeep train kvpop --model ... --entries ... --out FOLDER, then "
                f"--policy {self.kind}:FOLDER",
            )
        wanted = model.entries or max(scorer.config.budget for scorer in suiting)
        return KVpop(min(suiting, key=lambda scorer: abs(scorer.config.budget - wanted))).fit(model)


def kvpop(text: str) -> OnlinePolicy:
    """The policy that `kvpop:text` names.

    Args:
        text: a folder that `kvkeep train kvpop` wrote, or a repository of the hub; behind it, if it must be one certain
            scorer, `@` and the first digits of its digest. Empty: the scorer that comes with kvkeep.

    Raises:
        ModelFileError: there is no scorer.
        LearnError: there is another one.
    """
    return _named("kvpop", text)


def kvpop_mlp(text: str) -> OnlinePolicy:
    """The policy that `kvpop-mlp:text` names, whose scorer has no memory; see `kvpop`.

    Raises:
        ModelFileError: there is no scorer.
        LearnError: there is another one.
    """
    return _named("kvpop-mlp", text)


def _named(kind: str, text: str) -> OnlinePolicy:
    if not text:
        return ShippedKVpop(kind)
    match = _WITH_DIGEST.fullmatch(text)
    place, digest = match.groups() if match else (text, "")
    made = KVpop(KVpopScorer.from_pretrained(Path(place).expanduser() if Path(place).exists() else place), place)
    if not made.digest.startswith(digest):
        raise LearnError(
            expected=f"the scorer of digest {digest} in {place}",
            received=f"one of digest {made.digest[: len(digest)]}",
            remedy="it was trained again since; bring the former one back, or leave the digest out",
        )
    if kind == "kvpop-mlp" and made.scorer.config.has_state:
        raise LearnError(
            expected="a scorer without a memory for kvpop-mlp",
            received=f"{made.scorer.config.scorer} in {place}",
            remedy=f"write kvpop:{place}",
        )
    return made
