"""What a program may be, and what its answers must be: refused is what breaks a rule, never merely scored low.

Five layers, each of which stops something that the others may miss; every refusal names its layer:

    syntax     `check_source`: an allow-list on the syntax tree, before anything runs
    sandbox    `sandbox.Sandbox`: a process without files, network, time or memory to waste
    invariant  `check_scores`, `check_selection`, and the comparison of two calls
    canary     `canaries`: contexts on which a program that knows positions by heart gives itself away
    ceiling    `canaries`: results that are too good to be a compressed cache's

A program that kept everything once scored like the uncompressed model and took over a search (CacheCraft 2026, arXiv
2608.14555): the count of kept positions is therefore checked at every stage, where the program runs and again here.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import KvkeepError
from kvkeep.evolve.context import FEATURES, SCALARS
from kvkeep.evolve.program import BUILTINS
from kvkeep.evolve.vocabulary import ATTRIBUTES, NODES, NUMPY

if TYPE_CHECKING:
    from kvkeep.evolve.context import PrefillContext

Layer = Literal["syntax", "sandbox", "invariant", "canary", "ceiling"]

# Why a program is refused, in a word and in a sentence.
REASONS: Mapping[str, str] = {
    "syntax": "not Python, or a kind of statement that programs have no use for",
    "import": "an import other than `import numpy as np`",
    "name": "a name that a program may not use",
    "attribute": "an attribute or a numpy function that a program may not use, or an attribute that is written",
    "state": "something that could remember one call in the next",
    "size": "a text that is too long, or nested too deeply",
    "missing": "a function that is not there, or cannot be called",
    "count": "too many or too few positions",
    "duplicate": "a position twice",
    "range": "a position that does not exist",
    "dtype": "an answer of the wrong type",
    "shape": "an answer of the wrong shape",
    "nonfinite": "a score that is NaN or infinite",
    "nondeterministic": "other answers to the same question",
    "mutation": "an attempt to write into the context",
    "timeout": "too much time for one call, or for all",
    "memory": "too much memory",
    "output": "too much printed",
    "crash": "an exception, a signal, or an exit",
    "position-keyed": "the same positions, whatever the features say",
    "above-full": "a score above that of the full cache",
    "identical-to-full": "results that equal those of the full cache",
}

# The longest chunk that excuses a program from keeping exactly K: a larger one could be had by saying `CHUNK = 10**6`.
MOST_CHUNK = 64

_LONGEST = 64 * 1024  # characters; seeds have about a thousand
_DEEPEST = 60  # levels of the syntax tree; Python's own limits are far above
_MOST_NODES = 20_000


class PolicyRefused(KvkeepError):
    """A program that breaks a rule: it is invalid, and has no score.

    Args:
        reason: why, one of the words in `REASONS`.
        layer: what stopped it.
        expected: as in every error.
        received: likewise.
        remedy: likewise.
    """

    def __init__(self, reason: str, layer: Layer, *, expected: str, received: str, remedy: str) -> None:
        if reason not in REASONS:
            raise ValueError(f"no reason to refuse: {reason!r}")
        self.reason, self.layer = reason, layer
        super().__init__(expected=expected, received=received, remedy=remedy)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        parts = {"expected": self.expected, "received": self.received, "remedy": self.remedy}
        return {"error": "policy_refused", "reason": self.reason, "layer": self.layer, **parts}

    def __reduce__(self) -> tuple[Any, ...]:
        return _refused, (self.reason, self.layer, self.expected, self.received, self.remedy)


def check_source(source: str) -> None:
    """Refuse a program by its text: only plain arithmetic on the context, with a listed part of numpy, may run.

    Allowed are functions, assignments, loops, conditions, comprehensions and expressions; `import numpy as np`; numpy's
    functions in `vocabulary.NUMPY`; Python's in `program.BUILTINS`; features and scalars of the context; methods of
    arrays and lists that neither read nor write anything else. At the top level, and as defaults of parameters, stand
    numbers, strings and tuples only, since a list there could carry something from one call to the next. Nor may a call
    see memory that nothing has written, as numpy's arithmetic with `where` and without `out` does. Sizes are not judged
    here: `range(10**9)` is the sandbox's business.

    Raises:
        PolicyRefused: layer `syntax`, with the line.
    """
    _bounded(len(source), _LONGEST, "characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in a string is no reason to refuse
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refuse("syntax", None, "Python", f"{type(error).__name__}, {error}", "mend it") from None
    nodes = list(_bounded_walk(tree))
    for statement in tree.body:
        _check_top(statement)
    own = {name for node in nodes for name in _defined(node)}
    allowed = own | set(BUILTINS)
    inside: set[int] = set()  # nodes that were judged as a part of a dotted name
    for node in nodes:
        if id(node) not in inside:
            _check_node(node, allowed, inside)


def check_scores(scores: Any, context: PrefillContext) -> NDArray[np.floating[Any]]:
    """The scores of a program, if they are what scores must be: one finite floating-point number for each position.

    Args:
        scores: what `score_tokens` gave.
        context: the context that it was given.

    Raises:
        PolicyRefused: layer `invariant`; reason dtype, shape or nonfinite.
    """
    found = _array(scores, "floating-point scores", "end with `return scores`, an array of float32 or float64")
    if not np.issubdtype(found.dtype, np.floating):
        raise _broken("dtype", "floating-point scores", f"dtype {found.dtype}", "convert: `.astype(np.float32)`")
    if found.shape != (context.L,):
        raise _broken("shape", f"scores of shape ({context.L},)", f"shape {found.shape}", "give each position a score")
    if not np.isfinite(found).all():
        wrong = int(np.flatnonzero(~np.isfinite(found))[0])
        raise _broken(
            "nonfinite", "finite scores", f"{found[wrong]} at index {wrong}", "guard divisions and logarithms"
        )
    return found


def check_selection(
    indices: Any, context: PrefillContext, common_count: int | None = None, chunk: int | None = None
) -> NDArray[np.int64]:
    """The indices that a program keeps, ascending, if they are what a selection must be.

    Integers in one dimension, none twice, each at least 0 and below L, and exactly K of them; of a program of whole
    chunks at most K, and more than K less one chunk. CacheCraft 2026 (arXiv 2608.14555) has these rules, and wants one
    count for all texts of a batch; that no chunk program exceeds K is ours.

    Args:
        indices: what `select_tokens_to_keep` gave.
        context: the context that it was given.
        common_count: how many the other texts of the batch kept, where it is known.
        chunk: positions per chunk, as `Program.chunk` tells; None for a program that keeps exactly K.

    Raises:
        PolicyRefused: layer `invariant`; reason dtype, shape, range, duplicate or count.
    """
    remedy = "end with indices such as `np.argsort(-scores, kind='stable')[: context.K]`"
    found = _array(indices, "integer indices", remedy)
    if not np.issubdtype(found.dtype, np.integer):
        raise _broken("dtype", "integer indices", f"dtype {found.dtype}", "a mask becomes indices by np.flatnonzero")
    if found.ndim != 1:
        raise _broken("shape", "indices in one dimension", f"shape {found.shape}", remedy)
    # Compared before they are converted: what is too large for int64 must not wrap around into the range.
    if found.size and (int(found.min()) < 0 or int(found.max()) >= context.L):
        received = f"{int(found.min())} to {int(found.max())}"
        raise _broken("range", f"indices from 0 to {context.L - 1}", received, "indices count from 0, from the start")
    kept = np.sort(found.astype(np.int64))
    if (kept[1:] == kept[:-1]).any():
        twice = int(kept[1:][kept[1:] == kept[:-1]][0])
        raise _broken("duplicate", "each index once", f"{twice} more than once", "see np.unique, and keep the count")
    fewest = context.K if chunk is None else max(1, context.K - min(chunk, MOST_CHUNK) + 1)
    if not fewest <= len(kept) <= context.K:
        wanted = f"{context.K}" if chunk is None else f"{fewest} to {context.K}"
        if chunk is None and 0 <= context.K - len(kept) < MOST_CHUNK:
            remedy += ", or say `CHUNK = 20` in the block where whole chunks are kept"
        raise _broken("count", f"{wanted} of {context.L} positions", f"{len(kept)}", remedy)
    if common_count is not None and len(kept) != common_count:
        raise _broken(
            "count",
            f"{common_count} positions, as in the other texts of the batch",
            f"{len(kept)}",
            "depend on K alone",
        )
    return kept


def _refused(reason: str, layer: Layer, expected: str, received: str, remedy: str) -> PolicyRefused:
    return PolicyRefused(reason, layer, expected=expected, received=received, remedy=remedy)


def _broken(reason: str, expected: str, received: str, remedy: str) -> PolicyRefused:
    return _refused(reason, "invariant", expected, received, remedy)


def _refuse(reason: str, node: Any, expected: str, received: str, remedy: str) -> PolicyRefused:
    line = f" in line {node.lineno}" if isinstance(node, ast.AST) and hasattr(node, "lineno") else ""
    return _refused(reason, "syntax", expected, received + line, remedy)


def _array(given: Any, expected: str, remedy: str) -> NDArray[Any]:
    """A plain array without objects in it."""
    try:
        found = np.asarray(given)
    except Exception as error:  # ragged lists, or an object that answers numpy with an exception
        raise _broken("dtype", expected, f"{type(given).__name__}, {error}", remedy) from None
    if found.dtype.hasobject:
        raise _broken("dtype", expected, f"{type(given).__name__}", remedy)
    return found


def _bounded(count: int, most: int, unit: str) -> None:
    if count > most:
        raise _refuse("size", None, f"at most {most} {unit}", f"{count}", "a program is a short text")


def _bounded_walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, from the top and in the order of the text; without recursion, which a deep tree could exhaust."""
    waiting, seen = [(tree, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        seen += 1
        _bounded(depth, _DEEPEST, "levels of nesting")
        _bounded(seen, _MOST_NODES, "parts of the syntax tree")
        yield node
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)][::-1]


