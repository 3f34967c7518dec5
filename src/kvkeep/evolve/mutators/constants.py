"""Numbers in a program changed where they stand: for programs that the grammar has no words for."""

from __future__ import annotations

import ast
from typing import NamedTuple, TypeGuard

import numpy as np

from kvkeep.evolve.mutators.definitions import parse

_LARGEST = 2**31  # a larger integer is a modulus or the like, which has to stay what it is


class Changed(NamedTuple):
    """A block, and what was changed to get it."""

    block: str
    note: str


def change_number(block: str, random: np.random.Generator) -> Changed | None:
    """One number of the block, a little larger or smaller; integers stay integers, signs stay, zero stays.

    Left alone are numbers in subscripts, as keyword arguments, as exponents and as shifts, which say which axis, which
    way or which bit rather than how much.

    Returns:
        None where there is no number to change.
    """
    tree = parse(block)
    left_alone = {id(n) for part in _left_alone(tree) for n in ast.walk(part)}
    numbers = [
        (node, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in left_alone and _is_amount(node.value)
    ]
    if not numbers:
        return None
    node, former = numbers[int(random.integers(len(numbers)))]
    node.value = _changed(former, random)
    return Changed(ast.unparse(tree) + "\n", f"number {former!r} -> {node.value!r} in line {node.lineno} of the block")


def _left_alone(tree: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=part) | ast.keyword(value=part):
                found.append(part)
            case ast.BinOp(op=ast.Pow() | ast.LShift() | ast.RShift(), right=right):
                found.append(right)
    return found


def _is_amount(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST


def _changed(value: float, random: np.random.Generator) -> float:
    factor = float(np.exp(random.normal(0, 0.4)))
    if isinstance(value, int):
        changed = max(1, round(value * factor))
        return changed if changed != value else value + 1
    return float(f"{value * factor:.4g}")
