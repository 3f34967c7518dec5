"""Allocators: totals are exact, and every cell lies between what it protects and what it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.policies import Ada, Flat, KNorm, Policy, Pyramid, SnapKV, Threshold, TopK, Uniform, parse_policy
from kvkeep.policies.allocators import apportion, top_mask
from kvkeep.testing import gathered, random_observation

from .judgements import judgement, random_judgements

LAYER_ALLOCATORS = [Uniform(), Ada(), Ada(0.0), Ada(1.0), Ada(0.55)]


def assert_bounds(counts, judgements):
    for count, j in zip(counts, judgements, strict=True):
        assert count.shape == j.valid.shape[:2]
        assert (count >= j.pinned).all()
        assert (count <= j.available).all()
        assert (count.sum(1) >= 1).all()


@given(judgements=random_judgements(), allocator=st.sampled_from(LAYER_ALLOCATORS))
def test_a_layer_keeps_its_budget(judgements, allocator):
    (j,) = judgements
    (counts,) = allocator.allocate(judgements)
    assert_bounds([counts], judgements)
    most = j.valid.shape[1] * j.budget
    if isinstance(allocator, Uniform):
        assert counts.tolist() == j.available.clamp(max=j.budget).tolist()
    else:
        assert int(counts.sum()) == min(most, int(j.available.sum()))


@given(judgements=random_judgements(layers=3), floor=st.integers(0, 5))
def test_one_threshold_for_all_layers_keeps_the_budget(judgements, floor):
    counts = Threshold(floor).allocate(judgements)
    assert_bounds(counts, judgements)
    cells = 3 * judgements[0].valid.shape[1]
    available = sum(int(j.available.sum()) for j in judgements)
    assert sum(int(c.sum()) for c in counts) == min(cells * judgements[0].budget, available)


@given(judgements=random_judgements(layers=4), beta=st.sampled_from([1.0, 2.0, 20.0]))
def test_a_pyramid_never_exceeds_the_budget(judgements, beta):
    counts = Pyramid(beta).allocate(judgements)
    assert_bounds(counts, judgements)
    cells = 4 * judgements[0].valid.shape[1]
    assert sum(int(c.sum()) for c in counts) <= cells * judgements[0].budget


def test_a_threshold_is_one_threshold():
    layers = [
        judgement([[9.0, 1.0, 8.0, 7.0], [0.0, 6.0, 0.0, 0.0]], budget=2, ordinal=0, layers=2),
        judgement([[1.0, 1.0, 5.0, 2.0], [4.0, 3.0, 2.5, 0.0]], budget=2, ordinal=1, layers=2),
    ]
    assert [c.tolist() for c in Threshold().allocate(layers)] == [[[3, 1]], [[1, 3]]]  # what lies above 2


def test_no_layer_is_left_without_entries():
    layers = [
        judgement([[9.0, 8.0, 7.0]], budget=1, ordinal=0, layers=2),
        judgement([[1.0, 2.0, 0.0]], budget=1, ordinal=1, layers=2),
    ]
    assert [c.tolist() for c in Threshold(0).allocate(layers)] == [[[1]], [[1]]]


def test_heads_compete_and_keep_a_share():
    scores = [[9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.2, 2.1], [2.0, 1.0, *[0.0] * 8]]
    j = judgement(scores, budget=5)
    assert Ada(0.0).allocate([j])[0].tolist() == [[10, 0]]
    assert Ada(0.1).allocate([j])[0].tolist() == [[9, 1]]  # at least one entry
    assert Ada(0.4).allocate([j])[0].tolist() == [[8, 2]]
    assert Ada(1.0).allocate([j])[0].tolist() == [[5, 5]]


def test_a_share_rounds_as_the_budget_does():
    j = judgement([[1.0] * 200, [0.0] * 200], budget=100)
    assert Ada(0.29).allocate([j])[0].tolist() == [[171, 29]]  # 0.29 * 100 is 28.999999999999996


def test_protected_entries_come_first():
    j = judgement([[0.0, 0.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]], protected={0, 1}, budget=2)
    assert Ada(0.0).allocate([j])[0].tolist() == [[2, 2]]
    j = judgement([[0.0, 0.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]], protected={0}, budget=2)
    assert Ada(0.0).allocate([j])[0].tolist() == [[1, 3]]


def test_ties_go_to_the_earlier_layer_the_lower_head_the_lower_position():
    layers = [judgement([[1.0] * 4, [1.0] * 4], budget=2, ordinal=i, layers=2) for i in range(2)]
    assert [c.tolist() for c in Threshold().allocate(layers)] == [[[4, 3]], [[1, 0]]]
    assert Ada(0.0).allocate(layers[:1])[0].tolist() == [[4, 0]]


def test_rows_do_not_compete():
    two = random_observation(batch=2, length=40, budget=7, ragged=True)
    policy = Policy(KNorm(), Ada(0.0), TopK())
    counts = policy.allocator.allocate([policy.judge(two)])[0]
    assert counts.sum(1).tolist() == [min(14, held) for held in two.held.sum(1).tolist()]


# --- the pyramid ------------------------------------------------------------------------------------------------------


def pyramid(length, budget, window, beta, layers):
    """Entries that a cell of each layer keeps of a first prompt."""
    policy = Policy(SnapKV(window=window), Pyramid(beta), TopK())
    kept = []
    for layer in range(layers):
        observation = random_observation(length=length, budget=budget, layer=layer, layers=layers, queries=window)
        kept.append(policy.allocator.allocate([policy.judge(observation)])[0].unique().tolist())
    assert all(len(k) == 1 for k in kept)
    return [k[0] for k in kept]


def test_the_papers_pyramid():
    # C = 60, W = 10: the last layer keeps W + 50 / 5, the first W + 2 * 50 - 10; in between a straight line.
    assert pyramid(length=200, budget=60, window=10, beta=5, layers=5) == [100, 80, 60, 40, 20]


def test_a_flat_pyramid_is_uniform():
    assert pyramid(length=100, budget=30, window=5, beta=1, layers=4) == [30] * 4


@pytest.mark.parametrize("budget", [1, 2, 3, 10, 37, 60, 61])
def test_a_pyramid_spends_exactly_the_budget(budget):
    kept = pyramid(length=61, budget=budget, window=8, beta=20, layers=7)
    assert sum(kept) == 7 * budget
    assert kept == sorted(kept, reverse=True)
    assert min(kept) >= 1
    assert max(kept) <= 61


def test_a_pyramid_of_one_layer():
    assert pyramid(length=50, budget=20, window=8, beta=20, layers=1) == [20]


def test_a_later_cut_rests_on_what_all_layers_share():
    """Layers that hold little must not lead the others to spend what these cannot use twice."""
    settings = {"budget": 20, "length": 100, "layers": 3, "protects": 0}
    rich = [judgement([[1.0] * 90], held=[list(range(10, 100))], ordinal=i, **settings) for i in (0, 1)]
    poor = judgement([[1.0] * 5], held=[list(range(95, 100))], ordinal=2, **settings)
    kept = [int(c) for c in Pyramid().allocate([*rich, poor])]
    alone = [int(c) for j in [*rich, poor] for c in Pyramid().allocate([j])]
    assert kept == alone
    assert sum(kept) <= 60


@given(
    total=st.integers(0, 300),
    wanted=st.lists(st.floats(0, 100), min_size=1, max_size=12),
    most=st.integers(0, 60),
)
def test_apportion(total, wanted, most):
    shares = apportion(total, wanted, most)
    assert sum(shares) == min(total, most * len(wanted))
    assert all(0 <= share <= most for share in shares)
    for i, a in enumerate(wanted):  # who wants more does not get less, by more than the rounding
        for j, b in enumerate(wanted):
            assert a <= b or shares[i] >= shares[j] - 1


@given(wanted=st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_apportion_gives_what_is_wanted_where_it_can(wanted):
    assert apportion(sum(wanted), [float(w) for w in wanted], most=50) == wanted


def test_apportion_passes_on_what_a_capped_share_cannot_take():
    assert apportion(12, [9.0, 2.0, 1.0], most=6) == [6, 4, 2]
    assert apportion(5, [1.0, 1.0, 1.0], most=5) == [2, 2, 1]
    assert apportion(4, [0.0, 0.0], most=3) == [2, 2]


@given(
    scores=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    count=st.integers(0, 25),
)
def test_top_mask_is_a_sorted_prefix(scores, count):
    mask = top_mask(torch.tensor([scores]).float(), torch.tensor([count]))[0].tolist()
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert mask == [i in order[:count] for i in range(len(scores))]


# --- one threshold ----------------------------------------------------------------------------------------------------


def entries(judgements, row=0):
    """Every held entry as (layer, head, position, score, protected)."""
    found = []
    for layer, j in enumerate(judgements):
        for head in range(j.valid.shape[1]):
            for i in j.valid[row, head].nonzero()[:, 0].tolist():
                score, pinned = float(j.scores[row, head, i]), bool(j.protected[row, head, i])
                found.append((layer, head, int(j.positions[row, head, i]), score, pinned))
    return found


def naive_threshold(judgements, cap, row=0):
    """Counts by layer and head: protected entries, one entry a layer, then the best of all that no cap shuts out."""
    heads = judgements[0].valid.shape[1]
    ranked = sorted(entries(judgements, row), key=lambda e: (not e[4], -e[3], e[:3]))
    cells = {(layer, head): 0 for layer in range(len(judgements)) for head in range(heads)}
    for layer, head, _, _, pinned in ranked:
        cells[layer, head] += pinned
    most = {c: max(int(cap * judgements[0].budget + 1e-9) or 10**9, pinned) for c, pinned in cells.items()}
    eligible, seen = [], dict.fromkeys(cells, 0)
    for entry in ranked:
        seen[entry[:2]] += 1
        if seen[entry[:2]] <= most[entry[:2]]:
            eligible.append(entry)
    first = {entry[0]: entry for entry in reversed(eligible)}  # the best of each layer
    order = sorted(eligible, key=lambda e: (not e[4] and first[e[0]] is not e, not e[4], -e[3], e[:3]))
    kept = order[: len(cells) * judgements[0].budget]
    return [[sum(e[:2] == (layer, head) for e in kept) for head in range(heads)] for layer in range(len(judgements))]


@given(judgements=random_judgements(layers=3), cap=st.sampled_from([0.0, 1.0, 1.5, 4.0]))
def test_threshold(judgements, cap):
    counts = Threshold(0, cap).allocate(judgements)
    assert [c[0].tolist() for c in counts] == naive_threshold(judgements, cap)


def test_what_a_cap_shuts_out_goes_to_other_cells():
    layers = [
        judgement([[9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [3.0, 2.0, 1.0, 0.0, 0.0, 0.0]], budget=2, ordinal=0, layers=2),
        judgement([[2.5, 0.5, 0.0, 0.0, 0.0, 0.0], [0.0] * 6], budget=2, ordinal=1, layers=2),
    ]
    assert [c.tolist() for c in Threshold(0).allocate(layers)] == [[[6, 1]], [[1, 0]]]
    assert [c.tolist() for c in Threshold(0, cap=2).allocate(layers)] == [[[4, 3]], [[1, 0]]]
    assert [c.tolist() for c in Threshold(0, cap=1).allocate(layers)] == [[[2, 2]], [[2, 2]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ragged", [False, True])
def test_each_row_has_a_threshold_of_its_own_and_spends_its_budget(ragged, dtype):
    policy = parse_policy("snapkv[window=4]+threshold[floor=3]")
    seen = [
        random_observation(batch=3, length=50, budget=9, layer=i, layers=4, ragged=ragged, dtype=dtype, seed=6)
        for i in range(4)
    ]
    judgements = [policy.judge(gathered(o, policy.needs())) for o in seen]
    masks = policy.choose(judgements)
    for row in range(3):
        counts = [m[row].sum(-1).tolist() for m in masks]
        assert counts == naive_threshold(judgements, 0.0, row)
        held = sum(int(o.valid[row].sum()) for o in seen)
        assert sum(map(sum, counts)) == min(held, 4 * 2 * 9)
        for o, mask in zip(seen, masks, strict=True):
            assert mask[row][o.recent(3)[row]].all()
    assert ragged or len({str([m[row].sum(-1).tolist() for m in masks]) for row in range(3)}) == 3


def test_a_floor_on_top_is_a_larger_budget():
    """The paper's other reading: `s` entries by the threshold, beside a floor that counts for nothing."""
    floor, s, length = 6, 7, 40
    policy = parse_policy(f"knorm+threshold[floor={floor}]")
    seen = [random_observation(length=length, budget=s + floor, layer=i, layers=3) for i in range(3)]
    masks = policy.choose([policy.judge(o) for o in seen])
    old = torch.stack([-o.key_norms()[0, :, : length - floor] for o in seen])  # [layers, H_kv, L - floor]
    level = old.flatten().topk(3 * 2 * s).values[-1]
    for mask, scores in zip(masks, old, strict=True):
        assert mask[0, :, length - floor :].all()
        assert torch.equal(mask[0, :, : length - floor], scores >= level)


