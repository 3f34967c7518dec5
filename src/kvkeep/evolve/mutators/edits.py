"""Small changes to a recipe, each with a word on what it changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from kvkeep.evolve.context import FEATURES
from kvkeep.evolve.mutators.recipe import (
    COMBINATIONS,
    CURVES,
    FACTORS,
    KINDS,
    MAX_TERMS,
    MAX_WEIGHT,
    NORMALISATIONS,
    Recipe,
    Selection,
    Term,
)

T = TypeVar("T")

# Widths and lengths that a draw chooses from, nearly geometric: 20 and 21 differ too little to spend a trial on.
SMOOTHINGS = (1, 3, 5, 7, 9, 13, 17, 25, 33, 49, 65)
CHUNKS = (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
SINKS = (0, 1, 2, 4, 8, 16)
RECENT = (0, 4, 8, 16, 32, 64, 128)

# Decimals of a weight: what is finer changes no choice that a search could tell from noise.
DECIMALS = 3


class Edited(NamedTuple):
    """A recipe, and what was changed to get it."""

    recipe: Recipe
    note: str


Edit = Callable[[Recipe, np.random.Generator], Edited | None]


def reweigh(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """One weight times a factor, which is usually near 1; one in ten changes its sign."""
    i = int(random.integers(len(recipe.terms)))
    term = recipe.terms[i]
    factor = float(np.exp(random.normal(0, 0.5))) * (-1 if random.random() < 0.1 else 1)
    return _with_term(recipe, i, replace(term, weight=_weight(term.weight * factor)), "weight")


def reweigh_all(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """All weights, each a little."""
    factors = np.exp(random.normal(0, 0.15, len(recipe.terms)))
    terms = tuple(
        replace(term, weight=_weight(term.weight * float(factor)))
        for term, factor in zip(recipe.terms, factors, strict=True)
    )
    return Edited(replace(recipe, terms=terms), "all weights a little")


def add_term(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Another term, with a small weight of either sign."""
    if len(recipe.terms) == MAX_TERMS:
        return None
    term = random_term(random)
    return Edited(replace(recipe, terms=(*recipe.terms, term)), f"added {term.weight:g} {term.feature}")


