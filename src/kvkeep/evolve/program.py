"""Programs: Python files of which one block, between two marker comments, is what a search may change.

    import numpy as np

    # EVOLVE-BLOCK-START
    def score_tokens(context):
        return context.local_attention


    def select_tokens_to_keep(scores, context):
        return np.sort(np.argsort(-scores, kind="stable")[: context.K])
    # EVOLVE-BLOCK-END

`score_tokens` gives each of the L positions a score; `select_tokens_to_keep` gives the indices of those that stay:
exactly K, or, where the block says `CHUNK = 20`, whole chunks of at most 20 positions, at most K positions in all and
more than K - 20. `context` is a `PrefillContext`. CacheCraft 2026 (arXiv 2608.14555) has these two functions.

This file needs numpy alone, as the process in which programs run does.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import PolicyError, near_names

START = "# EVOLVE-BLOCK-START"
END = "# EVOLVE-BLOCK-END"

# The functions that a block must have, with their parameters.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "score_tokens": ("context",),
    "select_tokens_to_keep": ("scores", "context"),
}

# Programs to begin a search with.
SEEDS = ("frc", "snapkv-like", "v1-generic", "expected-attention-like", "random")

# Python's own functions that a program may call.
BUILTINS = (
    *("abs", "bool", "dict", "enumerate", "float", "int", "len", "list", "max", "min", "range", "reversed", "round"),
    *("set", "sorted", "sum", "tuple", "zip"),
)

# Positions that a program keeps.
Indices = NDArray[np.integer[Any]]

_SHORT = 12  # hex digits of a digest that tell programs apart in names


class ProgramError(PolicyError):
    """A file that is no program: no block, a syntax error, a function that is missing or has other parameters."""


class Functions(NamedTuple):
    """What a program defines.

    Attributes:
        score_tokens: maps a context to scores `[L]`, higher stays.
        select_tokens_to_keep: maps scores and a context to the indices that stay.
    """

    score_tokens: Callable[[Any], NDArray[Any]]
    select_tokens_to_keep: Callable[[NDArray[Any], Any], NDArray[Any]]


@dataclass(frozen=True)
class Program:
    """A program that chooses entries, read and found well-formed; nothing of it has run.

    Attributes:
        source: the whole file.
        name: what it is called in messages and results.
        digest: SHA-256 of the block's syntax tree, in hex: blanks, comments and the import of numpy do not matter,
            names, constants and docstrings of functions do.

    Raises:
        ProgramError: the source is no program; syntax errors tell the line.
    """

    source: str = field(repr=False)
    name: str = "program"
    digest: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        try:
            _check(self.source, self.name)
            described = _described(_without_import(_parse(self.block, self.name)))
        except RecursionError:
            raise ProgramError(
                expected=f"Python in {self.name}",
                received="expressions that are nested too deeply",
                remedy="a program is a short text",
            ) from None
        object.__setattr__(self, "digest", hashlib.sha256(described.encode()).hexdigest())

    @property
    def block(self) -> str:
        """The lines between the markers."""
        return _split(self.source, self.name)[1]

    def with_block(self, text: str, name: str | None = None) -> Program:
        """The program with another block.

        Args:
            text: the lines between the markers.
            name: of the new program; None for the same.

        Raises:
            ProgramError: it would be no program.
        """
        before, _, after = _split(self.source, self.name)
        return Program(before + text.rstrip("\n") + "\n" + after, self.name if name is None else name)

    @property
    def short_digest(self) -> str:
        """The first 12 digits of it."""
        return self.digest[:_SHORT]

    @property
    def chunk(self) -> int | None:
        """Positions per chunk where the block says `CHUNK = 20` or the like, once; None for what keeps exactly K."""
        found = []
        for node in _parse(self.block, self.name).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="CHUNK")], value=value):
                    found.append(value)
        match found:
            case [ast.Constant(value=int(length))] if length >= 1 and not isinstance(length, bool):
                return length
        return None

    def functions(self) -> Functions:
        """The two functions, compiled in a namespace of their own with numpy and a few of Python's functions.

        That is no protection: run only what `kvkeep.evolve.guard.check_source` has passed, or run it in the sandbox.
        Each call gives new functions, which share nothing with earlier ones.

        Raises:
            Exception: whatever the block raises when it is executed.
        """
        here: dict[str, Any] = {"__builtins__": _builtins(), "__name__": "program", "np": np}
        exec(_compiled(self.source, self.name), here)
        return Functions(*(here[name] for name in PARAMETERS))


def read_program(path: str | Path) -> Program:
    """The program in a file; it is called by the file's name.

    Raises:
        ProgramError: the file cannot be read, or is no program.
    """
    path = Path(path).expanduser()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(
            expected="a program, a Python file in UTF-8",
            received=f"{path}: {error.strerror if isinstance(error, OSError) else error}",
            remedy=f"check the path; seeds are known by name: {', '.join(SEEDS)}",
        ) from None
    return Program(source, path.stem)


def seed_program(name: str) -> Program:
    """A program to begin with, one of `SEEDS`.

    Raises:
        ProgramError: there is no such seed.
    """
    if name not in SEEDS:
        raise ProgramError(expected="the name of a seed program", received=f"{name!r}", remedy=near_names(name, SEEDS))
    file = resources.files("kvkeep.evolve").joinpath("seeds", f"{name.replace('-', '_')}.py")
    return Program(file.read_text(encoding="utf-8"), name)


def _check(source: str, name: str) -> None:
    """Refuse what is no program."""
    _parse(source, name)  # first, since here a syntax error has the line of the file
    before, block, after = _split(source, name)
    for part in (before, after):
        for node in _parse(part, name).body:
            if not _is_harmless(node):
                raise ProgramError(
                    expected="nothing but a docstring and 'import numpy as np' outside the block",
                    received=f"{ast.unparse(node).partition(chr(10))[0]!r} in {name}",
                    remedy="move it between the markers: the block alone is what a program does",
                )
    found = {node.name: node for node in _parse(block, name).body if isinstance(node, ast.FunctionDef)}
    for function, parameters in PARAMETERS.items():
        wanted = f"a function {function}({', '.join(parameters)}) in the block of {name}"
        if function not in found:
            raise ProgramError(expected=wanted, received="none", remedy="a block defines both functions by `def`")
        signature = found[function].args
        names = tuple(argument.arg for argument in [*signature.posonlyargs, *signature.args])
        if names != parameters or signature.vararg or signature.kwarg or signature.kwonlyargs or signature.defaults:
            raise ProgramError(
                expected=wanted,
                received=f"{function}({ast.unparse(signature)})",
                remedy="take these parameters, without defaults",
            )


def _is_harmless(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Import(names=[ast.alias(name="numpy", asname="np")]) | ast.ImportFrom(module="__future__"):
            return True
    return False


def _split(source: str, name: str) -> tuple[str, str, str]:
    """What stands before the block, with its marker; the block; what stands after it, with its marker."""
    lines = source.splitlines(keepends=True)
    marks = {mark: [i for i, line in enumerate(lines) if line.strip() == mark] for mark in (START, END)}
    starts, ends = marks[START], marks[END]
    if len(starts) != 1 or len(ends) != 1 or starts[0] > ends[0]:
        count = "no block" if not starts or not ends else f"{len(starts)} starts and {len(ends)} ends of a block"
        raise ProgramError(
            expected=f"one block between {START!r} and {END!r}, each on a line of its own",
            received=f"{count} in {name}" + (", the end first" if count.startswith("1 starts and 1 ") else ""),
            remedy="put the two functions between these comments",
        )
    start, end = starts[0] + 1, ends[0]
    return "".join(lines[:start]), "".join(lines[start:end]), "".join(lines[end:])


def _parse(text: str, name: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in a string is the author's business
            return ast.parse(text, name)
    except SyntaxError as error:
        raise ProgramError(
            expected=f"Python in {name}",
            received=f"{error.msg} in line {error.lineno}: {(error.text or '').strip()!r}",
            remedy="mend the line",
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(
            expected=f"Python in {name}",
            received=f"{type(error).__name__}: {error}",
            remedy="a program is a short text without null bytes or deep nesting",
        ) from None


def _described(node: Any) -> str:
    """A syntax tree in text, the same in all versions of Python: fields that are empty are left out.

    `ast.dump` writes other things in each version, and so would give other digests.
    """
    if isinstance(node, ast.AST):
        fields = [f"{key}={_described(value)}" for key, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_described, node))}]"
    return repr(node)


@lru_cache(maxsize=256)
def _compiled(source: str, name: str) -> CodeType:
    """The program as code, with the file's line numbers; its import of numpy is left out, since numpy is given."""
    tree = _without_import(_parse(source, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(tree, f"<{name}>", "exec")


def _without_import(tree: ast.Module) -> ast.Module:
    """Without what may also stand outside the block, which does nothing."""
    tree.body = [node for node in tree.body if not _is_harmless(node)]
    return tree


def _builtins() -> dict[str, Any]:
    import builtins

    return {name: getattr(builtins, name) for name in BUILTINS}
