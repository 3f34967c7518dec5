"""Contexts on which programs give themselves away, and results that are too good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from kvkeep.evolve.canaries import (
    POSITIONAL,
    Canaries,
    flag_ceiling,
    flag_identical,
    flag_position_keyed,
    jittered,
    shuffled,
)
from kvkeep.evolve.context import FEATURES, SCALARS, PrefillContext
from kvkeep.evolve.guard import PolicyRefused, check_scores, check_selection
from kvkeep.evolve.program import SEEDS, Program, seed_program

from .mutators.contexts import filled, observed
from .test_sandbox import by, here, narrowest


def same(a: PrefillContext, b: PrefillContext) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in (*FEATURES, *SCALARS))


def test_shuffled_content_moves_together_and_leaves_positions_where_they_are():
    context = observed(length=400, budget=100)
    moved = shuffled(context, np.random.default_rng(0))
    content = [name for name in FEATURES if name not in POSITIONAL]
    for name in (*POSITIONAL, *SCALARS):
        np.testing.assert_array_equal(getattr(moved, name), getattr(context, name))
    before = np.stack([getattr(context, name) for name in content], axis=1)
    after = np.stack([getattr(moved, name) for name in content], axis=1)
    assert sorted(map(tuple, before.tolist())) == sorted(map(tuple, after.tolist()))
    assert abs(spearmanr(context.global_attention, moved.global_attention).statistic) < 0.3
    for name in ("chunk_attention_mean", "chunk_rank"):  # the same in all of a chunk, there as here
        assert np.ptp(getattr(moved, name).reshape(20, 20), axis=1).max() == 0
    assert not np.array_equal(moved.chunk_rank, context.chunk_rank)
    short = observed(length=50, budget=10)
    assert not np.array_equal(shuffled(short, np.random.default_rng(0)).key_norm, short.key_norm)


@settings(max_examples=50)
@given(length=st.integers(1, 120), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_jittered_contexts_are_contexts_of_another_shape(length, share, seed):
    context = observed(1, length=length, budget=max(1, round(share * length)))
    changed = jittered(context, np.random.default_rng(seed))
    assert (length + 1) // 2 <= changed.L <= length
    assert 1 <= changed.K <= changed.L
    assert (changed.H, changed.Q) == (context.H, context.Q)
    np.testing.assert_array_equal(changed.position, np.arange(changed.L))
    assert changed.recency[-1] == 0
    assert changed.sink_mask.tolist() == [float(p < 4) for p in range(changed.L)]
    assert changed.recent_mask.tolist() == [float(p >= changed.L - 32) for p in range(changed.L)]
    rows = {tuple(row) for row in np.stack([context.key_norm, context.value_norm], axis=1).tolist()}
    assert {tuple(row) for row in np.stack([changed.key_norm, changed.value_norm], axis=1).tolist()} <= rows


def test_canaries_are_the_same_for_the_same_seed():
    contexts = [observed(seed) for seed in range(3)]
    one, two, other = Canaries.of(contexts), Canaries.of(iter(contexts)), Canaries.of(contexts, seed=1)
    assert all(same(a, b) for a, b in zip(one.contexts, two.contexts, strict=True))
    assert not all(same(a, b) for a, b in zip(one.contexts, other.contexts, strict=True))
    assert len(one.contexts) == 9


def judged(program: Program) -> PolicyRefused | None:
    canaries = Canaries.of(observed(seed) for seed in range(4))
    kept = []
    for context in canaries.contexts:
        scores = check_scores(program.functions().score_tokens(context), context)
        chosen = program.functions().select_tokens_to_keep(scores, context)
        kept.append(check_selection(chosen, context, chunk=program.chunk))
    return canaries.judge(kept)


@pytest.mark.parametrize("name", SEEDS)
def test_of_the_seeds_only_the_random_one_is_keyed_to_positions(name):
    refusal = judged(seed_program(name))
    assert (refusal is not None) == (name == "random")


@pytest.mark.parametrize(
    ("expression", "keyed"),
    [
        ("context.relative_position", True),
        ("-context.recency + 0.0 * context.global_attention", True),
        ("context.position % 7 + 1e-9 * context.global_attention", True),
        ("np.cos(np.arange(context.L) * (1 + context.layer))", True),
        ("context.question_mask + context.sink_mask", True),
        ("context.global_attention", False),
        ("context.value_norm", False),
        ("context.chunk_rank", False),
        ("context.recent_mask + context.sink_mask + 0.5 * context.key_norm / np.max(context.key_norm)", False),
    ],
)
def test_who_does_not_look_is_found(expression, keyed):
    refusal = judged(by(expression))
    assert (refusal is not None) == keyed
    if refusal is not None:
        assert (refusal.layer, refusal.reason) == ("canary", "position-keyed")


def test_contexts_that_say_nothing_accuse_nobody():
    flat = filled(1.0)
    everything = observed(length=40, budget=40)
    for context in (flat, everything):
        canaries = Canaries.of([context])
        kept = [np.arange(c.K) for c in canaries.contexts]
        assert canaries.judge(kept) is None
    assert flag_position_keyed([], [], [], []) is None


def test_canaries_run_in_the_sandbox():
    from kvkeep.evolve.sandbox import Sandbox

    narrowest()
    canaries = Canaries.of([observed(0), observed(1)])
    only_long = by("context.global_attention[: context.L if context.L >= 150 else 1]")
    with Sandbox() as sandbox:
        good, keyed, brittle = canaries.run(sandbox, [seed_program("frc"), seed_program("random"), only_long])
    assert good.refusal is None
    for context, kept in zip(canaries.recorded, good.selections, strict=True):
        np.testing.assert_array_equal(kept, here(seed_program("frc"), context))
    assert (keyed.refusal.layer, keyed.selections) == ("canary", None)
    assert (brittle.refusal.layer, brittle.refusal.reason) == ("invariant", "shape")


def test_nothing_cut_is_better_than_the_whole():
    assert flag_ceiling(0.5, 0.4, 0.6) is None
    assert flag_ceiling(0.6, 0.4, 0.6) is None
    refusal = flag_ceiling(0.61, 0.4, 0.6)
    assert (refusal.layer, refusal.reason) == ("ceiling", "above-full")
    assert "0.4 to 0.6" in refusal.expected


def test_nothing_cut_gives_the_same_numbers():
    full = [np.array([-1.5, -0.25]), np.array([-3.0])]
    assert flag_identical(full, full).reason == "identical-to-full"
    assert flag_identical([full[0], np.array([-3.0000001])], full) is None
    assert flag_identical([], []) is None
    assert flag_identical([-1.5, -2.5], [-1.5, -2.5]).layer == "ceiling"