def drop_term(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """One term less."""
    if len(recipe.terms) == 1:
        return None
    i = int(random.integers(len(recipe.terms)))
    terms = recipe.terms[:i] + recipe.terms[i + 1 :]
    return Edited(replace(recipe, terms=terms), f"dropped {recipe.terms[i].feature}")


def swap_feature(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Another feature in a term."""
    i = int(random.integers(len(recipe.terms)))
    term = recipe.terms[i]
    return _with_term(recipe, i, replace(term, feature=_other(FEATURES, term.feature, random)), "feature")


def renormalise(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Another normalisation of a term."""
    i = int(random.integers(len(recipe.terms)))
    term = recipe.terms[i]
    changed = replace(term, normalisation=_other(NORMALISATIONS, term.normalisation, random))
    return _with_term(recipe, i, changed, "normalisation")


def renormalise_all(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """One normalisation for all terms."""
    name = _other(NORMALISATIONS, "", random)
    terms = tuple(replace(term, normalisation=name) for term in recipe.terms)
    return Edited(replace(recipe, terms=terms), f"normalisation of all terms {name}")


def resmooth(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Another width of a term's smoothing."""
    i = int(random.integers(len(recipe.terms)))
    term = recipe.terms[i]
    return _with_term(recipe, i, replace(term, smoothing=_near(SMOOTHINGS, term.smoothing, random)), "smoothing")


def recurve(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Another curve of a term."""
    i = int(random.integers(len(recipe.terms)))
    term = recipe.terms[i]
    return _with_term(recipe, i, replace(term, curve=_other(CURVES, term.curve, random)), "curve")


def refactor(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Another factor of a term, inside of its normalisation or outside; or none."""
    i = int(random.integers(len(recipe.terms)))
    term = recipe.terms[i]
    name = "times" if random.random() < 0.5 else "gate"
    former = term.times if name == "times" else term.gate
    factor = "" if former and random.random() < 0.5 else _other(FACTORS, former, random)
    changed = replace(term, times=factor) if name == "times" else replace(term, gate=factor)
    return _with_term(recipe, i, changed, name)


def recombine(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Sum, largest or product: another one."""
    if len(recipe.terms) == 1:
        return None
    combination = _other(COMBINATIONS, recipe.combination, random)
    return Edited(replace(recipe, combination=combination), f"combination {recipe.combination} -> {combination}")


def change_kind(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Tokens, chunks, or chunks and then tokens: another one."""
    selection = recipe.selection
    return _with_selection(recipe, replace(selection, kind=_other(KINDS, selection.kind, random)))


def change_chunk(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """Another length of chunks."""
    selection = recipe.selection
    if selection.kind == "top_k":
        return None
    return _with_selection(recipe, replace(selection, chunk=_near(CHUNKS, selection.chunk, random)))


def change_sinks(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """More or fewer first positions that always stay."""
    selection = recipe.selection
    return _with_selection(recipe, replace(selection, sinks=_near(SINKS, selection.sinks, random)))


def change_recent(recipe: Recipe, random: np.random.Generator) -> Edited | None:
    """More or fewer last positions that always stay."""
    selection = recipe.selection
    return _with_selection(recipe, replace(selection, recent=_near(RECENT, selection.recent, random)))


# How often each is drawn, relative to the others. Weights most often: they are cheap to get nearly right.
EDITS: Mapping[Edit, float] = {
    reweigh: 5.0,
    reweigh_all: 3.0,
    add_term: 3.0,
    drop_term: 1.5,
    swap_feature: 2.0,
    renormalise: 2.0,
    renormalise_all: 0.5,
    resmooth: 2.0,
    recurve: 1.0,
    refactor: 1.0,
    recombine: 0.5,
    change_kind: 1.0,
    change_chunk: 1.5,
    change_sinks: 1.0,
    change_recent: 1.0,
}


def edit(recipe: Recipe, random: np.random.Generator) -> Edited:
    """One change, drawn by the weights of `EDITS`; always another recipe."""
    edits = list(EDITS)
    weights = np.array([EDITS[one] for one in edits])
    while True:
        changed = edits[int(random.choice(len(edits), p=weights / weights.sum()))](recipe, random)
        if changed is not None and changed.recipe != recipe:
            return changed


def cross(first: Recipe, second: Recipe, random: np.random.Generator) -> Edited:
    """Some terms of both, the selection of one, and how one of them joins its terms."""
    terms = list(dict.fromkeys((*first.terms, *second.terms)))
    count = int(random.integers(1, min(MAX_TERMS, len(terms)) + 1))
    chosen = sorted(int(i) for i in random.choice(len(terms), size=count, replace=False))
    selection = (first, second)[int(random.integers(2))].selection
    combination = (first, second)[int(random.integers(2))].combination
    taken = sum(terms[i] in first.terms for i in chosen)
    note = f"crossed: {taken} terms of the first, {count - taken} of the second, {describe(selection)}"
    return Edited(Recipe(tuple(terms[i] for i in chosen), selection, combination), note)


def random_term(random: np.random.Generator) -> Term:
    """Any feature with any normalisation; smoothed, curved or multiplied now and then."""
    return Term(
        feature=_other(FEATURES, "", random),
        weight=_weight(float(random.uniform(0.05, 0.5)) * (-1 if random.random() < 0.25 else 1)),
        normalisation=_other(NORMALISATIONS, "none", random),
        smoothing=_other(SMOOTHINGS, 1, random) if random.random() < 0.3 else 1,
        curve=_other(CURVES, "none", random) if random.random() < 0.2 else "none",
        times=_other(FACTORS, "", random) if random.random() < 0.15 else "",
        gate=_other(FACTORS, "", random) if random.random() < 0.15 else "",
    )


def describe(selection: Selection) -> str:
    """A selection in a few words."""
    words = {"top_k": "top-k", "chunks": "chunks of {}", "chunks_filled": "chunks of {} filled up to K"}
    text = words[selection.kind].format(selection.chunk)
    return text + "".join(
        f", {number} {what}" for number, what in ((selection.sinks, "sinks"), (selection.recent, "recent")) if number
    )


def _with_term(recipe: Recipe, i: int, term: Term, what: str) -> Edited:
    former = recipe.terms[i]
    terms = (*recipe.terms[:i], term, *recipe.terms[i + 1 :])
    old, new = (getattr(one, what) for one in (former, term))
    return Edited(replace(recipe, terms=terms), f"{what} of {former.feature} {old or 'none'} -> {new or 'none'}")


def _with_selection(recipe: Recipe, selection: Selection) -> Edited:
    note = f"selection {describe(recipe.selection)} -> {describe(selection)}"
    return Edited(replace(recipe, selection=selection), note)


def _weight(weight: float) -> float:
    """Within bounds, rounded, and never nothing: a term of no weight would be a term for show."""
    rounded = round(min(MAX_WEIGHT, max(-MAX_WEIGHT, weight)), DECIMALS)
    return rounded or 10**-DECIMALS


def _other(known: Sequence[T], former: T, random: np.random.Generator) -> T:
    rest = [one for one in known if one != former]
    return rest[int(random.integers(len(rest)))]


def _near(known: Sequence[int], former: int, random: np.random.Generator) -> int:
    """Usually a neighbour of the former number, one in four any."""
    if random.random() < 0.25:
        return _other(known, former, random)
    above = [one for one in known if one > former]
    below = [one for one in known if one < former]
    upwards = bool(above) and (not below or random.random() < 0.5)
    return above[0] if upwards else below[-1]
