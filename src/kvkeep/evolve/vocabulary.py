"""The words of the language that programs are written in: what of Python's syntax and of numpy they may use."""

from __future__ import annotations

import ast

from kvkeep.evolve.context import FEATURES, SCALARS

# Left out are statements that import, raise, catch, wait, delete or reach outside the function that they stand in, and
# classes and decorators.
NODES: tuple[type[ast.AST], ...] = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Lambda, ast.Return, ast.Expr, ast.Pass),
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Assert),
    *(ast.If, ast.IfExp, ast.For, ast.While, ast.Break, ast.Continue),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
    *(ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Starred),
    *(ast.Attribute, ast.Subscript, ast.Slice, ast.Call, ast.keyword),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare),
    *(ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.Load, ast.Store),
)

# Left out is what reads or writes files, sees memory that is not the program's or was never written (`empty`), draws at
# random, or changes how numpy behaves for others. `guard` also looks at how they are called.
_FUNCTIONS = """
    abs absolute add add.accumulate add.at add.reduce add.reduceat all allclose amax amin any append arange
    argmax argmin argpartition argsort argwhere around array array_equal array_split asarray ascontiguousarray
    atleast_1d average bincount bool_ broadcast_to cbrt ceil choose clip column_stack compress concatenate convolve
    copy corrcoef correlate cos cosh count_nonzero cov cumprod cumsum delete diag diff digitize divide dot e ediff1d
    einsum equal exp exp2 expand_dims expm1 extract fabs fft.irfft fft.rfft finfo flatnonzero flip float16 float32
    float64 floor floor_divide fmax fmin fmod full full_like gradient greater greater_equal heaviside histogram hstack
    hypot iinfo inf inner insert int16 int32 int64 int8 integer interp intersect1d intp invert isclose isfinite
    isin isinf isnan less less_equal lexsort linalg.norm linspace log log10 log1p log2 logaddexp logical_and
    logical_not logical_or logical_xor logspace matmul max maximum maximum.accumulate maximum.at maximum.reduceat mean
    median min minimum minimum.accumulate minimum.at minimum.reduceat mod moveaxis multiply nan nan_to_num nanargmax
    nanargmin nanmax nanmean nanmin nanpercentile nanquantile nanstd nansum ndim negative newaxis nextafter nonzero
    not_equal ones ones_like outer pad partition percentile pi piecewise place polyval positive power prod ptp put
    put_along_axis quantile ravel reciprocal remainder repeat reshape rint roll round searchsorted select setdiff1d
    setxor1d shape sign sin sinh size sort split sqrt square squeeze stack std subtract sum swapaxes take
    take_along_axis tan tanh tile trace transpose tri tril triu true_divide trunc uint16 uint32 uint64 uint8
    union1d unique unravel_index var vstack where zeros zeros_like lib.stride_tricks.sliding_window_view
    """

# Of arrays, numbers, lists, sets and dictionaries. Left out is what leads from them to files, memory or modules.
_METHODS = """
    T all any argmax argmin argpartition argsort astype clip copy cumprod cumsum diagonal dot dtype eps fill flatten
    item max mean min ndim nonzero partition prod ravel repeat reshape round searchsorted shape size sort squeeze std
    sum swapaxes take tiny tolist trace transpose var
    append count extend index insert pop remove reverse
    add clear difference discard get intersection is_integer issubset isdisjoint issuperset items keys setdefault
    symmetric_difference union update values
    """

# What may follow `np.`; a dotted name is one word.
NUMPY = frozenset(_FUNCTIONS.split())

# What may follow any other dot.
ATTRIBUTES = frozenset((*_METHODS.split(), *FEATURES, *SCALARS))
