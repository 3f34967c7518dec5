"""What an audit found, as a few short tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvkeep.budget import ratio_to_entries
from kvkeep.lab.audit_contrasts import Contrast, contrasts
from kvkeep.lab.audit_settings import OWN, PROTOCOLS
from kvkeep.lab.audit_storage import STORAGES
from kvkeep.results import FULL, Row


@dataclass(frozen=True)
class Weight:
    """What a policy's cache weighed after a prompt of its own; bytes.

    Attributes:
        policy: its name.
        ratio: the nominal compression ratio.
        length: tokens of the prompt.
        entries: held, over all cells.
        entries_full: of the full cache.
        nominal_bytes: keys and values of the entries that the ratio leaves.
        payload_bytes: keys and values of the kept entries.
        slack_bytes: reserved, unused.
        metadata_bytes: offsets and positions.
        state_bytes: a scorer's memory.
        held_bytes: all four, when the prompt has been processed.
        window_bytes: of sliding layers, apart.
        peak_bytes: the most held at once on the way.
        full_bytes: of the full cache.
        weighed_bytes: of all storages that the cache keeps alive, by `measure_bytes`, windows included.
    """

    policy: str
    ratio: float
    length: int
    entries: int
    entries_full: int
    nominal_bytes: int
    payload_bytes: int
    slack_bytes: int
    metadata_bytes: int
    state_bytes: int
    held_bytes: int
    window_bytes: int
    peak_bytes: int
    full_bytes: int
    weighed_bytes: int


@dataclass(frozen=True)
class StorageMean:
    """A selection stored in one way: means over texts.

    Attributes:
        protocol: `hidden`, `visible` or `document`.
        policy: its name; `full` for the full cache.
        ratio: the nominal compression ratio.
        storage: one of `STORAGES`.
        texts: contexts.
        held_bytes: weighed.
        nominal_bytes: keys and values of the entries that the ratio leaves.
        times_nominal: held / nominal.
        fraction: held / full.
        kl_text: divergence from the full cache's predictions of real text, nats a token; None where none was read.
        score: of the answers, 0 to 1; None without a question.
        kl_answer: divergence along the right answer.
    """

    protocol: str
    policy: str
    ratio: float
    storage: str
    texts: int
    held_bytes: float
    nominal_bytes: float
    times_nominal: float
    fraction: float
    kl_text: float | None
    score: float | None
    kl_answer: float | None


@dataclass(frozen=True)
class Masking:
    """One selection hidden by a mask, against the same one deleted.

    Attributes:
        compared: selections, each with what it was asked.
        questions: those of them with an answer.
        same_answers: of these, how many were answered in the same words.
        largest_kl_difference: between the two divergences from the full cache, nats.
        bytes_ratio: held with the mask / held without the entries, mean.
    """

    compared: int
    questions: int
    same_answers: int
    largest_kl_difference: float
    bytes_ratio: float


@dataclass(frozen=True)
class Summary:
    """The tables of an audit.

    Attributes:
        weights: one for each policy and ratio.
        stored: by protocol, policy, ratio and storage, in the order of the run.
        masking: None where nothing was compared.
        contrasts: what enforcement costs and a visible question is worth.
    """

    weights: tuple[Weight, ...]
    stored: tuple[StorageMean, ...]
    masking: Masking | None
    contrasts: tuple[Contrast, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "weights": [asdict(weight) for weight in self.weights],
            "stored": [asdict(stored) for stored in self.stored],
            "masking": None if self.masking is None else asdict(self.masking),
            "contrasts": [asdict(contrast) for contrast in self.contrasts],
        }


def summarise(rows: Iterable[Row]) -> Summary:
    """The tables of the rows of an audit; rows of anything else are left out."""
    known = [row for row in rows if row.options.get("storage") in (*STORAGES, OWN)]
    asked = [row for row in known if row.options["storage"] != OWN]
    groups: dict[tuple[str, str, float, str], list[Row]] = {}
    for row in asked:
        place = (str(row.options["ranking"]), row.policy, row.budget["compression_ratio"], str(row.options["storage"]))
        groups.setdefault(place, []).append(row)
    order = [*PROTOCOLS], [*STORAGES]
    policies = list(dict.fromkeys(row.policy for row in asked))
    places = sorted(
        groups, key=lambda p: (order[0].index(p[0]), p[1] != FULL, policies.index(p[1]), p[2], order[1].index(p[3]))
    )
    return Summary(
        weights=tuple(_weight(row) for row in known if row.options["storage"] == OWN),
        stored=tuple(_stored(*place, groups[place]) for place in places),
        masking=_masking(asked),
        contrasts=tuple(contrasts(asked)),
    )


def nominal_bytes(row: Row) -> int:
    """Keys and values of the entries that the ratio leaves: as many in each cell."""
    length = row.memory.logical_length
    return row.memory.full_bytes * ratio_to_entries(length, row.budget["compression_ratio"]) // length


def _weight(row: Row) -> Weight:
    memory = row.memory
    names = ("entries", "entries_full", *(f"{part}_bytes" for part in ("payload", "slack", "metadata", "state")))
    names += ("held_bytes", "window_bytes", "peak_bytes", "full_bytes")
    return Weight(
        policy=row.policy,
        ratio=row.budget["compression_ratio"],
        length=memory.logical_length,
        nominal_bytes=nominal_bytes(row),
        weighed_bytes=int(row.options["weighed_bytes"]),
        **{name: getattr(memory, name) for name in names},
    )


def _stored(protocol: str, policy: str, ratio: float, storage: str, rows: Sequence[Row]) -> StorageMean:
    text = [row for row in rows if row.fidelity.nll is not None]
    asked = [row for row in rows if row.fidelity.nll is None]
    held, nominal = _sum(row.memory.held_bytes for row in rows), _sum(nominal_bytes(row) for row in rows)
    return StorageMean(
        protocol=protocol,
        policy=policy,
        ratio=ratio,
        storage=storage,
        texts=len({row.cluster for row in rows}),
        held_bytes=held / len(rows),
        nominal_bytes=nominal / len(rows),
        times_nominal=held / nominal,
        fraction=held / _sum(row.memory.full_bytes for row in rows),
        kl_text=_mean([row.fidelity.kl for row in text]),
        score=_mean([row.score for row in asked]),
        kl_answer=_mean([row.fidelity.kl for row in asked]),
    )


def _masking(rows: Sequence[Row]) -> Masking | None:
    def found(storage: str) -> dict[tuple[Any, ...], Row]:
        mine = [row for row in rows if row.options["storage"] == storage and row.policy != FULL]
        return {
            (row.cluster, row.turn, row.policy, row.budget["compression_ratio"], row.options["ranking"]): row
            for row in mine
        }

    masked, evicted = found("masked"), found("ragged")
    pairs = [(row, evicted[place]) for place, row in masked.items() if place in evicted]
    if not pairs:
        return None
    answers = [(hidden, deleted) for hidden, deleted in pairs if hidden.fidelity.nll is None]
    return Masking(
        compared=len(pairs),
        questions=len(answers),
        same_answers=sum(hidden.prediction == deleted.prediction for hidden, deleted in answers),
        largest_kl_difference=max(abs((a.fidelity.kl or 0.0) - (b.fidelity.kl or 0.0)) for a, b in pairs),
        bytes_ratio=_sum(a.memory.held_bytes for a, _ in pairs) / _sum(b.memory.held_bytes for _, b in pairs),
    )


def _sum(values: Iterable[int]) -> float:
    return float(sum(values))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
