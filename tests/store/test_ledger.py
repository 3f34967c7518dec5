"""The ledger's numbers on scripted sequences, each worked out by hand."""

from __future__ import annotations

import pytest
import torch

from kvkeep.store import Ledger, RaggedLayer

# One row, two heads, keys and values of four float32 numbers.
ENTRY = 2 * 4 * 4
PROMPT = 10
KEEP = 3
DENSE = 2 * PROMPT * ENTRY + PROMPT * 4  # and a position for each column
PREFIX = 2 * KEEP * ENTRY + 2 * KEEP * 4 + (2 + 1) * 4  # and a position for each entry, an offset for each cell


def tail(capacity: int) -> int:
    return 2 * capacity * ENTRY + capacity * 4


class Script:
    """Two evictable layers and two sliding ones, driven by hand."""

    def __init__(self) -> None:
        self.layers = [RaggedLayer(), RaggedLayer()]
        self.windows = [0, 0]
        self.length = 0
        self.ledger = Ledger(self.layers, lambda: [self.length], [lambda: self.windows[0], lambda: self.windows[1]])

    def append(self, index: int, count: int) -> None:
        keys, values = torch.ones(1, 2, count, 4), torch.ones(1, 2, count, 4)
        self.layers[index].append(keys, values, torch.arange(self.length - count, self.length)[None])

    def cut(self, index: int, keep: int = KEEP) -> None:
        layer = self.layers[index]
        held = layer.held([self.length])
        layer.cut(held, [torch.arange(h.positions.shape[2]).expand(h.positions.shape) < keep for h in held])

    def prompt(self) -> None:
        """Each layer is cut before the next one is computed."""
        self.length = PROMPT
        for index in range(2):
            self.append(index, PROMPT)
            self.cut(index)
            self.ledger.record(index)

    def decode(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.length += 1
            for index in range(2):
                self.append(index, 1)
                self.ledger.record(index)


def test_layers_that_are_cut_one_by_one() -> None:
    script = Script()
    script.length = PROMPT
    peaks = []
    for index in range(2):
        script.append(index, PROMPT)
        script.ledger.record(index)
        peaks.append(script.ledger.peak_bytes)
        script.cut(index)
        script.ledger.record(index)
        peaks.append(script.ledger.peak_bytes)
    assert peaks == [DENSE, DENSE + PREFIX, DENSE + PREFIX, PREFIX + DENSE + PREFIX]
    assert script.ledger.held_bytes == 2 * PREFIX


def test_layers_that_wait_for_one_another() -> None:
    script = Script()
    script.length = PROMPT
    for index in range(2):
        script.append(index, PROMPT)
        script.ledger.record(index)
    for index in range(2):
        script.cut(index)
        script.ledger.record(index)
    assert script.ledger.peak_bytes == 2 * DENSE + PREFIX


def test_growth_holds_the_old_and_the_new_buffer() -> None:
    script = Script()
    script.prompt()
    script.ledger.restart()
    script.decode(16)
    assert script.ledger.peak_bytes == script.ledger.held_bytes == 2 * (PREFIX + tail(16))
    script.decode()
    # The second layer grows when the first one has grown.
    assert script.ledger.peak_bytes == (PREFIX + tail(32)) + (PREFIX + tail(16) + tail(32))
    assert script.ledger.held_bytes == 2 * (PREFIX + tail(32))


def test_a_second_cut_counts_what_policies_look_at() -> None:
    """Prefix and tail are joined for a policy; one for the whole model has all rectangles at once."""
    script = Script()
    script.prompt()
    script.decode(2)
    script.ledger.restart()
    now = 2 * (PREFIX + tail(16))
    rectangles = [layer.held([script.length]) for layer in script.layers]
    lent = 2 * (KEEP + 2) * ENTRY
    for index in range(2):
        script.ledger.record(index)
    assert script.ledger.peak_bytes == now + 2 * lent
    assert script.ledger.held_bytes == now
    for index, held in enumerate(rectangles):
        script.layers[index].cut(held, [torch.ones_like(h.valid) for h in held])
        held.clear()
        del held
        script.ledger.record(index)
    bigger = PREFIX + 2 * 2 * (ENTRY + 4)
    assert script.ledger.peak_bytes == now + 2 * lent + bigger
    assert script.ledger.held_bytes == 2 * bigger


def test_what_is_judged_stays_until_it_is_let_go() -> None:
    """The dense prompt lives on as long as somebody has its rectangles."""
    script = Script()
    script.length = PROMPT
    script.append(0, PROMPT)
    held = script.layers[0].held([PROMPT])
    script.ledger.record(0)
    assert script.ledger.peak_bytes == DENSE  # views
    script.layers[0].cut(held, [h.positions < KEEP for h in held])
    assert script.layers[0].lent_bytes == 2 * PROMPT * ENTRY
    del held
    assert script.layers[0].lent_bytes == 0


@pytest.mark.parametrize("length", [2, 0])
def test_trim_holds_both_buffers_for_a_moment(length: int) -> None:
    script = Script()
    script.prompt()
    script.decode(4)
    for layer in script.layers:
        layer.rewind(length)
    script.ledger.restart()
    for index in range(2):
        script.layers[index].trim()
        script.ledger.record(index)
    assert script.ledger.held_bytes == 2 * (PREFIX + tail(length))
    assert script.ledger.peak_bytes == 2 * (PREFIX + tail(16)) + tail(length)


def test_reorder_holds_old_and_new_rows() -> None:
    script = Script()
    script.prompt()
    script.decode()
    script.ledger.restart()
    for index in range(2):
        script.layers[index].reorder(torch.tensor([0, 0]))
        script.ledger.record(index)
    prefix = 2 * (PREFIX - 4) + 4  # one offset more than there are cells
    assert script.ledger.held_bytes == 2 * (prefix + 2 * tail(16))
    # The prefix is done before the tail: its old rows are gone by then.
    first = max(PREFIX + tail(16) + prefix, prefix + tail(16) + 2 * tail(16))
    assert script.ledger.peak_bytes == (prefix + 2 * tail(16)) + first


def test_reorder_of_a_prefix_alone() -> None:
    script = Script()
    script.prompt()
    script.ledger.restart()
    script.layers[0].reorder(torch.tensor([0, 0]))
    script.ledger.record(0)
    assert script.ledger.peak_bytes == PREFIX + PREFIX + 2 * (PREFIX - 4) + 4


def test_a_moment_counts_once() -> None:
    """What was needed for a moment is not there any more when something else grows."""
    script = Script()
    script.prompt()
    script.windows[0] = 5000
    script.ledger.record_window(0)
    script.ledger.record(0)
    assert script.ledger.peak_bytes == 2 * PREFIX + 5000


def test_restart_forgets_the_peak() -> None:
    script = Script()
    script.prompt()
    script.layers[0].append(torch.ones(1, 2, 50, 4), torch.ones(1, 2, 50, 4), torch.arange(50)[None])
    script.layers[0].rewind(0)
    script.layers[0].trim()  # high, and not recorded yet
    script.ledger.restart()
    assert script.ledger.peak_bytes == 2 * PREFIX
    script.ledger.record(0)
    assert script.ledger.peak_bytes == 2 * PREFIX


def test_windows_are_listed_apart_and_count_in_the_peak() -> None:
    script = Script()
    script.prompt()
    script.ledger.restart()
    script.windows[:] = [1000, 0]
    script.ledger.record_window(0)
    script.windows[:] = [1000, 500]
    script.ledger.record_window(1)
    script.windows[:] = [100, 500]
    script.ledger.record_window(0)
    assert script.ledger.window_bytes == 600
    assert script.ledger.held_bytes == 2 * PREFIX
    assert script.ledger.peak_bytes == 2 * PREFIX + 1500
    assert script.ledger.full_bytes == 2 * 2 * PROMPT * ENTRY
    script.ledger.restart()
    assert script.ledger.peak_bytes == 2 * PREFIX + 600


def test_counts_go_into_results() -> None:
    script = Script()
    script.prompt()
    script.decode(2)
    ledger = script.ledger
    full = 2 * 2 * (PROMPT + 2) * ENTRY
    held = 2 * (PREFIX + tail(16))
    assert ledger.entries_per_cell == [[[KEEP + 2, KEEP + 2]]] * 2
    assert ledger.to_dict() == {
        "logical_length": PROMPT + 2,
        "entries": 2 * 2 * (KEEP + 2),
        "entries_full": 2 * 2 * (PROMPT + 2),
        "uncut_entries": 2 * 2 * 2,
        "payload_bytes": 2 * 2 * (KEEP + 2) * ENTRY,
        "slack_bytes": 2 * 2 * 14 * ENTRY,
        "metadata_bytes": 2 * ((2 * KEEP + 3) * 4 + 16 * 4),
        "state_bytes": 0,
        "held_bytes": held,
        "window_bytes": 0,
        "peak_bytes": held,
        "full_bytes": full,
        "fraction": held / full,
    }


def test_padding_is_no_payload_and_not_in_the_full_cache() -> None:
    layer = RaggedLayer()
    ledger = Ledger([layer], lambda: [1, 3])
    valid = torch.tensor([[False, False, True], [True, True, True]])
    layer.append(torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4), torch.tensor([[0, 0, 0], [0, 1, 2]]), valid)
    assert ledger.full_bytes == 2 * 4 * ENTRY
    assert ledger.payload_bytes == 2 * 4 * ENTRY
    assert ledger.slack_bytes == 2 * 2 * ENTRY
    assert ledger.metadata_bytes == 6 * 4 + 6
    assert ledger.to_dict()["logical_length"] == [1, 3]


def test_an_empty_cache_has_fraction_zero() -> None:
    script = Script()
    assert script.ledger.fraction == 0.0
    assert script.ledger.held_bytes == script.ledger.peak_bytes == script.ledger.full_bytes == 0
    assert script.ledger.entries_per_cell == [[], []]