def _defined(node: ast.AST) -> tuple[str, ...]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
            return (name,)
    return ()


def _check_top(statement: ast.stmt) -> None:
    """The top level of the file: what runs when it is loaded, and lives as long as the program."""
    match statement:
        case ast.FunctionDef() | ast.Expr(value=ast.Constant()) | ast.Pass():
            return
        case ast.Import() | ast.ImportFrom():
            _check_import(statement)
            return
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            _check_constant(value, "at the top level")
            return
    raise _refuse(
        "state",
        statement,
        "functions and constants at the top level",
        f"{type(statement).__name__}",
        "do it in a function: what the top level does would outlive the call",
    )


def _check_import(node: ast.stmt) -> None:
    match node:
        case ast.Import(names=[ast.alias(name="numpy", asname="np")]):
            return
        case ast.ImportFrom(module="__future__", names=[ast.alias(name="annotations", asname=None)], level=0):
            return
    raise _refuse("import", node, "no import but `import numpy as np`", f"{ast.unparse(node)!r}", "numpy is enough")


def _check_constant(value: ast.expr, where: str) -> None:
    """A number, a string, or a tuple of such: nothing that can change."""
    allowed = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.operator, ast.unaryop, ast.Load, ast.Name)
    for node in ast.walk(value):
        if not isinstance(node, allowed):
            raise _refuse(
                "state",
                value,
                f"numbers, strings and tuples {where}",
                f"{type(node).__name__}",
                "make it in a function: what stands here would outlive the call",
            )


