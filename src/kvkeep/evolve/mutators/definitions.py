"""The top level of a block as a list of definitions: what needs what, and parts of two blocks put together."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Mapping

# What a block is asked for.
SCORING = "score_tokens"
SELECTING = "select_tokens_to_keep"


def parse(block: str) -> ast.Module:
    """The syntax tree of a block, without a warning: an odd escape in a string is the author's business.

    Raises:
        SyntaxError: it is no Python, or nested too deeply.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(block)
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(f"{type(error).__name__}: {error}") from None


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Functions and constants of the top level by name, in their order; of two with one name the last."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        for name in _names(node):
            found[name] = node
    return found


def needed(roots: Iterable[str], known: Mapping[str, ast.stmt]) -> set[str]:
    """The roots, and what they name, and what that names: those that are known."""
    found: set[str] = set()
    waiting = [name for name in roots if name in known]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [n.id for n in ast.walk(known[name]) if isinstance(n, ast.Name) and n.id in known]
    return found


def same(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether two definitions are the same text, blanks and comments aside."""
    return ast.dump(first) == ast.dump(second)


def graft(scoring: str, selecting: str) -> str | None:
    """The block that scores as the first one and selects as the second.

    Returns:
        None where both define different things under one name.
    """
    first, second = (definitions(parse(text)) for text in (scoring, selecting))
    kept = {name: first[name] for name in first if name in needed([SCORING], first)}
    for name in needed([SELECTING], second):
        if name in kept and not same(kept[name], second[name]):
            return None
    added = {name: second[name] for name in second if name in needed([SELECTING], second)}
    return unparse([*kept.values(), *(node for name, node in added.items() if name not in kept)])


def complete(block: str, missing_from: str) -> str:
    """The block, preceded by what it needs and does not define of another block.

    Args:
        block: which may lack one of the two functions, and helpers.
        missing_from: the whole block to take them from.
    """
    own, other = definitions(parse(block)), definitions(parse(missing_from))
    roots = {SCORING, SELECTING} | {
        n.id for node in own.values() for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in other
    }
    taken = needed(roots - own.keys(), {name: node for name, node in other.items() if name not in own})
    lines = missing_from.splitlines()
    parts = [_source(lines, node) for name, node in other.items() if name in taken]
    return "\n\n\n".join([*dict.fromkeys(parts), block.strip("\n")]) + "\n"


def unparse(nodes: Iterable[ast.stmt]) -> str:
    """Statements as the lines of a block."""
    unique = list({id(node): node for node in nodes}.values())
    constants = [node for node in unique if not isinstance(node, ast.FunctionDef)]
    functions = [node for node in unique if isinstance(node, ast.FunctionDef)]
    groups = ["\n".join(map(ast.unparse, constants)), *map(ast.unparse, functions)]
    return "\n\n\n".join(group for group in groups if group) + "\n"


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _source(lines: list[str], node: ast.stmt) -> str:
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])
