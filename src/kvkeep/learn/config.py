"""What a KVpop policy is made of, before anything is trained: its geometry, its decay, its scorer.

Source: KVpop (arXiv 2607.05061), sections 1-3 and table 3. A cell holds B entries: s sinks, a window of w, and k slots
for the entries of highest priority among those that have left the window, `B = s + w + k` (equation 1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import KvkeepError, near_names
from kvkeep.policies.online import Geometry, quarter

SCORER_NAMES = ("mlstm", "mlp", "linear", "zero")
AGGREGATES = ("max", "mean")
FEATURES = ("hedgehog", "softmax")
INPUTS = ("cached", "unrotated", "position-free")

STATE_ITEMSIZE = 4  # bytes: a recurrent state is float32, whatever the model's type


class LearnError(KvkeepError):
    """A configuration, a geometry, a target or a scorer of KVpop that cannot be."""


@dataclass(frozen=True)
class ModelShape:
    """The part of a model that a scorer is made for.

    Attributes:
        layers: layers whose cache may be evicted; those with a sliding window do not count.
        kv_heads: KV heads of each.
        head_size: D.
        fingerprint: of the weights, as `kvkeep.hf.models.weights_identity` gives it, the same in every floating type;
            empty where it does not matter.
    """

    layers: int
    kv_heads: int
    head_size: int
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_size"):
            _check_whole(name, getattr(self, name), least=1)

    @property
    def cells(self) -> int:
        """Cells of the model, for one row."""
        return self.layers * self.kv_heads

    def cells_of(self, ordinal: int) -> slice:
        """The cells of one layer.

        Args:
            ordinal: which of the `layers`, from 0.

        Raises:
            LearnError: no such layer.
        """
        if not 0 <= ordinal < self.layers:
            raise LearnError(
                expected=f"a layer from 0 to {self.layers - 1}",
                received=f"{ordinal}",
                remedy="count the layers that may be evicted",
            )
        return slice(ordinal * self.kv_heads, (ordinal + 1) * self.kv_heads)


@dataclass(frozen=True)
class KVpopConfig:
    """Everything that training and inference must agree on.

    Attributes:
        budget: B, entries a cell, the scorer's state included where it is counted.
        sinks: s.
        window: w; None is a quarter of the budget. It is also the delay of the scorer's reading.
        scorer: `mlstm` (has a state), `mlp`, `linear`, or `zero`, which is StreamingLLM.
        width: of the scorer's inside. None: half the head size for `mlstm`; for `mlp` what has as many parameters.
        feature: map of the mLSTM's queries and keys: `hedgehog`, `[softmax(u); softmax(-u)]`, or `softmax`.
        gate_cap: soft cap `c tanh(a / c)` on the pre-activations of the mLSTM's gates; None is none. The paper has one,
            of a size that it does not give.
        skip: adds a linear map of the entry itself to the mLSTM's score (a variant that the paper names).
        delayed: whether the mLSTM reads an entry when it leaves the window (equation 41) or when it comes; then the
            scores of the window's entries are part of its state.
        inputs: what a scorer sees beside the values: keys as they are `cached`, `unrotated`, or `position-free` (the
            lengths of the pairs that a rotation turns).
        aggregate: of the target over the query heads of a group: `max` or `mean` (of probabilities).
        eps: added to the mean future attention before the logarithm. The paper does not give it.
        decay: bounds of gamma, which each cell learns between them (equation 21).
    """

    budget: int
    sinks: int = 4
    window: int | None = None
    scorer: str = "mlstm"
    width: int | None = None
    feature: str = "hedgehog"
    gate_cap: float | None = 15.0
    skip: bool = False
    delayed: bool = True
    inputs: str = "cached"
    aggregate: str = "max"
    eps: float = 1e-8
    decay: tuple[float, float] = (0.999, 0.999999)

    def __post_init__(self) -> None:
        for name, known in (
            ("scorer", SCORER_NAMES),
            ("feature", FEATURES),
            ("inputs", INPUTS),
            ("aggregate", AGGREGATES),
        ):
            _check_choice(name, getattr(self, name), known)
        _check_numbers(self)
        object.__setattr__(self, "decay", tuple(float(bound) for bound in self.decay))  # JSON has lists

    @property
    def delay(self) -> int:
        """Tokens that the scorer has read beyond the one that it scores: w, or 0 where it does not wait for them."""
        return self.protected_window if self.delayed else 0

    @property
    def protected_window(self) -> int:
        """w."""
        return quarter(self.budget) if self.window is None else self.window

    @property
    def has_state(self) -> bool:
        """Whether the scorer carries a state from token to token."""
        return self.scorer == "mlstm"

    def input_size(self, head_size: int) -> int:
        """Numbers that a scorer sees of one entry."""
        return head_size + (head_size + 1) // 2 if self.inputs == "position-free" else 2 * head_size

    def inner_width(self, head_size: int) -> int:
        """Width of the scorer's inside for heads of this size."""
        if self.width is not None:
            return self.width
        half = max(1, head_size // 2)
        if self.scorer != "mlp":
            return half
        size = self.input_size(head_size)
        return max(1, round((3 * size * half + 2 * (size + 1) + half) / (size + 2)))

    def feature_size(self, head_size: int) -> int:
        """Size of the mLSTM's queries and keys behind the feature map."""
        return self.inner_width(head_size) * (2 if self.feature == "hedgehog" else 1)

    def state_numbers(self, head_size: int) -> int:
        """float32 numbers of one cell's state: C, z and the stabiliser m; and scores that wait for their decision."""
        if not self.has_state:
            return 0
        memory = self.feature_size(head_size) * (self.inner_width(head_size) + 1) + 1
        return memory + (0 if self.delayed else self.protected_window)

    def state_entries(self, head_size: int, itemsize: int) -> int:
        """Entries that weigh as much as one cell's state, rounded up: they are taken out of the slots.

        Args:
            head_size: D.
            itemsize: bytes of one number of the cache.
        """
        return math.ceil(self.state_numbers(head_size) * STATE_ITEMSIZE / (2 * head_size * itemsize))

    def geometry(self, head_size: int, itemsize: int) -> Geometry:
        """s, w and `k = B - s - w - state entries` of a model's cells.

        Args:
            head_size: D.
            itemsize: bytes of one number of the cache: 2 for bfloat16, 4 for float32.

        Raises:
            LearnError: nothing is left for k.
        """
        state = self.state_entries(head_size, itemsize)
        window = self.protected_window
        slots = self.budget - self.sinks - window - state
        if slots < 1:
            raise LearnError(
                expected="a budget above sinks, window and state together",
                received=f"{self.budget} entries: {self.sinks} sinks, a window of {window}, a state that weighs as "
                f"much as {state} (head size {head_size}, {itemsize} bytes a number), {slots} left",
                remedy="choose a larger budget, a smaller window or width, or a scorer without a state",
            )
        return Geometry(self.sinks, window, slots, state)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON holds them."""
        return {**dataclasses.asdict(self), "decay": list(self.decay)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KVpopConfig:
        """What `to_dict` wrote.

        Raises:
            LearnError: an unknown field, a missing budget, or a value that cannot be.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                raise LearnError(
                    expected="a field of KVpopConfig", received=f"{name!r}", remedy=near_names(str(name), known)
                )
        if "budget" not in fields:
            raise LearnError(
                expected="a budget", received="fields without one", remedy="say how many entries a cell may hold"
            )
        return cls(**fields)


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise LearnError(
            expected=f"{name} to be one of {', '.join(known)}",
            received=f"{value!r}",
            remedy=near_names(str(value), known),
        )


def _check_numbers(config: KVpopConfig) -> None:
    _check_whole("budget", config.budget, least=1)
    _check_whole("sinks", config.sinks, least=0)
    for name in ("window", "width"):
        if getattr(config, name) is not None:
            _check_whole(name, getattr(config, name), least=1)
    for name in ("skip", "delayed"):
        if not isinstance(getattr(config, name), bool):
            raise _wrong(name, "true or false", getattr(config, name))
    if not _is_number(config.eps) or not 0 < config.eps < 1:
        raise _wrong("eps", "a number between 0 and 1", config.eps)
    if config.gate_cap is not None and not (_is_number(config.gate_cap) and 0 < config.gate_cap < math.inf):
        raise _wrong("gate_cap", "a positive number or None", config.gate_cap)
    bounds = config.decay
    if not (isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(_is_number(b) for b in bounds)):
        raise _wrong("decay", "two numbers", bounds)
    if not 0 < bounds[0] <= bounds[1] < 1:
        raise _wrong("decay", "0 < lower <= upper < 1", bounds)


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(name, f"a whole number of at least {least}", value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(name: str, expected: str, value: object) -> LearnError:
    return LearnError(expected=f"{name} to be {expected}", received=f"{value!r}", remedy=f"correct {name}")
