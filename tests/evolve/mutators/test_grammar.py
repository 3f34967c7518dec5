"""The grammar: programs that are read back, children that are always valid, draws that repeat and differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.evolve.context import FEATURES
from kvkeep.evolve.guard import check_source
from kvkeep.evolve.mutators.edits import EDITS, cross, edit
from kvkeep.evolve.mutators.grammar import Grammar
from kvkeep.evolve.mutators.protocol import MutatorError, Parent
from kvkeep.evolve.mutators.reading import SEED_RECIPES, read
from kvkeep.evolve.mutators.recipe import (
    COMBINATIONS,
    CURVES,
    FACTORS,
    KINDS,
    MAX_SMOOTHING,
    MAX_TERMS,
    NORMALISATIONS,
    Recipe,
    Selection,
    Term,
)
from kvkeep.evolve.mutators.rendering import program_of, render
from kvkeep.evolve.program import SEEDS, Program, seed_program

from .contexts import all_kinds, choice, observed

TERMS = st.builds(
    Term,
    feature=st.sampled_from(FEATURES),
    weight=st.floats(-2, 2).map(lambda weight: round(weight, 3)),
    normalisation=st.sampled_from(NORMALISATIONS),
    smoothing=st.integers(0, MAX_SMOOTHING // 2).map(lambda half: 2 * half + 1),
    curve=st.sampled_from(CURVES),
    times=st.sampled_from(("", *FACTORS)),
    gate=st.sampled_from(("", *FACTORS)),
)
SELECTIONS = st.builds(
    Selection,
    kind=st.sampled_from(KINDS),
    chunk=st.integers(2, 64),
    sinks=st.integers(0, 16),
    recent=st.integers(0, 128),
)
RECIPES = st.builds(
    Recipe,
    terms=st.lists(TERMS, min_size=1, max_size=MAX_TERMS).map(tuple),
    selection=SELECTIONS,
    combination=st.sampled_from(COMBINATIONS),
)

# As a language model might write it: nothing of it is in the grammar's words.
FOREIGN = seed_program("frc").with_block(
    '''
SHARE = 0.7


def score_tokens(context):
    """A mixture that no recipe describes."""
    peak = np.maximum.accumulate(context.local_attention)
    return SHARE * np.sqrt(context.max_head_attention) + (1 - SHARE) * peak ** 2 / (1e-6 + 3.0 * peak[0])


def select_tokens_to_keep(scores, context):
    best = np.argsort(-scores, kind="stable")
    return best[: context.K]
''',
    "foreign",
)


@given(RECIPES)
@settings(max_examples=60)
def test_every_recipe_is_a_valid_program_that_is_read_back(recipe: Recipe) -> None:
    program = program_of(recipe)
    check_source(program.source)
    again = read(program)
    assert again is not None
    assert render(again) == render(recipe)
    for context in all_kinds():
        choice(program, context)


@pytest.mark.parametrize("name", SEED_RECIPES)
def test_a_seed_s_recipe_keeps_what_the_seed_keeps(name: str) -> None:
    seed = seed_program(name)
    recipe = read(seed)
    assert recipe is not None
    program = program_of(recipe)
    for seed_of_text in range(40):
        context = observed(seed_of_text, length=90 + 7 * seed_of_text, budget=20 + 2 * seed_of_text)
        np.testing.assert_array_equal(choice(program, context), choice(seed, context))
    ragged = observed(3, ragged=True)
    np.testing.assert_array_equal(choice(program, ragged), choice(seed, ragged))


def test_kinds_of_selection_keep_what_they_say() -> None:
    context = observed(5, length=203, budget=66)
    terms = (Term("global_attention", 1.0),)
    scores = program_of(Recipe(terms)).functions().score_tokens(context)

    best = choice(program_of(Recipe(terms, Selection("top_k"))), context)
    assert set(best) == set(np.argsort(-scores, kind="stable")[:66])

    protected = choice(program_of(Recipe(terms, Selection("top_k", sinks=4, recent=10))), context)
    assert {0, 1, 2, 3, *range(193, 203)} <= set(protected)
    assert set(protected) - {0, 1, 2, 3, *range(193, 203)} <= set(np.argsort(-scores, kind="stable")[:66])

    means = [scores[start : start + 16].mean() for start in range(0, 203, 16)]
    order = list(np.argsort(-np.array(means), kind="stable"))
    chunks = choice(program_of(Recipe(terms, Selection("chunks", chunk=16))), context)
    whole = {i for c in order[:4] for i in range(16 * c, min(203, 16 * c + 16))}
    assert set(chunks) == whole

    filled = choice(program_of(Recipe(terms, Selection("chunks_filled", chunk=16))), context)
    rest = [i for i in np.argsort(-scores, kind="stable") if i not in whole]
    assert set(filled) == whole | set(rest[: 66 - len(whole)])

    pinned = choice(program_of(Recipe(terms, Selection("chunks", chunk=16, sinks=1, recent=1))), context)
    assert {*range(16), *range(192, 203)} <= set(pinned)

    both = choice(program_of(Recipe(terms, Selection("chunks_filled", chunk=16, sinks=2, recent=3))), context)
    assert {0, 1, 200, 201, 202} <= set(both)


def test_normalisations_do_what_their_names_say() -> None:
    context = observed(7)
    feature = context.key_norm.astype(float)

    def scored(**options: object) -> np.ndarray:
        return program_of(Recipe((Term("key_norm", 1.0, **options),))).functions().score_tokens(context)  # type: ignore[arg-type]

    near = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(scored(normalisation="none"), feature, **near)
    np.testing.assert_allclose(scored(normalisation="max_abs"), feature / feature.max(), **near)
    behind = feature[context.sink_mask == 0].max()
    np.testing.assert_allclose(scored(normalisation="max_abs_without_sinks"), feature / behind, **near)
    low, high = feature.min(), feature.max()
    np.testing.assert_allclose(scored(normalisation="min_max"), (feature - low) / (high - low), **near)
    np.testing.assert_allclose(scored(normalisation="mean"), feature / feature.mean(), **near)
    spread = (feature - feature.mean()) / feature.std()
    np.testing.assert_allclose(scored(normalisation="z_score"), spread, rtol=1e-4, atol=1e-4)
    below = np.array([(feature < one).sum() for one in feature]) / (context.L - 1)
    np.testing.assert_allclose(scored(normalisation="rank"), below, **near)
    padded = np.pad(feature, 2)
    means = np.array([padded[i : i + 5].mean() for i in range(context.L)])
    np.testing.assert_allclose(scored(normalisation="none", smoothing=5), means, **near)


@pytest.mark.parametrize("name", [*SEEDS, "foreign"])
def test_children_are_valid_and_differ(name: str) -> None:
    start = FOREIGN if name == "foreign" else seed_program(name)
    parents = [Parent(start, 1.0), *(Parent(seed_program(other), 0.5) for other in SEEDS if other != name)]
    seen = set()
    for i in range(40):
        proposal = Grammar().propose(parents, np.random.default_rng(i))
        program = proposal.program
        assert program is not None
        assert proposal.note
        assert proposal.rejection == ""
        assert proposal.parents[0] == start.digest
        assert program.digest not in {parent.program.digest for parent in parents}
        check_source(program.source)
        for context in all_kinds()[::3]:
            choice(program, context)
        seen.add(program.digest)
    assert len(seen) > 30


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.sampled_from(SEEDS))
def test_generations_stay_valid_and_repeat_from_the_seed(seed: int, name: str) -> None:
    def walk() -> list[Program]:
        random = np.random.default_rng(seed)
        found = [seed_program(name), seed_program("frc")]
        for _ in range(12):
            chosen = [found[int(i)] for i in random.integers(len(found), size=2)]
            proposal = Grammar().propose([Parent(program) for program in chosen], random)
            assert proposal.program is not None
            found.append(proposal.program)
        return found

    programs = walk()
    assert [program.digest for program in programs] == [program.digest for program in walk()]
    for program in programs[-3:]:
        check_source(program.source)
        for context in all_kinds():
            choice(program, context)


@given(RECIPES, st.integers(0, 2**32))
@settings(max_examples=8)
def test_every_edit_gives_a_recipe_or_says_that_it_cannot(recipe: Recipe, seed: int) -> None:
    for one in EDITS:
        changed = one(recipe, np.random.default_rng(seed))
        if changed is not None:
            assert changed.note
            assert read(program_of(changed.recipe)) is not None
    assert edit(recipe, np.random.default_rng(seed)).recipe != recipe


@given(RECIPES, RECIPES, st.integers(0, 2**32))
@settings(max_examples=40)
def test_a_crossing_has_nothing_that_neither_parent_has(first: Recipe, second: Recipe, seed: int) -> None:
    child = cross(first, second, np.random.default_rng(seed)).recipe
    assert set(child.terms) <= {*first.terms, *second.terms}
    assert child.selection in (first.selection, second.selection)


def test_a_program_without_numbers_is_rejected_with_a_reason() -> None:
    bare = FOREIGN.with_block(
        "def score_tokens(context):\n    return context.local_attention\n\n"
        "def select_tokens_to_keep(scores, context):\n    return np.argsort(-scores)[: context.K]\n"
    )
    proposal = Grammar().propose([Parent(bare)], np.random.default_rng(0))
    assert proposal.program is None
    assert proposal.rejection == "unchanged"


def test_without_parents_it_says_so() -> None:
    with pytest.raises(MutatorError, match="at least one parent"):
        Grammar().propose([], np.random.default_rng(0))


def test_many_are_as_one_by_one() -> None:
    batches = [[Parent(seed_program(name))] for name in SEEDS]
    together = Grammar().propose_many(batches, [np.random.default_rng(i) for i in range(len(batches))])
    apart = [Grammar().propose(batch, np.random.default_rng(i)) for i, batch in enumerate(batches)]
    assert together == apart


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Term("attention", 0.5), "'attention'"),
        (lambda: Term("key_norm", float("nan")), "nan"),
        (lambda: Term("key_norm", 0.5, smoothing=4), "odd"),
        (lambda: Term("key_norm", 0.5, gate="1 - key_norm"), "factor"),
        (lambda: Selection("best"), "'best'"),
        (lambda: Recipe(()), "number of terms"),
    ],
)
def test_a_recipe_refuses_what_it_cannot_say(make, message: str) -> None:
    with pytest.raises(MutatorError, match=message):
        make()
