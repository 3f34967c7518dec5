"""What programs may say, and what their answers must be."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvkeep.errors import KvkeepError
from kvkeep.evolve.guard import MOST_CHUNK, REASONS, PolicyRefused, check_scores, check_selection, check_source
from kvkeep.evolve.program import SEEDS, seed_program
from kvkeep.evolve.vocabulary import NUMPY

from .mutators.contexts import observed

PASSES = """
WEIGHTS = (0.1, -2.5e3, 'mean', None, True, (1, 2))
---
N: int = 3
M = 2**10 - N
---
from __future__ import annotations
---
'a word'
def f(context):
    'another'
    assert context.L > 0, 'no text'
---
def f(context, weight=0.5, *rest, base=(1, -2), **more):
    return weight * context.position
---
def f(context):
    total = 0
    for i, x in enumerate(range(3)):
        if x > 1:
            continue
        total += x if i else -x
    while total > 9:
        total -= 1
        break
    return total
---
def f(context):
    rows = [x * 2 for x in range(3) if x]
    return {x: sum(y for y in rows) for x in {1, 2}}
---
def f(context):
    return sorted([3, 1], key=lambda x: -x)
---
def f(context):
    return (n := len(context.position)) + n
---
def f(context):
    x = np.zeros(context.L)
    x[::2] = 1
    x[x > 0] += 2
    first, *others = x
    return x[None, :, ...]
---
def f(context):
    rows = []
    rows.append(context.key_norm.astype(np.float64).mean())
    return rows
---
def f(context):
    np.add.at(np.zeros(3), [0], 1)
    return np.maximum.accumulate(context.position)
---
def f(context):
    return np.lib.stride_tricks.sliding_window_view(context.position, 3).mean(axis=-1)
---
def f(context):
    x, some = context.key_norm, context.key_norm > 1
    np.log(x, out=np.zeros_like(x), where=some)
    return np.sum(x, where=some) + x.mean(where=some) + np.add.reduce(x, where=some)
---
def f(context):
    return np.finfo(np.float32).eps * np.inf
---
def f(context):
    return np.stack([context.position, context.recency]).T @ np.ones(2)
---
def f(context):
    def g(x):
        return x + context.L
    return g(1)
"""

# What stands in a function.
REFUSED_INSIDE = {
    "syntax": """
global x
---
try: pass
except Exception: pass
---
with context: pass
---
raise ValueError()
---
del context
---
yield 1
---
return b'1'
---
return 1j
---
return f'{context.position}'
---
class A: pass
---
match context:
    case 1: pass
---
np.add(1, 2, **{'where': True})
""",
    "import": """
import numpy as np
---
from kvkeep import errors
""",
    "name": """
open('x')
---
eval('1')
---
exec('1')
---
globals()
---
getattr(context, 'L')
---
setattr(context, 'L', 1)
---
__import__('os')
---
vars()
---
dir()
---
compile('1', '', 'eval')
---
input()
---
print(1)
---
type(context)
---
id(context)
---
hash('a')
---
np
---
object()
---
super()
---
breakpoint()
---
__builtins__
---
memoryview(context.position)
---
m = np
return m.load('x')
---
np = context
---
[np for np in range(3)]
---
lambda np: 1
---
lambda __class__: 1
---
__x = 1
---
def __getattr__(name): pass
""",
    "attribute": """
np.load('x')
---
np.random.rand(3)
---
np.fromfile('x')
---
np.memmap('x')
---
np.save('x', 1)
---
np.empty(3)
---
np.empty_like(context.position)
---
np.frombuffer(context.position)
---
np.lib.stride_tricks.as_strided(context.position)
---
np.lib
---
np.linalg
---
np.ctypeslib
---
np.seterr(all='raise')
---
np.add.__class__
---
np.sum.__globals__
---
np.pi.real
---
context.__dict__
---
context.to_arrays()
---
context.answer
---
().__class__
---
context.position.tofile('x')
---
context.position.base
---
context.position.ctypes
---
context.position.data
---
context.position.view()
---
context.position.dump('x')
---
context.position.setflags(write=True)
---
'{0.__class__}'.format(context)
---
f.__code__
---
(1).real
---
context.L = 3
---
np.sort = 3
---
f.memory = 3
---
for context.L in range(3): pass
---
[0 for context.L in range(3)]
""",
    "state": """
