"""Rows of attention of real text: what a query really attends to, in every layer of full attention.

The model runs once, with its own attention, which `hf.substitute` lets us look at: its output is handed on unchanged,
and the rows that are wanted are computed once more from the same queries, keys and values. So a row costs no `L x L`
matrix, nothing of the model is replaced, and what the row says can be compared with what the model did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvkeep.errors import KvkeepError, UnsupportedError
from kvkeep.hf.substitute import NAMES as NAMES
from kvkeep.hf.substitute import LayerCall, Output, substituted
from kvkeep.hf.support import plan_layers, supported_decoder, unwrap
from kvkeep.lab.instance import Floats, Instance, InstanceError

MOST_DEVIATION = 4e-3  # the paper's; it expects 1e-5


class RowError(KvkeepError):
    """A row that cannot be captured, or that is not what the model computed."""


class Place(NamedTuple):
    """Where a row stands.

    Attributes:
        layer: the model's index of a layer of full attention.
        head: query head.
        position: of the query in the text, from 0; it attends to `position + 1` keys.
    """

    layer: int
    head: int
    position: int


@dataclass(frozen=True, eq=False)
class AttentionRow:
    """One captured row over N keys.

    Attributes:
        place: layer, query head, position.
        probabilities: `[N]` float64, positive, summing to 1: a softmax in float64 of products in float32.
        values: `[N, d]` float32; shared by rows of one layer and KV head, so do not write to it.
        group_mass: `[N]` float64: probabilities at this position, summed over the query heads that share the KV head.
        deviation: Euclidean distance of `probabilities @ values` to the model's output of this head and position,
            relative to the output's norm.
    """

    place: Place
    probabilities: Floats
    values: npt.NDArray[np.float32]
    group_mass: Floats
    deviation: float

    def instance(self) -> Instance:
        """The row as a problem of choice."""
        return Instance(self.probabilities, self.values.astype(np.float64))


def cells_of(model: Any) -> list[tuple[int, int]]:
    """The (layer, query head) pairs whose rows can be captured: those of full attention.

    Raises:
        UnsupportedError: a model that kvkeep has not checked, or one without a layer of full attention.
    """
    inner = unwrap(model)
    supported_decoder(inner)
    layers = [plan.index for plan in plan_layers(inner) if plan.window is None]
    if not layers:
        raise UnsupportedError(
            expected="a model with at least one layer of full attention, whose rows reach the whole text",
            received=f"{type(inner).__name__}, all of whose layers attend to a sliding window",
            remedy="choose another model; there is nothing that eviction could lose here",
        )
    heads = inner.config.get_text_config(decoder=True).num_attention_heads
    return [(layer, head) for layer in layers for head in range(heads)]


def sample_places(cells: Sequence[tuple[int, int]], positions: range, count: int, seed: Sequence[int]) -> list[Place]:
    """Rows of one text, spread over the cells: no cell has two rows more than another, and none the same row twice.

    Args:
        cells: (layer, head) pairs.
        positions: to draw from.
        count: rows.
        seed: numbers; the same ones give the same rows.

    Returns:
        `count` places, ascending.

    Raises:
        RowError: fewer rows exist.
    """
    if count > len(cells) * len(positions):
        raise RowError(
            expected=f"at most {len(cells) * len(positions):,} rows: {len(cells)} cells, {len(positions)} positions",
            received=f"{count:,}",
            remedy="ask for fewer rows, or give longer or more documents",
        )
    generator = np.random.default_rng(list(seed))
    places: list[Place] = []
    order = generator.permutation(len(cells))
    for turn, index in enumerate(order):
        rows = count // len(cells) + (turn < count % len(cells))
        drawn = generator.choice(len(positions), size=rows, replace=False)
        layer, head = cells[index]
        places += [Place(layer, head, positions[int(at)]) for at in drawn]
    return sorted(places)


@torch.no_grad()
def capture_rows(model: Any, tokens: Sequence[int], places: Sequence[Place]) -> list[AttentionRow]:
    """Run a text through the model once and capture rows of its attention.

    Args:
        model: one that kvkeep supports, with `sdpa` or `eager` attention; attached to kvkeep or not. Load it in
            float32: rows are computed in float32 from whatever queries, keys and values it has.
        tokens: of the text.
        places: rows that are wanted.

    Returns:
        A row for each place, in their order.

    Raises:
        UnsupportedError: a model that kvkeep has not checked, without full attention, or with another implementation.
        RowError: a place that is not in the model or the text; a row whose output differs from the model's by more
            than 4e-3 of its norm.
    """
    cells = set(cells_of(model))
    for place in places:
        if place[:2] not in cells or not 1 <= place.position < len(tokens):
            raise RowError(
                expected=f"a layer of full attention, a query head, and a position from 1 to {len(tokens) - 1}",
                received=f"layer {place.layer}, head {place.head}, position {place.position}",
                remedy="take cells from cells_of(model)",
            )
    inner = unwrap(model)
    capture = _Capture(set(places))
    inputs = torch.tensor([list(tokens)], dtype=torch.long, device=inner.device)
    with substituted(inner, capture.see):
        inner.get_decoder()(input_ids=inputs, use_cache=False)  # without the head: logits are not wanted
    return [capture.rows[place] for place in places]


class _Capture:
    """Rows wanted, and those found."""

    def __init__(self, wanted: set[Place]) -> None:
        self._wanted: dict[int, list[Place]] = {}
        for place in sorted(wanted):
            self._wanted.setdefault(place.layer, []).append(place)
        self.rows: dict[Place, AttentionRow] = {}

    def see(self, call: LayerCall) -> Output:
        """Take the rows of one layer, and hand on what the model itself computes."""
        result = call.former()
        self._take(call, result[0])
        return result

    def _take(self, call: LayerCall, output: Tensor) -> None:
        """From `[1, heads, L, D]` and the model's output `[1, L, H, D]`."""
        module, query, key, value, scale = call.module, call.query, call.key, call.value, call.scaling
        places = self._wanted.get(module.layer_idx, [])
        group = query.shape[1] // key.shape[1]
        values: dict[int, npt.NDArray[np.float32]] = {}
        for place in places:
            kv, end = place.head // group, place.position + 1
            if kv not in values:
                values[kv] = value[0, kv].float().cpu().contiguous().numpy()
            heads = slice(kv * group, (kv + 1) * group)
            scores = query[0, heads, place.position].float() @ key[0, kv, :end].float().T * scale
            masses = scores.double().softmax(-1).cpu().numpy()  # [G, N]
            # What underflows even in float64 is no part of the output, but a probability of the instance is positive.
            masses = np.maximum(masses, np.finfo(np.float64).tiny)
            row = masses[place.head - heads.start]
            said = output[0, place.position, place.head].double().cpu().numpy()
            deviation = _deviation(row @ values[kv][:end].astype(np.float64), said)
            if not deviation <= MOST_DEVIATION:
                raise RowError(
                    expected=f"a row whose output is the model's, within {MOST_DEVIATION:g} of its norm",
                    received=f"a difference of {deviation:.3g} in layer {place.layer}, head {place.head}, "
                    f"position {place.position} of {type(module).__name__}",
                    remedy="load the model in float32; if it is, its attention is more than softmax(q k) v, "
                    "and the laboratory cannot judge it",
                )
            self.rows[place] = AttentionRow(place, row, values[kv][:end], masses.sum(axis=0), deviation)


def _deviation(rebuilt: Floats, said: Floats) -> float:
    difference, norm = float(np.linalg.norm(rebuilt - said)), float(np.linalg.norm(said))
    return difference if norm == 0 else difference / norm


def save_rows(path: Any, row: AttentionRow) -> None:
    """Write a row as a NumPy archive: `probabilities`, `values`, `group_mass`, `place`, `deviation`; no pickles."""
    np.savez(
        path,
        probabilities=row.probabilities,
        values=row.values,
        group_mass=row.group_mass,
        place=np.array(row.place),
        deviation=np.array(row.deviation),
    )


def read_instance(path: Any) -> tuple[Instance, Floats | None]:
    """The instance in an archive of `probabilities [N]` and `values [N, d]`, and the group's mass if it is there.

    Raises:
        InstanceError: no such file, no such arrays, or no instance.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            p, v = archive["probabilities"], archive["values"]
            mass = archive.get("group_mass")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InstanceError(
            expected="a .npz archive with arrays `probabilities` [N] and `values` [N, d]",
            received=f"{path}: {error}",
            remedy="make one with `kvkeep lab rows`, or with numpy.savez",
        ) from error
    return Instance(p, v), mass
