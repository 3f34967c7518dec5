"""What language models add to code out of habit, and a program may not have, taken away: it changes no answer."""

from __future__ import annotations

import ast
from typing import cast

from kvkeep.evolve.mutators.definitions import parse

# Modules that are imported for annotations alone.
_FOR_ANNOTATIONS = ("typing", "collections.abc", "numpy.typing", "__future__")


def tidy(code: str) -> str:
    """Without annotations, imports that serve them or give numpy, calls at the top level, and `if __name__ == ...`.

    The text stays as it is, comments included, where there is none of that.

    Raises:
        SyntaxError: no Python.
    """
    tidying = _Tidying()
    tree = tidying.visit(parse(code))
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n" if tidying.changed else code


class _Tidying(ast.NodeTransformer):
    """Removes, and remembers whether there was something to remove."""

    def __init__(self) -> None:
        self.changed = False

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Top level: what is neither a definition nor a docstring goes."""
        kept = [part for part in node.body if not _is_idle(part)]
        self.changed |= len(kept) < len(node.body)
        node.body = kept
        return cast(ast.Module, self.generic_visit(node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Of a function what it returns, and of each parameter what it is."""
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg) and argument.annotation is not None:
                argument.annotation, self.changed = None, True
        if node.returns is not None:
            node.returns, self.changed = None, True
        return cast(ast.FunctionDef, self.generic_visit(node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        """An assignment stays, a mere declaration goes."""
        self.changed = True
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _is_idle(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call()):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Import(names=[ast.alias(name="numpy", asname="np")]):
            return True
        case ast.ImportFrom(module=str(module)):
            return module in _FOR_ANNOTATIONS
        case ast.Import(names=[ast.alias(name="typing")]):
            return True
    return False