def _check_node(node: ast.AST, allowed: set[str], inside: set[int]) -> None:
    if isinstance(node, ast.Import | ast.ImportFrom):  # deeper ones are refused whatever they import
        if getattr(node, "col_offset", 0):
            raise _refuse("import", node, "imports at the top level", f"{ast.unparse(node)!r}", "numpy is `np`")
        return
    if isinstance(node, ast.alias):
        return
    if not isinstance(node, NODES):
        raise _refuse("syntax", node, "plain functions and expressions", type(node).__name__, "write it without")
    match node:
        case ast.FunctionDef(decorator_list=[_, *_]):
            raise _refuse("syntax", node, "functions without decorators", node.name, "write it without")
        case ast.arguments():
            for default in [*node.defaults, *(d for d in node.kw_defaults if d is not None)]:
                _check_constant(default, "as defaults")
        case ast.Constant(value=bytes() | complex()):
            raise _refuse("syntax", node, "numbers and strings", repr(node.value)[:40], "write it without")
        case ast.Attribute():
            _check_attribute(node, inside)
        case ast.Call():
            _check_call(node)
        case ast.Name(id="np"):
            raise _refuse("name", node, "`np` in front of one of its functions", "`np` alone", "write np.sum and so on")
        case ast.Name(ctx=ast.Load()) if node.id not in allowed:
            known = f"arguments, own names, np, and {', '.join(BUILTINS)}"
            raise _refuse("name", node, "a name that programs may use", f"{node.id!r}", known)
    for name in _defined(node):
        if name == "np" or name.startswith("__"):
            raise _refuse("name", node, "a name of its own for each thing", f"{name!r}", "choose another name")


