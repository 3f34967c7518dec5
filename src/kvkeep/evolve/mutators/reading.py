"""Programs read back as recipes: what the grammar has written, and the seeds."""

from __future__ import annotations

import ast
from functools import cache
from typing import NoReturn

from kvkeep.evolve.mutators.definitions import parse
from kvkeep.evolve.mutators.protocol import MutatorError
from kvkeep.evolve.mutators.recipe import COMPLEMENT, Recipe, Selection, Term
from kvkeep.evolve.mutators.rendering import CURVING, NORMALISING, program_of
from kvkeep.evolve.program import Program, seed_program

# What the seeds do, in the grammar's words; `random` draws numbers, which the grammar has no words for.
SEED_RECIPES = {
    "frc": Recipe(
        (
            Term("local_attention", 0.55),
            Term("neighbor_attn_density", 0.30),
            Term("max_head_attention", 0.15),
        ),
        Selection("chunks", chunk=20),
    ),
    "snapkv-like": Recipe(
        (Term("local_attention", 1.0, "none", smoothing=7, times="1 - recent_mask"),), Selection(recent=32)
    ),
    "v1-generic": Recipe(
        (
            Term("global_attention", 0.4),
            Term("local_attention", 0.3),
            Term("key_norm", -0.1),
            Term("relative_position", -0.1, "none"),
            Term("recency", -0.1, "none"),
        ),
    ),
    # Times L, which changes no order: the share of the attention is then the attention over its mean.
    "expected-attention-like": Recipe(
        (
            Term("global_attention", 1.0, "mean", gate="value_norm"),
            Term("value_norm", 0.01, "none"),
        ),
        Selection(sinks=4),
    ),
}

_NORMALISATIONS = {function: name for name, function in NORMALISING.items()}
_CURVES = {function: name for name, function in CURVING.items()}


class _Unreadable(Exception):
    """The program says something that no recipe says."""


def read(program: Program) -> Recipe | None:
    """The recipe of a program; None for one that the grammar has not written and that is no seed.

    A program is read only if the recipe gives exactly that program again (comments and blanks aside), or a seed that
    keeps the same entries.
    """
    seed = _seeds().get(program.digest)
    if seed is not None:
        return seed
    try:
        recipe = _recipe(parse(program.block))
    except (_Unreadable, MutatorError):
        return None
    return recipe if program_of(recipe).digest == program.digest else None


@cache
def _seeds() -> dict[str, Recipe]:
    return {seed_program(name).digest: recipe for name, recipe in SEED_RECIPES.items()}


# What follows reads the parts that differ between recipes. It need not be strict: `read` compares the whole.


def _recipe(tree: ast.Module) -> Recipe:
    constants: dict[str, int] = {}
    functions: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int(number))):
                constants[name] = number
            case ast.FunctionDef(name=name):
                functions[name] = node
    kind = "chunks" if "CHUNK" in constants else "chunks_filled" if "RUN" in constants else "top_k"
    selection = Selection(
        kind,
        chunk=constants.get("CHUNK", constants.get("RUN", 20)),
        sinks=constants.get("SINKS", 0),
        recent=constants.get("RECENT", 0),
    )
    match functions["score_tokens"].body:
        case [ast.Expr(), *assigned, ast.Return(value=joined)]:  # its docstring, the terms, what is returned
            pass
        case _:
            _give_up()
    terms: dict[str, Term] = {}
    for node in assigned:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                terms[name] = _term(value)
            case _:
                _give_up()
    combination, weights = _weights(joined)
    if list(weights) != list(terms):
        _give_up()
    weighted = tuple(_weigh(term, weights[name]) for name, term in terms.items())
    return Recipe(weighted, selection, combination)


def _weigh(term: Term, weight: float) -> Term:
    return Term(term.feature, weight, term.normalisation, term.smoothing, term.curve, term.times, term.gate)


def _weights(node: ast.expr | None) -> tuple[str, dict[str, float]]:
    """How the terms are joined, and the weight of each by its name."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            kind, weights = _weights(left)
            other, more = _weights(right)
            if other == kind or "sum" not in (kind, other):
                return kind, weights | more
        case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr="maximum"), args=[left, right]):
            return "largest", _weights(left)[1] | _weights(right)[1]
        case ast.BinOp(left=weight, op=ast.Mult(), right=ast.Name(id=name)):
            return "sum", {name: _number(weight)}
        case ast.BinOp(left=weight, op=ast.Mult(), right=ast.Call(args=[ast.Name(id=name)])):
            return "product", {name: _number(weight)}
    return _give_up()


def _number(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=float(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float(number))):
            return -number
    return _give_up()


def _term(node: ast.expr) -> Term:
    """A term without its weight: gate outside, then normalisation, smoothing, curve, and the feature inside."""
    gate, normalisation, smoothing, curve, times = "", "none", 1, "none", ""
    match node:
        case ast.BinOp(left=ast.Call() as scaled, op=ast.Mult(), right=right):
            node, gate = scaled, _factor(right)
    match node:
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if name in _NORMALISATIONS:
            node, normalisation = inner, _NORMALISATIONS[name]
    match node:
        case ast.Call(func=ast.Name(id="smooth"), args=[inner, ast.Constant(value=int(width))]):
            node, smoothing = inner, width
    match node:
        case ast.Call(func=ast.Name(id=name), args=[inner]) if name in _CURVES:
            node, curve = inner, _CURVES[name]
    match node:  # two factors behind a bare feature: the one inside is `times`
        case ast.BinOp(left=ast.BinOp() as product, op=ast.Mult(), right=right):
            node, gate = product, _factor(right)
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            node, times = left, _factor(right)
    return Term(_factor(node), 1.0, normalisation, smoothing, curve, times, gate)


def _factor(node: ast.expr) -> str:
    match node:
        case ast.Attribute(value=ast.Name(id="context"), attr=name):
            return name
        case ast.BinOp(
            left=ast.Constant(value=1), op=ast.Sub(), right=ast.Attribute(value=ast.Name(id="context"), attr=name)
        ):
            return COMPLEMENT + name
    return _give_up()


def _give_up() -> NoReturn:
    raise _Unreadable