def test_a_floor_above_half_of_the_budget_shrinks():
    policy = parse_policy("snapkv[window=4]+threshold[floor=32]")
    judgement = policy.judge(random_observation(length=60, budget=20, layers=1))
    assert judgement.protected[0, 0].nonzero()[:, 0].tolist() == list(range(50, 60))
    assert "a window of 32 shrank to" in judgement.notes[0]
    assert policy.allocator.allocate([judgement])[0].sum() == 40


# --- flat cells -------------------------------------------------------------------------------------------------------


def test_flat_cells_keep_more():
    peaked, spread = [100.0, *[1.0] * 9], [1.0] * 10
    layers = [judgement([peaked], budget=5, ordinal=0, layers=2), judgement([spread], budget=5, ordinal=1, layers=2)]
    # Dropped: 5 / 109 and 5 / 10. Each has 1 for sure, of the other 8 the shares are 0.67 and 7.33.
    assert [c.tolist() for c in Flat().allocate(layers)] == [[[2]], [[8]]]
    assert [c.tolist() for c in Flat(1.0).allocate(layers)] == [[[5]], [[5]]]
    assert [c.tolist() for c in Flat(0.6).allocate(layers)] == [[[3]], [[7]]]


def test_cells_that_drop_nothing_are_alike():
    one = [1.0, *[0.0] * 9]
    j = judgement([one, one, one], budget=4)
    assert Flat().allocate([j])[0].tolist() == [[4, 4, 4]]
    j = judgement([[0.0] * 10] * 3, budget=4)
    assert Flat().allocate([j])[0].tolist() == [[4, 4, 4]]


