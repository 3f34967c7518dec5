"""RaggedLayer against lists of entries, in any order of calls; and what the lists do not show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from kvkeep.errors import CacheStateError
from kvkeep.store import RaggedLayer
from kvkeep.store.tail import Tail

from ..conftest import poison

Entry = tuple[int, list[float], list[float]]  # position, key, value
Column = list[list[Entry] | None]  # for each row the entries of its heads, or None at padding


@dataclass
class Model:
    """What a layer must hold, as lists."""

    heads: int
    prefix: list[list[list[Entry]]] | None = None  # [row][head]
    columns: list[Column] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # logical length of each row at the last cut

    @property
    def rows(self) -> int:
        return len(self.before)

    @property
    def lengths(self) -> list[int]:
        return [self.before[row] + self.tail_count(row) for row in range(self.rows)]

    def tail_count(self, row: int) -> int:
        return sum(column[row] is not None for column in self.columns)

    def cell(self, row: int, head: int) -> list[Entry]:
        kept = [] if self.prefix is None else self.prefix[row][head]
        return kept + [entries[head] for column in self.columns if (entries := column[row]) is not None]

    def cells(self) -> list[list[list[Entry]]]:
        return [[self.cell(row, head) for head in range(self.heads)] for row in range(self.rows)]


@dataclass(eq=False)
class Pair:
    store: RaggedLayer
    model: Model
    epoch: int = 0
    mark: tuple[int, int, list[list[list[Entry]]]] | None = None  # epoch, columns, what was held


def entries_of(keys: Tensor, values: Tensor, positions: Tensor) -> list[Entry]:
    return list(zip(positions.tolist(), keys.tolist(), values.tolist(), strict=True))


def plain(tensor: Tensor) -> Tensor:
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    """As a projection gives it: `[B, q, H, D]` in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def fused(tensor: Tensor) -> Tensor:
    """A view of a larger storage."""
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