np.divide(context.key_norm, context.value_norm, where=context.value_norm > 0)
---
np.log(context.key_norm, out=None, where=context.key_norm > 0)
---
f = np.add
return f(context.key_norm, 1, where=context.key_norm > 0)
---
[np.add][0](context.key_norm, 1, where=context.key_norm > 0)
---
np.pad(context.key_norm, 3, mode='empty')
---
np.pad(context.key_norm, 3, 'empty')
""",
}

REFUSED_OUTSIDE = {
    "syntax": """
def f(:
---
@np.vectorize
def f(context): pass
""",
    "import": """
import os
---
import numpy
---
import numpy as np, os
---
import numpy.random as np
---
from numpy import load
---
from os import *
---
from . import guard
""",
    "name": """
def f(np): pass
---
np = 3
---
N = M
---
def f(context, n=open): pass
---
def f(context: 'A') -> open: pass
""",
    "state": """
MEMORY = []
---
MEMORY = {}
---
MEMORY = np.zeros(3)
---
MEMORY: list = []
---
MEMORY = [1 for i in (1,)]
---
f = lambda x: x
---
def f(context, memory=[]): pass
---
def f(context, *, memory={}): pass
---
for i in range(3): pass
---
if 1: M = []
---
class A: pass
---
async def f(context): pass
---
np.zeros(3)
---
x += 1
""",
}


def pieces(text: str) -> list[str]:
    return [piece.strip("\n") for piece in text.split("---\n")]


def inside(piece: str) -> str:
    lines = "\n".join(f"    {line}" for line in piece.splitlines())
    return f"def f(context):\n{lines}"


REFUSED = [
    *((reason, inside(piece)) for reason, text in REFUSED_INSIDE.items() for piece in pieces(text)),
    *((reason, piece) for reason, text in REFUSED_OUTSIDE.items() for piece in pieces(text)),
]


@pytest.mark.parametrize("piece", pieces(PASSES))
def test_plain_arithmetic_passes(piece):
    first = "" if "__future__" in piece else "import numpy as np\n"
    check_source(f"{first}{piece}\n")


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_pass(name):
    check_source(seed_program(name).source)


@pytest.mark.parametrize(("reason", "piece"), REFUSED)
def test_everything_else_is_refused(reason, piece):
    with pytest.raises(PolicyRefused) as caught:
        check_source(f"import numpy as np\n{piece}\n")
    assert (caught.value.layer, caught.value.reason) == ("syntax", reason)


def test_a_refusal_tells_the_line():
    with pytest.raises(PolicyRefused, match="'open' in line 4"):
        check_source("import numpy as np\n\ndef f(context):\n    return open('x')\n")


@pytest.mark.parametrize(
    "source",
    [
        "x = " + "1 + " * 5000 + "1",
        "x = " + "-" * 100 + "1",
        "x = " + "(" * 70 + "1" + ",)" * 70,
        "#" * (64 * 1024 + 1),
        "x = (" + "1, " * 20_000 + ")",
    ],
)
def test_long_and_deep_texts_are_refused(source):
    with pytest.raises(PolicyRefused) as caught:
        check_source(source)
    assert caught.value.reason in ("size", "syntax")


def test_text_that_is_no_text():
    for source in ("\0", "x = " + "(" * 5000, "x = " + "9" * 5000):
        with pytest.raises(PolicyRefused) as caught:
            check_source(source)
        assert caught.value.reason == "syntax"


def test_every_listed_part_of_numpy_is_there():
    for name in NUMPY:
        found: Any = np
        for part in name.split("."):
            found = getattr(found, part)


def sized(length: int, kept: int) -> Any:
    return SimpleNamespace(L=length, K=kept)


@given(
    length=st.integers(1, 60),
    share=st.floats(0, 1),
    chunk=st.none() | st.integers(1, 30),
    data=st.data(),
)
def test_a_selection_is_refused_if_and_only_if_it_breaks_a_rule(length, share, chunk, data):
    kept = max(1, round(share * length))
    count = data.draw(st.integers(0, length + 2) | st.just(kept))
    order = data.draw(st.permutations(range(length)))
    indices = [*order, length, -1][:count] if data.draw(st.booleans()) else order[:count]
    if data.draw(st.booleans()) and indices:
        indices[0] = data.draw(st.integers(-2, length + 1))
    dtype = data.draw(st.sampled_from([np.int64, np.int32, np.int16]))
    common = data.draw(st.none() | st.just(len(indices)) | st.just(kept))

    fewest = kept if chunk is None else max(1, kept - chunk + 1)
    fine = (
        fewest <= len(indices) <= kept
        and len(set(indices)) == len(indices)
        and all(0 <= index < length for index in indices)
        and common in (None, len(indices))
    )

    def check() -> Any:
        return check_selection(np.array(indices, dtype=dtype), sized(length, kept), common, chunk)

    if fine:
        found = check()
        assert found.tolist() == sorted(indices)
        assert found.dtype == np.int64
        return
    with pytest.raises(PolicyRefused) as caught:
        check()
    assert caught.value.layer == "invariant"
    assert caught.value.reason in ("count", "duplicate", "range")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (np.arange(4.0), "dtype"),
        (np.ones(4, dtype=bool), "dtype"),
        (np.array(["0", "1", "2", "3"]), "dtype"),
        (np.array([0, 1, 2, None]), "dtype"),
        ([[0, 1], [2]], "dtype"),
        (None, "dtype"),
        ("0123", "dtype"),
        ([], "dtype"),
        (np.arange(4)[None], "shape"),
        (np.int64(1), "shape"),
        (np.array([0, 1, 2, 2**64 - 1], dtype=np.uint64), "range"),
        (np.array([], dtype=np.int64), "count"),
    ],
)
def test_answers_of_other_kinds(answer, reason):
    with pytest.raises(PolicyRefused) as caught:
        check_selection(answer, sized(9, 4))
    assert caught.value.reason == reason


def test_a_list_of_integers_will_do():
    assert check_selection([3, 1], sized(9, 2)).tolist() == [1, 3]


def test_a_huge_chunk_excuses_no_more_than_a_large_one():
    context = sized(500, 200)
    check_selection(np.arange(200 - MOST_CHUNK + 1), context, chunk=10**9)
    with pytest.raises(PolicyRefused, match=f"{200 - MOST_CHUNK + 1} to 200 of 500"):
        check_selection(np.arange(200 - MOST_CHUNK), context, chunk=10**9)


def test_who_keeps_less_than_a_chunk_too_few_is_told_of_chunks():
    with pytest.raises(PolicyRefused, match="CHUNK = 20"):
        check_selection(np.arange(7), sized(50, 20))


@given(arrays.arrays(st.sampled_from([np.float16, np.float32, np.float64]), st.integers(0, 12)))
def test_scores_are_finite_and_as_many_as_positions(scores):
    if scores.shape == (6,) and np.isfinite(scores).all():
        assert check_scores(scores, sized(6, 2)) is scores
        return
    with pytest.raises(PolicyRefused) as caught:
        check_scores(scores, sized(6, 2))
    assert caught.value.layer == "invariant"
    assert caught.value.reason == ("nonfinite" if scores.shape == (6,) else "shape")


@pytest.mark.parametrize("scores", [np.arange(6), np.ones(6, dtype=bool), np.ones(6) * 1j, None, "abcdef"])
def test_scores_of_other_kinds(scores):
    with pytest.raises(PolicyRefused) as caught:
        check_scores(scores, sized(6, 2))
    assert caught.value.reason == "dtype"


def test_seeds_answer_by_the_rules():
    for name in SEEDS:
        program, context = seed_program(name), observed()
        functions = program.functions()
        scores = check_scores(functions.score_tokens(context), context)
        kept = check_selection(functions.select_tokens_to_keep(scores, context), context, chunk=program.chunk)
        assert len(kept) <= context.K


def test_a_refusal_in_json_and_through_a_pickle():
    refusal = PolicyRefused("count", "invariant", expected="4", received="5", remedy="one less")
    assert isinstance(refusal, KvkeepError)
    assert refusal.to_dict() == {
        "error": "policy_refused",
        "reason": "count",
        "layer": "invariant",
        "expected": "4",
        "received": "5",
        "remedy": "one less",
    }
    again = pickle.loads(pickle.dumps(refusal))
    assert again.to_dict() == refusal.to_dict()
    assert str(again) == str(refusal)
    with pytest.raises(ValueError, match="no reason to refuse: 'mood'"):
        PolicyRefused("mood", "invariant", expected="", received="", remedy="")


def test_the_page_tells_every_reason():
    page = (Path(__file__).parents[2] / "docs" / "evolve.md").read_text(encoding="utf-8")
    for reason, meaning in REASONS.items():
        assert f"| `{reason}` | {meaning} |" in page
