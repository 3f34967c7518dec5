"""Recipes written as programs that one can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from kvkeep.evolve.mutators.recipe import COMPLEMENT, Recipe, Selection, Term
from kvkeep.evolve.program import END, START, Program

# The function of each normalisation and curve; `none` has none.
NORMALISING = {
    "max_abs": "by_largest",
    "max_abs_without_sinks": "by_largest_after_sinks",
    "min_max": "by_range",
    "mean": "by_mean",
    "rank": "by_rank",
    "z_score": "by_spread",
}
CURVING = {"root": "root", "logarithm": "logarithm", "square": "square"}

# What a program says of itself, and which of these functions it needs.
_FUNCTIONS = {
    "by_largest": '''\
def by_largest(feature):
    """Divide by the largest magnitude; a feature of zeros stays zero."""
    return feature / max(np.max(np.abs(feature)), 1e-30)
''',
    "by_largest_after_sinks": '''\
def by_largest_after_sinks(feature, context):
    """Divide by the largest magnitude behind the first positions, which would dwarf all others."""
    size = np.abs(feature)
    return feature / max(np.max(size * (1 - context.sink_mask)), 1e-6 * np.max(size), 1e-30)
''',
    "by_range": '''\
def by_range(feature):
    """From 0 at the smallest to 1 at the largest."""
    lowest = np.min(feature)
    return (feature - lowest) / max(np.max(feature) - lowest, 1e-30)
''',
    "by_mean": '''\
def by_mean(feature):
    """Divide by the mean magnitude."""
    return feature / max(np.mean(np.abs(feature)), 1e-30)
''',
    "by_rank": '''\
def by_rank(feature):
    """The share of positions below; of equal ones the later position ranks higher."""
    rank = np.argsort(np.argsort(feature, kind="stable"), kind="stable")
    return rank / max(len(feature) - 1, 1)
''',
    "by_spread": '''\
def by_spread(feature):
    """How many standard deviations above the mean."""
    return (feature - np.mean(feature)) / max(np.std(feature), 1e-30)
''',
    "root": '''\
def root(feature):
    """The square root of the magnitude, which lifts what is small."""
    return np.sqrt(np.abs(feature))
''',
    "logarithm": '''\
def logarithm(feature):
    """The logarithm of the magnitude."""
    return np.log(np.abs(feature) + 1e-9)
''',
    "square": '''\
def square(feature):
    """The square, which lowers what is small."""
    wide = feature.astype(np.float64)
    return wide * wide
''',
    "smooth": '''\
def smooth(feature, width):
    """The mean over neighbours; beyond the ends there are zeros."""
    return np.convolve(feature, np.ones(width) / width, mode="full")[width // 2 :][: len(feature)]
''',
    "in_logs": '''\
def in_logs(term):
    """Sums of these are products of terms; zero and less count as nearly zero."""
    return np.log(np.maximum(term, 0) + 1e-6)
''',
    "protected": '''\
def protected(context):
    """The first and the last positions, at most half of all that may stay."""
    sinks = np.flatnonzero(context.position < SINKS)[: context.K // 2]
    recent = min(RECENT, context.K // 2 - len(sinks))
    return np.concatenate([sinks, np.arange(context.L - recent, context.L)])
''',
}

_TOP_K = '''\
def select_tokens_to_keep(scores, context):
    """The best scores; of equal ones the earlier position."""
    return np.sort(np.argsort(-scores, kind="stable")[: context.K])
'''

_TOP_K_PROTECTED = '''\
def select_tokens_to_keep(scores, context):
    """What is protected, then the best scores; of equal ones the earlier position."""
    kept = protected(context)
    order = np.argsort(-scores, kind="stable")
    others = order[np.isin(order, kept, invert=True)]
    return np.sort(np.concatenate([kept, others[: context.K - len(kept)]]))
'''

_PINNED = "    means = np.where(np.isin(np.arange(len(means)), chunk[protected(context)]), np.inf, means)\n"

_CHUNKS = '''\
def select_tokens_to_keep(scores, context):
    """Chunks with the best mean score, from the best one down while they fit."""
    chunk = (context.position // CHUNK).astype(np.int64)
    sizes = np.bincount(chunk)
    means = np.where(sizes > 0, np.bincount(chunk, weights=scores) / np.maximum(sizes, 1), -np.inf)
{pinned}    order = np.argsort(-means, kind="stable")
    kept = np.flatnonzero(np.isin(chunk, order[np.cumsum(sizes[order]) <= context.K]))
    if len(kept) == 0:  # not even the best chunk fits: the best positions of it
        best = np.flatnonzero(chunk == order[0])
        kept = np.sort(best[np.argsort(-scores[best], kind="stable")[: context.K]])
    return kept
'''

_CHUNKS_FILLED = '''\
def select_tokens_to_keep(scores, context):
    """The best runs of neighbours while they fit, then the best single positions: K in all."""
{pinned}    run = (context.position // RUN).astype(np.int64)
    sizes = np.bincount(run)
    means = np.where(sizes > 0, np.bincount(run, weights=scores) / np.maximum(sizes, 1), -np.inf)
    order = np.argsort(-means, kind="stable")
    level = np.isin(run, order[np.cumsum(sizes[order]) <= {room}]).astype(np.int64){more}
    best = np.argsort(-scores, kind="stable")
    return np.sort(best[np.argsort(-level[best], kind="stable")[: context.K]])
'''


def render(recipe: Recipe) -> str:
    """The recipe as the lines of a block. The same recipe gives the same text."""
    body = _scoring(recipe)
    selecting = _selecting(recipe.selection)
    used = {name for name in _FUNCTIONS if f"{name}(" in body + selecting}
    functions = [_FUNCTIONS[name] for name in _FUNCTIONS if name in used]
    constants = "".join(f"{name} = {number}\n" for name, number in _constants(recipe.selection))
    return "\n\n".join(part for part in (constants, *functions, body, selecting) if part)


def program_of(recipe: Recipe, name: str | None = None) -> Program:
    """The recipe as a whole program.

    Args:
        recipe: what to write.
        name: what to call it; None for `grammar-` and the short digest.
    """
    source = f'"""Written by the grammar."""\n\nimport numpy as np\n\n{START}\n{render(recipe)}\n\n{END}\n'
    program = Program(source, name or "grammar")
    return program if name else named(program, "grammar")


def named(program: Program, prefix: str) -> Program:
    """The program under a name that tells it from others of its kind."""
    return replace(program, name=f"{prefix}-{program.short_digest}")


def _scoring(recipe: Recipe) -> str:
    names = [f"term_{i}" for i in range(1, len(recipe.terms) + 1)]
    lines = [f"    {name} = {_term(term)}\n" for name, term in zip(names, recipe.terms, strict=True)]
    weights = [repr(float(term.weight)) for term in recipe.terms]
    combination = recipe.combination if len(recipe.terms) > 1 else "sum"  # of one term they are all alike
    if combination == "product":
        names = [f"in_logs({name})" for name in names]
    weighted = [f"{weight} * {name}" for weight, name in zip(weights, names, strict=True)]
    if combination == "largest":
        joined = reduce(lambda left, right: f"np.maximum({left}, {right})", weighted)
        what = "The largest of the weighted terms"
    else:
        joined = " + ".join(weighted)
        what = f"The weighted {combination} of the terms"
    head = f'def score_tokens(context):\n    """{what}; higher stays."""\n'
    return head + "".join(lines) + f"    return {joined}\n"


def _term(term: Term) -> str:
    text = f"context.{term.feature}" + (f" * {_factor(term.times)}" if term.times else "")
    if term.curve != "none":
        text = f"{CURVING[term.curve]}({text})"
    if term.smoothing > 1:
        text = f"smooth({text}, {term.smoothing})"
    if term.normalisation != "none":
        more = ", context" if term.normalisation == "max_abs_without_sinks" else ""
        text = f"{NORMALISING[term.normalisation]}({text}{more})"
    return text + (f" * {_factor(term.gate)}" if term.gate else "")


def _factor(factor: str) -> str:
    if factor.startswith(COMPLEMENT):
        return f"(1 - context.{factor.removeprefix(COMPLEMENT)})"
    return f"context.{factor}"


def _constants(selection: Selection) -> Iterator[tuple[str, int]]:
    if selection.kind == "chunks":
        yield "CHUNK", selection.chunk  # tells that the program keeps whole chunks: see `program.py`
    if selection.kind == "chunks_filled":
        yield "RUN", selection.chunk
    if _protects(selection):
        yield "SINKS", selection.sinks
        yield "RECENT", selection.recent


def _protects(selection: Selection) -> bool:
    return selection.sinks > 0 or selection.recent > 0


def _selecting(selection: Selection) -> str:
    protects = _protects(selection)
    match selection.kind:
        case "top_k":
            return _TOP_K_PROTECTED if protects else _TOP_K
        case "chunks":
            return _CHUNKS.format(pinned=_PINNED if protects else "")
        case _:
            return _CHUNKS_FILLED.format(
                pinned="    pinned = protected(context)\n" if protects else "",
                room="context.K - len(pinned)" if protects else "context.K",
                more=" + 2 * np.isin(np.arange(context.L), pinned)" if protects else "",
            )
