"""SlotLayer against the whole history of each cell, in any order of calls; and what the history does not show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.policies.running import take_slots
from kvkeep.store import SlotLayer

HEADS, KEY, VALUE = 2, 3, 2
Entry = tuple[int, list[float], list[float]]  # position, key, value
History = list[int]  # of a row: the number that each token's vectors are made of


def vectors(numbers: Tensor, size: int, factor: int) -> Tensor:
    """`[..., H, n, size]` from numbers `[..., n]`, other ones for each head."""
    heads = torch.arange(HEADS)[:, None, None]
    return ((numbers[..., None, :, None] * 10 + heads * 3 + torch.arange(size)) * factor).float()


def priority(numbers: Tensor) -> Tensor:
    """`[..., H, n]`: few different ones, so that many are equal."""
    heads = torch.arange(HEADS)[:, None]
    return ((numbers[..., None, :] * 7919 + heads * 31) % 5).float()


@dataclass
class Model:
    """What has come, row by row."""

    shape: tuple[int, int, int]
    rows: list[History] = field(default_factory=list)

    def cell(self, row: int, head: int) -> list[Entry]:
        """What a cell holds, from the definition of the policy and the whole history."""
        sinks, window, slots = self.shape
        numbers = torch.tensor(self.rows[row], dtype=torch.int64)
        rated = priority(numbers)[head].tolist()
        newest = len(rated) - 1
        eligible = range(sinks, newest - window + 1)
        best = sorted(eligible, key=lambda t: (-rated[t], t))[:slots]
        held = sorted({t for t in range(newest + 1) if t < sinks or t > newest - window} | set(best))
        keys, values = vectors(numbers, KEY, 1)[head], vectors(numbers, VALUE, -1)[head]
        return [(t, keys[t].tolist(), values[t].tolist()) for t in held]


@dataclass(eq=False)
class Pair:
    store: SlotLayer
    model: Model
    mark: tuple[SlotLayer, list[History]] | None = None


def feed(store: SlotLayer, rows: slice, numbers: Tensor) -> None:
    """New tokens `[R, n]`, as the adapter gives them."""
    keys, values = vectors(numbers, KEY, 1), vectors(numbers, VALUE, -1)
    leaving = store.leaving(rows, keys, values)
    whole = leaving.keys[..., 0] - torch.arange(HEADS)[:, None] * 3  # back to the numbers
    rated = priority((whole[:, 0] / 10).long())
    taken = []
    for row in range(rows.start, rows.stop):  # rows of different length have other numbers of free slots
        one = slice(row, row + 1)
        held, positions = store.contest(one, store.filled_slots(one)[0])
        at = row - rows.start
        taken.append(take_slots(rated[at], store.slots, held[0], positions[0]))
    store.advance(rows, keys, values, leaving, torch.stack(taken), rated)
    store.state = {"sum": torch.tensor([float(length) for length in store.lengths])}


class SlotMachine(RuleBasedStateMachine):
    """Layers and their histories. A fork makes another pair, and both go on."""

    pairs = Bundle("pairs")

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Pair] = []
        self.numbers = 0

    @initialize(target=pairs, sinks=st.integers(0, 3), window=st.integers(1, 4), slots=st.integers(1, 4))
    def begin(self, sinks: int, window: int, slots: int) -> Pair:
        self.shape = (sinks, window, slots)
        self.all.append(Pair(SlotLayer(*self.shape), Model(self.shape)))
        return self.all[0]

    @rule(
        pair=pairs,
        rows=st.integers(1, 3),
        count=st.integers(1, 9),
        together=st.booleans(),
        skipped=st.none() | st.integers(0, 2),
    )
    def append(self, pair: Pair, rows: int, count: int, together: bool, skipped: int | None) -> None:
        store, model = pair.store, pair.model
        if not store.batch:
            like = torch.zeros(rows, HEADS, 1, KEY)
            store.open(like, like[..., :VALUE])
            model.rows = [[] for _ in range(rows)]
        rows = store.batch
        numbers = self.numbers + torch.arange(rows * count).view(rows, count)
        self.numbers += rows * count
        lengths = store.lengths
        if together and len(set(lengths)) == 1:
            feed(store, slice(0, rows), numbers)
        elif together and min(lengths) >= store.sinks + store.window:
            for step in range(count):
                feed(store, slice(0, rows), numbers[:, step : step + 1])
        else:  # one row may be padding
            for row in range(rows):
                if row != skipped:
                    feed(store, slice(row, row + 1), numbers[row : row + 1])
        for row in range(rows):
            if store.lengths[row] > len(model.rows[row]):
                model.rows[row] = [*model.rows[row], *numbers[row].tolist()]

    @rule(pair=pairs)
    def set_mark(self, pair: Pair) -> None:
        pair.mark = (pair.store.snapshot(), copy.deepcopy(pair.model.rows))

    @rule(pair=pairs)
    def go_back(self, pair: Pair) -> None:
        if pair.mark is not None:
            pair.store.become(pair.mark[0])
            pair.model.rows = copy.deepcopy(pair.mark[1])

    @rule(pair=pairs)
    def forget_mark(self, pair: Pair) -> None:
        pair.mark = None

    @precondition(lambda self: len(self.all) < 4)
    @rule(target=pairs, pair=pairs)
    def fork(self, pair: Pair) -> Pair:
        twin = Pair(pair.store.fork(), copy.deepcopy(pair.model))
        self.all.append(twin)
        return twin

    @rule(pair=pairs, data=st.data())
    def reorder(self, pair: Pair, data: st.DataObject) -> None:
        if not pair.store.batch:
            return
        rows = data.draw(st.lists(st.integers(0, pair.store.batch - 1), min_size=1, max_size=4))
        pair.store.reorder(torch.tensor(rows))
        pair.model.rows = [pair.model.rows[row] for row in rows]

    @rule(pair=pairs, other=pairs)
    def stack(self, pair: Pair, other: Pair) -> None:
        if pair.store.batch and other.store.batch and all(map(len, [*pair.model.rows, *other.model.rows])):
            rows = [*pair.model.rows, *copy.deepcopy(other.model.rows)][:4]
            both = SlotLayer(*self.shape)
            both.stack([pair.store, other.store])
            both.reorder(torch.arange(len(rows)))
            pair.store, pair.model.rows, pair.mark = both, rows, None

    @rule(pair=pairs)
    def save_and_load(self, pair: Pair) -> None:
        if pair.store.batch and all(pair.store.lengths):
            tensors = {name: tensor.contiguous() for name, tensor in pair.store.export().items()}
            file = safetensors.torch.save(tensors)
            loaded = SlotLayer(*self.shape)
            loaded.load_tensors(safetensors.torch.load(file), pair.store.batch, HEADS)
            pair.store, pair.mark = loaded, None

    @rule(pair=pairs)
    def reset(self, pair: Pair) -> None:
        pair.store.reset()
        pair.model.rows, pair.mark = [], None

    @invariant()
    def layers_are_as_their_histories(self) -> None:
        for pair in self.all:
            check(pair)


def check(pair: Pair) -> None:
    store, model = pair.store, pair.model
    assert store.batch == len(model.rows)
    assert store.lengths == [len(row) for row in model.rows]
    counts = [min(len(row), store.capacity) for row in model.rows]
    if store.batch:
        assert store.cell_counts().tolist() == [[count] * HEADS for count in counts]
    for row, count in enumerate(counts):
        for head in range(HEADS if count else 0):
            keys, values, positions = store.cell(row, head)
            found = list(zip(positions.tolist(), keys.tolist(), values.tolist(), strict=True))
            assert found == model.cell(row, head)
            assert bool((positions.diff() > 0).all())
    held = store.bytes()
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in store.tensors().values()}
    marked = {} if pair.mark is None else pair.mark[0].tensors()
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in marked.values()}
    assert held.total == sum((kept | own).values())
    if store.batch:
        cell = store.capacity * store.entry_bytes
        assert held.payload == sum(counts) * HEADS * store.entry_bytes
        assert held.payload + held.slack == store.batch * HEADS * cell
        assert held.metadata == store.batch * HEADS * store.slots * 8
        if store.state:
            assert store.state["sum"].tolist() == [float(length) for length in store.lengths]


@pytest.mark.usefixtures("poisoned")
def test_layers_are_as_their_histories() -> None:
    run_machine(
        SlotMachine,
        settings=settings(max_examples=60, stateful_step_count=25, suppress_health_check=[HealthCheck.filter_too_much]),
    )


# -- what the histories do not show -----------------------------------------------------------------------------------


def filled(count: int, rows: int = 1, watched: bool = False) -> SlotLayer:
    store = SlotLayer(2, 3, 4, watched=watched)
    like = torch.zeros(rows, HEADS, 1, KEY)
    store.open(like, like[..., :VALUE])
    if count:
        feed(store, slice(0, rows), torch.arange(rows * count).view(rows, count))
    return store


def test_bytes_are_flat_over_the_length() -> None:
    totals = {filled(count).bytes().total for count in (1, 5, 9, 40)}
    assert len(totals) == 1


def test_a_step_writes_in_place() -> None:
    store = filled(20)
    before = {name: tensor.data_ptr() for name, tensor in store.tensors().items() if not name.startswith("state")}
    feed(store, slice(0, 1), torch.tensor([[99]]))
    after = {name: tensor.data_ptr() for name, tensor in store.tensors().items() if not name.startswith("state")}
    assert before == after


def test_a_mark_costs_a_copy_only_while_it_is_kept() -> None:
    store = filled(20)
    alone = store.bytes()
    mark = store.snapshot()
    assert store.bytes() == alone
    feed(store, slice(0, 1), torch.tensor([[99]]))
    buffers = alone.total - alone.state
    assert store.bytes().state == alone.state + buffers + mark.state["sum"].untyped_storage().nbytes()
    assert store.high_water >= 2 * buffers
    del mark
    assert store.bytes() == alone
    place = store.tensors()["keys"].data_ptr()
    feed(store, slice(0, 1), torch.tensor([[98]]))
    assert store.tensors()["keys"].data_ptr() == place  # nobody reads it any more: no second copy


def test_a_fork_that_is_gone_costs_no_copy() -> None:
    store = filled(20)
    place = store.tensors()["keys"].data_ptr()
    store.fork()
    feed(store, slice(0, 1), torch.tensor([[99]]))
    assert store.tensors()["keys"].data_ptr() == place


def test_the_view_shows_what_is_held_without_a_copy() -> None:
    store = filled(4)
    view = store.view()
    assert view.tail is not None
    assert (view.tail.length, view.tail.valid) == (4, None)
    assert view.tail.keys.data_ptr() == store.tensors()["keys"].data_ptr()
    feed(store, slice(0, 1), torch.arange(10, 30)[None])
    assert store.view().tail.length == store.capacity  # type: ignore[union-attr]


@pytest.mark.usefixtures("poisoned")
def test_shorter_rows_have_zeros_as_values_where_nothing_was_written() -> None:
    store = filled(0, rows=2)
    feed(store, slice(0, 1), torch.arange(7)[None])
    feed(store, slice(1, 2), torch.arange(3)[None])
    _, values = store.entries(slice(0, 2))
    assert values[1, :, 3:].eq(0).all()
    valid = store.view().tail.valid  # type: ignore[union-attr]
    assert valid is not None
    assert valid.sum(1).tolist() == [7, 3]


@pytest.mark.usefixtures("poisoned")
def test_watched_priorities_move_with_their_entries() -> None:
    """Each entry is given its own number; whoever moves takes it along, new ones have zero."""
    store, slots = filled(0, watched=True), slice(0, 1)
    given: dict[int, float] = {}
    for number in range(20):
        tokens = torch.tensor([[number]])
        keys, values = vectors(tokens, KEY, 1), vectors(tokens, VALUE, -1)
        leaving = store.leaving(slots, keys, values)
        assert leaving.priorities is not None
        held, positions = store.contest(slots, store.filled_slots()[0])
        taken = take_slots(leaving.priorities[0], store.slots, held[0], positions[0])[None]
        store.advance(slots, keys, values, leaving, taken, leaving.priorities)
        at = store.positions(slots)[0, 0].tolist()
        assert store.priorities(slots)[0, 0].tolist() == [given.get(t, 0.0) for t in at]
        given[number] = float((number * 37) % 11)
        store.set_priorities(slots, torch.tensor([[[given[t] for t in at]] * HEADS]).view(1, HEADS, -1))
    assert store.bytes().metadata == HEADS * (store.slots + store.capacity) * 4


def test_a_layer_from_inference_mode_can_be_written_to_outside() -> None:
    with torch.inference_mode():
        store = filled(6)
    feed(store, slice(0, 1), torch.tensor([[99]]))
    with torch.inference_mode():
        feed(store, slice(0, 1), torch.tensor([[98]]))
    assert store.cell(0, 0)[2].tolist()[-2:] == [6, 7]


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.pop("keys"),
        lambda t: t.pop("lengths"),
        lambda t: t.update(lengths=t["lengths"] + 1),
        lambda t: t.update(lengths=t["lengths"][:0]),
        lambda t: t.update(positions=t["positions"][:, :, 1:]),
        lambda t: t.update(values=t["values"][..., 0]),
        lambda t: t.update({"state.sum": torch.zeros(3)}),
    ],
)
def test_tensors_that_do_not_agree_are_refused(damage: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = filled(7).export()
    damage(tensors)
    target = filled(3)
    with pytest.raises(CacheStateError, match="agree"):
        target.load_tensors(tensors, 1, HEADS)
    assert target.lengths == [3]


def test_wrong_calls_are_refused() -> None:
    store = filled(7, rows=2)
    with pytest.raises(CacheStateError, match="2 rows of 2 KV heads"):
        store.open(torch.zeros(1, HEADS, 1, KEY), torch.zeros(1, HEADS, 1, VALUE))
    with pytest.raises(CacheStateError, match="empty"):
        store.refit(1, 1, 1)
    with pytest.raises(CacheStateError, match="holds entries"):
        SlotLayer(1, 1, 1).entries(slice(0, 1))