def naive_flat(judgements, safeguard):
    budget, heads = judgements[0].budget, judgements[0].valid.shape[1]
    cells: dict[tuple[int, int], list] = {(i, h): [] for i in range(len(judgements)) for h in range(heads)}
    for entry in entries(judgements):
        cells[entry[:2]].append(entry)
    least, room, dropped = [], [], []
    for cell in cells.values():
        pinned = sum(e[4] for e in cell)
        least.append(min(len(cell), max(pinned, 1, int(safeguard * budget + 1e-9))))
        room.append(len(cell) - least[-1])
        free = sorted((e[3] for e in cell if not e[4]), reverse=True)
        lowest = min([0.0, *free])
        mass = [score - lowest for score in free]
        dropped.append(sum(mass[budget - pinned :]) / sum(mass) if sum(mass) else 0.0)
    total = min(len(cells) * budget, sum(map(len, cells.values())))
    more = apportion(total - sum(least), dropped, room)
    counts = [a + b for a, b in zip(least, more, strict=True)]
    return [counts[i : i + heads] for i in range(0, len(counts), heads)]


@given(
    judgements=random_judgements(layers=3),
    safeguard=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    shift=st.sampled_from([0.0, -3.0]),
)
def test_flat(judgements, safeguard, shift):
    judgements = [replace(j, scores=j.scores + shift) for j in judgements]
    counts = Flat(safeguard).allocate(judgements)
    assert_bounds(counts, judgements)
    assert [c[0].tolist() for c in counts] == naive_flat(judgements, safeguard)
    available = sum(int(j.available.sum()) for j in judgements)
    cells = 3 * judgements[0].valid.shape[1]
    assert sum(int(c.sum()) for c in counts) == min(cells * judgements[0].budget, available)


@given(data=st.data(), total=st.integers(0, 200))
def test_apportion_with_a_limit_for_each(data, total):
    wanted = data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=9))
    most = data.draw(st.lists(st.integers(0, 30), min_size=len(wanted), max_size=len(wanted)))
    shares = apportion(total, wanted, most)
    assert sum(shares) == min(total, sum(most))
    assert all(0 <= share <= limit for share, limit in zip(shares, most, strict=True))
    open_shares = [i for i in range(len(wanted)) if shares[i] < most[i]]
    for i in open_shares:
        for j in range(len(wanted)):
            assert wanted[j] > wanted[i] or shares[j] <= shares[i] + 1