def wide_storage(tensors: dict[str, Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    return sum(storages.values())


class RaggedMachine(RuleBasedStateMachine):
    """Layers and their lists. A fork makes another pair, and both go on."""

    pairs = Bundle("pairs")

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Pair] = []
        self.numbers = 0

    @initialize(
        target=pairs,
        heads=st.integers(1, 3),
        key_size=st.integers(1, 4),
        value_size=st.integers(1, 4),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def begin(self, heads: int, key_size: int, value_size: int, dtype: torch.dtype) -> Pair:
        self.heads, self.sizes, self.dtype = heads, (key_size, value_size), dtype
        self.all.append(Pair(RaggedLayer(), Model(heads)))
        return self.all[0]

    @rule(
        pair=pairs,
        rows=st.integers(1, 3),
        count=st.integers(1, 5),
        padding=st.none() | st.integers(0, 2**15),
        reserve=st.integers(0, 12),
        layout=st.sampled_from([plain, transposed, fused]),
    )
    def append(
        self, pair: Pair, rows: int, count: int, padding: int | None, reserve: int, layout: Callable[[Tensor], Tensor]
    ) -> None:
        model = pair.model
        if model.rows == 0:
            model.before = [0] * rows
        rows = model.rows
        valid = None
        if padding is not None:  # its bits, wherever they fall; 2^n - 1 is padding on the left
            valid = torch.tensor(
                [[padding >> (row * count + at) & 1 == 0 for at in range(count)] for row in range(rows)]
            )
        real = torch.ones(rows, count, dtype=torch.bool) if valid is None else valid
        key_size, value_size = self.sizes
        numbers = self.numbers + torch.arange(rows * self.heads * count).view(rows, self.heads, count, 1)
        self.numbers += numbers.numel()
        keys = (numbers * 10 + torch.arange(key_size)).to(self.dtype)
        values = (-numbers * 10 - torch.arange(value_size)).to(self.dtype)
        positions = torch.tensor(model.lengths)[:, None] + (real.cumsum(1) - 1).clamp(min=0)
        for at in range(count):
            column: Column = []
            for row in range(rows):
                here = [
                    entries_of(
                        keys[row, head, at : at + 1], values[row, head, at : at + 1], positions[row, at : at + 1]
                    )
                    for head in range(self.heads)
                ]
                column.append([entry for [entry] in here] if real[row, at] else None)
            model.columns.append(column)
        for tensor in (keys, values):
            tensor.masked_fill_(~real[:, None, :, None], torch.nan)
        pair.store.append(layout(keys), layout(values), positions, valid, reserve)

    @rule(pair=pairs, seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    def cut(self, pair: Pair, seed: int, share: float) -> None:
        store, model = pair.store, pair.model
        if store.prefix is None and store.tail is None:
            return
        held = store.held(model.lengths)
        assert [row for h in held for row in range(*h.rows)] == list(range(model.rows))
        generator = torch.Generator().manual_seed(seed)
        masks = []
        for h in held:
            assert h.valid.shape == h.positions.shape == h.keys.shape[:3] == h.values.shape[:3]
            mask = h.valid & (torch.rand(h.valid.shape, generator=generator) < share)
            masks.append(mask)
        kept = []
        for h, mask in zip(held, masks, strict=True):
            for at, row in enumerate(range(*h.rows)):
                for head in range(self.heads):
                    valid = h.valid[at, head]
                    cell = entries_of(h.keys[at, head][valid], h.values[at, head][valid], h.positions[at, head][valid])
                    assert cell == model.cell(row, head)
                    stays = mask[at, head][valid].tolist()
                    kept.append([entry for entry, stay in zip(cell, stays, strict=True) if stay])
        store.cut(held, masks)
        model.before = model.lengths
        model.prefix = [kept[row * self.heads : (row + 1) * self.heads] for row in range(model.rows)]
        model.columns = []
        pair.epoch += 1
        assert store.tail is None
        del held, h
        assert store.lent_bytes == 0

    @rule(pair=pairs)
    def set_mark(self, pair: Pair) -> None:
        if pair.model.rows:
            pair.mark = (pair.epoch, len(pair.model.columns), pair.model.cells())

    @rule(pair=pairs)
    def rewind_to_mark(self, pair: Pair) -> None:
        if pair.mark is None or pair.mark[0] != pair.epoch or pair.mark[1] > len(pair.model.columns):
            return
        self._rewind(pair, pair.mark[1])
        assert pair.model.cells() == pair.mark[2]

    @rule(pair=pairs, remove=st.integers(1, 6))
    def crop(self, pair: Pair, remove: int) -> None:
        self._rewind(pair, max(0, len(pair.model.columns) - remove))
        pair.mark = None

    def _rewind(self, pair: Pair, columns: int) -> None:
        pair.store.rewind(columns)
        del pair.model.columns[columns:]
        tail = pair.store.tail
        if tail is not None and not tail.shared:  # what was forgotten is slack now
            poison(tail.keys[:, :, columns:])
            poison(tail.values[:, :, columns:])
            poison(tail.positions[:, columns:])

    @precondition(lambda self: len(self.all) < 4)
    @rule(target=pairs, pair=pairs)
    def fork(self, pair: Pair) -> Pair:
        twin = Pair(pair.store.fork(), copy.deepcopy(pair.model), pair.epoch, pair.mark)
        self.all.append(twin)
        return twin

    @rule(pair=pairs)
    def trim(self, pair: Pair) -> None:
        pair.store.trim()
        assert pair.store.tail_capacity == pair.store.tail_length

    @rule(pair=pairs, data=st.data())
    def reorder(self, pair: Pair, data: st.DataObject) -> None:
        model = pair.model
        if model.rows == 0:
            return
        rows = data.draw(st.lists(st.integers(0, model.rows - 1), min_size=1, max_size=4))
        pair.store.reorder(torch.tensor(rows))
        model.before = [model.before[row] for row in rows]
        model.columns = [[column[row] for row in rows] for column in model.columns]
        if model.prefix is not None:
            model.prefix = [model.prefix[row] for row in rows]
        pair.epoch += 1

    @rule(pair=pairs)
    def save_and_load(self, pair: Pair) -> None:
        store = pair.store
        used = store.fork()
        used.trim()
        file = safetensors.torch.save({name: tensor.contiguous() for name, tensor in used.tensors().items()})
        pair.store = RaggedLayer()
        pair.store.load_tensors(safetensors.torch.load(file), store.batch, store.kv_heads)

    @rule(pair=pairs)
    def reset(self, pair: Pair) -> None:
        pair.store.reset()
        pair.model = Model(self.heads)
        pair.epoch += 1

    @invariant()
    def layers_are_as_the_lists(self) -> None:
        for pair in self.all:
            check(pair.store, pair.model, sum(self.sizes))


def check(store: RaggedLayer, model: Model, sizes: int) -> None:
    cells = model.cells()
    counts = [[len(cell) for cell in row] for row in cells]
    held = store.bytes()
    assert store.batch == model.rows
    assert store.tail_length == len(model.columns)
    assert store.cell_counts().tolist() == counts
    assert store.tail_counts().tolist() == [model.tail_count(row) for row in range(model.rows)]
    assert held.payload == sum(map(sum, counts)) * store.entry_bytes
    assert held.slack >= 0
    assert held.total == wide_storage(store.tensors())
    for row in range(model.rows if store.tail is not None or store.prefix is not None else 0):
        for head in range(model.heads):
            keys, values, positions = store.cell(row, head)
            assert entries_of(keys, values, positions) == cells[row][head]
            assert bool((positions.diff() > 0).all())
            assert store.entry_bytes == sizes * keys.element_size()
    if store.prefix is not None:
        prefix = store.prefix
        assert prefix.offsets.dtype == prefix.positions.dtype == torch.int32
        assert prefix.bounds == tuple(prefix.offsets.tolist())
        assert prefix.bounds[0] == 0
        assert prefix.bounds[-1] == len(prefix.keys) == len(prefix.values) == len(prefix.positions)
        assert store.prefix_counts().flatten().tolist() == prefix.offsets.diff().tolist() == prefix.sizes
        assert store.longest_cell == max(prefix.sizes)
        assert store.is_uniform == (min(prefix.sizes) == max(prefix.sizes))


@pytest.mark.usefixtures("poisoned")
def test_layers_are_as_the_lists() -> None:
    run_state_machine_as_test(
        RaggedMachine,
        settings=settings(max_examples=60, stateful_step_count=25, suppress_health_check=[HealthCheck.filter_too_much]),
    )


# -- what the lists do not show ---------------------------------------------------------------------------------------


def tokens(rows: int, count: int, first: int = 0, heads: int = 2, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(first)
    keys, values = (torch.randn(rows, heads, count, size, generator=generator) for _ in range(2))
    return keys, values, torch.arange(first, first + count).expand(rows, count)


def cut_layer(rows: int = 1, count: int = 10, keep: int = 4) -> RaggedLayer:
    layer = RaggedLayer()
    layer.append(*tokens(rows, count))
    held = layer.held([count] * rows)
    layer.cut(held, [h.positions < keep for h in held])
    return layer


@pytest.mark.parametrize("cut", [False, True])
def test_p73_growth_is_amortised(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the whole buffer is allocated again at each step. 200 tokens may double a buffer of 16 four times."""
    layer = cut_layer() if cut else RaggedLayer()
    capacities: list[int] = []
    allocate = Tail.allocate

    def counted(keys: Tensor, values: Tensor, capacity: int) -> Tail:
        capacities.append(capacity)
        return allocate(keys, values, capacity)

    monkeypatch.setattr(Tail, "allocate", counted)
    for step in range(200):
        layer.append(*tokens(1, 1, first=10 + step))
    assert capacities == [16, 32, 64, 128, 256]
    assert sum(capacities) < 3 * 200
    assert layer.tail_capacity < 2 * 200
    assert layer.tail_length == 200


def test_p73_a_long_tail_grows_without_much_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubling a text that was not cut would hold it twice."""
    layer = RaggedLayer()
    layer.append(*tokens(1, 4000))
    copied = 0
    resized = Tail.resized

    def counted(tail: Tail, capacity: int) -> Tail:
        nonlocal copied
        copied += tail.length
        return resized(tail, capacity)

    monkeypatch.setattr(Tail, "resized", counted)
    for step in range(1000):
        layer.append(*tokens(1, 1, first=4000 + step))
        assert layer.tail_capacity <= 1.125 * layer.tail_length
    assert copied <= 10 * 1000


def test_reserve_makes_room_at_once() -> None:
    layer = RaggedLayer()
    layer.append(*tokens(1, 3), reserve=50)
    assert layer.tail is not None
    buffer = layer.tail.keys
    for step in range(3, 50):
        layer.append(*tokens(1, 1, first=step), reserve=50)
    assert layer.tail.keys is buffer
    assert layer.tail_capacity == 50


def test_first_tokens_are_taken_over_without_a_copy() -> None:
    keys, values, positions = tokens(2, 5)
    layer = RaggedLayer()
    layer.append(keys, values, positions)
    assert layer.tail is not None
    assert layer.tail.keys.data_ptr() == keys.data_ptr()
    assert layer.tail.values.data_ptr() == values.data_ptr()


def test_positions_and_padding_are_copied() -> None:
    """The caller goes on using its own."""
    keys, values, _ = tokens(1, 3)
    positions, valid = torch.arange(3, dtype=torch.int32)[None], torch.tensor([[False, True, True]])
    layer = RaggedLayer()
    layer.append(keys, values, positions, valid)
    positions += 100
    valid.fill_(False)
    assert layer.cell(0, 0)[2].tolist() == [1, 2]


@pytest.mark.parametrize("layout", [plain, transposed, fused])
def test_first_tokens_bring_no_slack(layout: Callable[[Tensor], Tensor]) -> None:
    """A view would keep the storage of Q, K and V alive."""
    keys, values, positions = tokens(2, 5)
    layer = RaggedLayer()
    layer.append(layout(keys), layout(values), positions)
    assert layer.bytes().slack == 0
    assert layer.bytes().payload == 2 * 2 * 5 * layer.entry_bytes


def columns_first(tensor: Tensor) -> Tensor:
    """The same numbers, those of a vector far apart."""
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("layout", [plain, transposed, fused, columns_first])
@pytest.mark.parametrize("later", [0, 3])
def test_a_cut_finds_vectors_however_they_lie(layout: Callable[[Tensor], Tensor], later: int) -> None:
    keys, values, positions = tokens(2, 10)
    layer = RaggedLayer()
    layer.append(layout(keys[:, :, : 10 - later]), layout(values[:, :, : 10 - later]), positions[:, : 10 - later])
    if later:  # a tail with room, whose rows do not lie side by side
        layer.append(keys[:, :, -later:], values[:, :, -later:], positions[:, -later:])
    mask = torch.rand(2, 2, 10, generator=torch.Generator().manual_seed(1)) < 0.4
    layer.cut(layer.held([10, 10]), [mask])
    assert layer.prefix is not None
    assert torch.equal(layer.prefix.keys, keys[mask])
    assert torch.equal(layer.prefix.values, values[mask])
    assert layer.prefix.positions.tolist() == mask.nonzero()[:, 2].tolist()


def test_rows_with_padding_come_one_by_one() -> None:
    """Columns that are padding in one row only must not be left out of the other."""
    layer = RaggedLayer()
    layer.append(*tokens(2, 3), torch.tensor([[False, True, True], [True, True, False]]))
    held = layer.held([2, 2])
    assert [h.rows for h in held] == [(0, 1), (1, 2)]
    assert [h.positions[0, 0].tolist() for h in held] == [[1, 2], [0, 1]]


@pytest.mark.parametrize("mutate", ["append", "rewind", "trim", "reorder", "cut", "reset"])
@pytest.mark.parametrize("first", ["original", "twin"])
def test_forks_share_memory_until_one_writes(mutate: str, first: str) -> None:
    layer = cut_layer(rows=2)
    layer.append(*tokens(2, 3, first=10))
    twin = layer.fork()
    assert (
        wide_storage({**layer.tensors(), **{f"twin.{k}": t for k, t in twin.tensors().items()}}) == layer.bytes().total
    )
    before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    changed, other = (layer, twin) if first == "original" else (twin, layer)
    if mutate == "append":
        changed.append(*tokens(2, 1, first=13))
    elif mutate == "rewind":
        changed.rewind(1)
        changed.append(*tokens(2, 1, first=99))
    elif mutate == "reorder":
        changed.reorder(torch.tensor([1, 0]))
    elif mutate == "cut":
        held = changed.held([13, 13])
        changed.cut(held, [h.positions > 2 for h in held])
    else:
        getattr(changed, mutate)()
    for name, tensor in other.tensors().items():
        used = tensor.shape if name in ("keys", "values", "offsets", "positions") else ...
        if used is ...:
            at = (slice(None), slice(None), slice(3)) if tensor.ndim == 4 else (slice(None), slice(3))
            assert torch.equal(tensor[at], before[name][at])
        else:
            assert torch.equal(tensor, before[name])
    assert other.tail_length == 3
    assert other.prefix is not None


def test_values_at_padding_are_zero() -> None:
    """A padded token's NaN would come through a weight of zero."""
    layer = RaggedLayer()
    valid = torch.tensor([[False, True, True]])
    for first in (0, 3):
        keys, values, positions = tokens(1, 3, first=first)
        values[:, :, 0] = torch.inf
        layer.append(keys, values, positions, valid)
    assert layer.tail is not None
    assert layer.tail.values[:, :, [0, 3]].eq(0).all()
    assert layer.tail.values[:, :, :6].isfinite().all()


def test_padding_in_a_prefix_rectangle_is_zero() -> None:
    layer = RaggedLayer()
    layer.append(*tokens(1, 9))
    [held] = layer.held([9])
    layer.cut([held], [torch.stack([torch.arange(9) < 3, torch.arange(9) >= 0])[None]])
    keys, values, _, valid = layer.padded_prefix(0, 1)
    assert valid.sum(-1).tolist() == [[3, 9]]
    assert keys[~valid].eq(0).all()
    assert values[~valid].eq(0).all()


@pytest.mark.parametrize("size", [4, 0])
def test_a_uniform_prefix_is_shown_without_a_copy(size: int) -> None:
    layer = cut_layer(rows=2, keep=size)
    keys, values, _, valid = layer.padded_prefix(0, 2)
    assert keys.shape == (2, 2, size, 4)
    assert valid.all()
    assert layer.prefix is not None
    assert keys.untyped_storage().data_ptr() == layer.prefix.keys.untyped_storage().data_ptr()
    assert values.untyped_storage().data_ptr() == layer.prefix.values.untyped_storage().data_ptr()


def test_left_padding_is_shown_without_a_copy() -> None:
    layer = RaggedLayer()
    layer.append(*tokens(2, 5), torch.tensor([[False, False, True, True, True], [True] * 5]))
    held = layer.held([3, 5])
    assert [h.rows for h in held] == [(0, 1), (1, 2)]
    assert [h.keys.shape[2] for h in held] == [3, 5]
    assert layer.lent_bytes == 0


def test_lent_bytes_are_the_copies_that_are_in_use() -> None:
    layer = cut_layer(rows=1, keep=4)
    layer.append(*tokens(1, 3, first=10))
    assert layer.lent_bytes == 0
    held = layer.held([13])
    assert layer.lent_bytes == 2 * (4 + 3) * layer.entry_bytes
    del held
    assert layer.lent_bytes == 0


def test_a_layer_from_inference_mode_can_be_written_to_outside() -> None:
    """Tensors made in inference mode refuse writes outside of it, also if only some of the buffer's are such."""
    keys, values, positions = tokens(1, 3)
    layer = RaggedLayer()
    with torch.inference_mode():
        layer.append(keys, values, positions, torch.tensor([[False, True, True]]), reserve=8)
    layer.append(*tokens(1, 1, first=3))
    with torch.inference_mode():
        layer.append(*tokens(1, 1, first=4))
    layer.append(*tokens(1, 1, first=5))
    assert layer.cell(0, 0)[2].tolist() == [1, 2, 3, 4, 5]
    with torch.inference_mode():
        mixed = RaggedLayer()
        mixed.append(keys, values, positions)  # adopts ordinary tensors beside positions of inference mode
    mixed.rewind(2)
    mixed.append(*tokens(1, 1, first=7))
    assert mixed.cell(0, 1)[2].tolist() == [0, 1, 7]


def test_a_layer_can_be_copied_deeply() -> None:
    layer = cut_layer()
    held = layer.held([10])
    layer.append(*tokens(1, 2, first=10))
    twin = copy.deepcopy(layer)
    layer.rewind(0)
    layer.append(*tokens(1, 2, first=50))
    assert twin.cell(0, 0)[2].tolist() == [0, 1, 2, 3, 10, 11]
    del held


def test_gradients_are_not_kept() -> None:
    keys, values, positions = tokens(1, 3)
    layer = RaggedLayer()
    layer.append(keys.requires_grad_(), values.requires_grad_(), positions)
    assert not any(tensor.requires_grad for tensor in layer.tensors().values())


def test_a_file_gives_the_same_bytes_and_cells(tmp_path: Path) -> None:
    """Opened lazily, tensors could be views of the whole file's memory; what a layer weighs must not change."""
    layer = cut_layer(rows=2)
    layer.append(*tokens(2, 3, first=10))
    layer.trim()
    safetensors.torch.save_file(layer.tensors(), tmp_path / "layer.safetensors")
    with safetensors.safe_open(tmp_path / "layer.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in layer.tensors()}
    loaded = RaggedLayer()
    loaded.load_tensors(tensors, layer.batch, layer.kv_heads)
    assert loaded.bytes() == layer.bytes()
    for row in range(2):
        for ours, theirs in zip(loaded.cell(row, 1), layer.cell(row, 1), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: t.pop("positions"),
        lambda t: t.pop("tail_values"),
        lambda t: t.update(append=torch.zeros(1)),
        lambda t: t["offsets"].__setitem__(1, 99),
        lambda t: t["offsets"].__setitem__(0, 1),
        lambda t: t.update(offsets=torch.zeros(0)),
        lambda t: t.update(keys=torch.zeros(())),
        lambda t: t.update(tail_keys=torch.zeros(1)),
        lambda t: t.update(offsets=t["offsets"][:-1]),
        lambda t: t.update(keys=t["keys"][:-1]),
        lambda t: t.update(tail_positions=t["tail_positions"][:, :-1]),
        lambda t: t.update(tail_valid=torch.ones(1, 1, dtype=torch.bool)),
    ],
)
def test_tensors_that_do_not_agree_are_refused(damage: Callable[[dict[str, Tensor]], object]) -> None:
    layer = cut_layer()
    layer.append(*tokens(1, 2, first=10))
    layer.trim()
    tensors = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    damage(tensors)
    target = cut_layer(keep=1)
    with pytest.raises(CacheStateError, match="agree"):
        target.load_tensors(tensors, 1, 2)
    assert target.cell_counts().tolist() == [[1, 1]]


def test_wrong_calls_are_refused() -> None:
    layer = cut_layer(rows=2)
    layer.append(*tokens(2, 3, first=10))
    with pytest.raises(CacheStateError, match="2 rows of 2 KV heads"):
        layer.append(*tokens(1, 1, first=13))
    with pytest.raises(CacheStateError, match="2 rows of 2 KV heads"):
        layer.append(*tokens(2, 1, first=13, heads=1))
    with pytest.raises(CacheStateError, match="between 0 and the 3 columns"):
        layer.rewind(4)
    with pytest.raises(CacheStateError, match="holds entries"):
        RaggedLayer().cell(0, 0)
    with pytest.raises(CacheStateError, match="holds entries"):
        RaggedLayer().padded_prefix(0, 1)
    assert layer.cell_counts().tolist() == [[7, 7], [7, 7]]