def _check_call(node: ast.Call) -> None:
    """Refuse calls that see memory as it was left: what lies there is another thing in each process."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if None in given:
        raise _refuse("syntax", node, "arguments by their names", "** in a call", "write each one out")
    match given.get("out"):
        case None | ast.Constant(value=None):
            written = False
        case _:
            written = True
    if "where" in given and not written and not _reduces(node.func):
        raise _refuse(
            "state",
            node,
            "`out` beside `where`, so that every number has been written",
            f"{ast.unparse(node)[:60]!r}",
            "use np.where, or out=np.zeros_like(x)",
        )
    for value in (*node.args, *given.values()):
        if isinstance(value, ast.Constant) and value.value == "empty":
            raise _refuse("state", node, "numbers that were written", f"{ast.unparse(node)[:60]!r}", "pad with 0")


def _reduces(function: ast.expr) -> bool:
    """Whether a function takes `where` to leave numbers out of one result, and not to leave results unwritten."""
    match function:
        case ast.Attribute(value=ast.Name(id="np"), attr=name):
            return not isinstance(getattr(np, name, None), np.ufunc)
        case ast.Attribute():  # a method of arrays, or np.add.reduce
            return True
    return False


def _check_attribute(node: ast.Attribute, inside: set[int]) -> None:
    if not isinstance(node.ctx, ast.Load):
        raise _refuse("attribute", node, "attributes that are read", f".{node.attr} written", "use a variable")
    path, base = [node.attr], node.value
    passed: list[ast.AST] = []
    while isinstance(base, ast.Attribute):
        path.insert(0, base.attr)
        passed.append(base)
        base = base.value
    if isinstance(base, ast.Name) and base.id == "np":
        dotted = ".".join(path)
        # np.add.at is one name; np.pi.real is none.
        if dotted in NUMPY:
            inside.update(id(part) for part in (*passed, base))
            return
        # np.float64(x).shape does not come here: its base is a call.
        raise _refuse("attribute", node, "a listed part of numpy", f"np.{dotted}", "see kvkeep.evolve.vocabulary.NUMPY")
    if node.attr not in ATTRIBUTES:
        raise _refuse(
            "attribute",
            node,
            "a feature or scalar of the context, or a method of arrays and lists that is listed",
            f".{node.attr}",
            f"features: {', '.join(FEATURES)}; scalars: {', '.join(SCALARS)}",
        )
