"""Programs: the block, its digest, its functions, and what is none."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import PolicyError
from kvkeep.evolve.context import contexts_of
from kvkeep.evolve.program import END, SEEDS, START, Program, ProgramError, read_program, seed_program
from kvkeep.testing import random_observation

BLOCK = """\
CHUNK = 20


def score_tokens(context):
    return 0.5 * context.local_attention


def select_tokens_to_keep(scores, context):
    return np.sort(np.argsort(-scores)[: context.K])
"""


def source(block: str = BLOCK, before: str = "import numpy as np\n", after: str = "") -> str:
    return f"{before}\n{START}\n{block}{END}\n{after}"


def test_a_program_is_its_block():
    program = Program(source(), "mine")
    assert program.block == BLOCK
    assert program.with_block(program.block) == program
    other = program.with_block(BLOCK.replace("0.5", "0.25"), "other")
    assert other.source == source(BLOCK.replace("0.5", "0.25"))
    assert (program.name, other.name) == ("mine", "other")
    assert program.with_block(BLOCK.rstrip("\n")) == program
    assert repr(program) == f"Program(name='mine', digest='{program.digest}')"
    for twin in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert (twin, hash(twin), twin.digest) == (program, hash(program), program.digest)


LINES = BLOCK.splitlines()


@given(st.dictionaries(st.integers(0, len(LINES)), st.sampled_from(["", "# why", "    # indented", "\n\n"])))
def test_blanks_and_comments_do_not_change_the_digest(additions):
    lines = []
    for index, line in enumerate([*LINES, ""]):
        lines += [additions[index]] if index in additions else []
        lines.append(line + "  # here" * bool(line and index in additions))
    assert Program(source("\n".join(lines) + "\n")).digest == Program(source()).digest


def test_neither_do_other_parts_of_the_file():
    digest = Program(source()).digest
    assert Program(source(before='"""A docstring."""\nfrom __future__ import annotations\n')).digest == digest
    assert Program(source("import numpy as np\n" + BLOCK, before="")).digest == digest
    assert Program(source(BLOCK.replace("(context)", "( context )")), "other").digest == digest


def test_the_digest_is_the_same_in_all_versions_of_python():
    assert Program(source()).short_digest == "e465ebb8dfc6"


@pytest.mark.parametrize(("old", "new"), [("0.5", "0.51"), ("local", "global"), ("-scores", "+scores"), ("20", "21")])
def test_what_matters_changes_the_digest(old, new):
    assert Program(source(BLOCK.replace(old, new))).digest != Program(source()).digest


def test_functions_are_those_of_the_block():
    program = Program(source())
    [context] = contexts_of(random_observation(length=30, budget=7))
    functions = program.functions()
    scores = functions.score_tokens(context)
    assert scores.tolist() == (0.5 * context.local_attention).tolist()
    assert functions.select_tokens_to_keep(scores, context).tolist() == sorted(np.argsort(-scores)[:7])


def test_functions_share_nothing_with_earlier_ones():
    program = Program(source("SEEN = []\n" + BLOCK.replace("return 0.5", "SEEN.append(1)\n    return len(SEEN)")))
    [context] = contexts_of(random_observation(length=30))
    for _ in range(2):
        functions = program.functions()
        assert functions.score_tokens(context)[0] == context.local_attention[0]
        assert functions.score_tokens(context)[0] == 2 * context.local_attention[0]


@pytest.mark.parametrize("name", ["open", "__import__", "eval", "exec", "getattr", "print", "globals", "type"])
def test_functions_do_not_find_the_rest_of_python(name):
    functions = Program(source(BLOCK.replace("0.5", f"{name}(0)"))).functions()
    with pytest.raises(NameError, match=name):
        functions.score_tokens(None)


def test_modules_other_than_numpy_are_not_imported():
    with pytest.raises(ImportError):
        Program(source("import os\n" + BLOCK)).functions()


def test_errors_in_a_block_have_the_line_of_the_file():
    program = Program(source(BLOCK.replace("0.5", "1 // 0")))
    with pytest.raises(ZeroDivisionError) as caught:
        program.functions().score_tokens(contexts_of(random_observation())[0])
    line = program.source.splitlines()[caught.traceback[-1].lineno]  # counted from 0
    assert line == "    return 1 // 0 * context.local_attention"


@pytest.mark.parametrize(
    ("line", "chunk"),
    [
        ("CHUNK = 20", 20),
        ("CHUNK = 1", 1),
        ("chunk = 20", None),
        ("CHUNK = 0", None),
        ("CHUNK = True", None),
        ("CHUNK = 20.0", None),
        ("CHUNK = 10 + 10", None),
        ("CHUNK = 20\nCHUNK = 7", None),
        ("CHUNK, WIDTH = 20, 3", None),
    ],
)
def test_a_block_says_that_it_keeps_chunks(line, chunk):
    assert Program(source(BLOCK.replace("CHUNK = 20", line))).chunk == chunk


def nested(depth: int) -> str:
    return BLOCK.replace("0.5", "(" * depth + "0.5" + ")" * depth)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (BLOCK, "no block"),
        (f"{START}\n{BLOCK}", "no block"),
        (source() + source(), "2 starts and 2 ends"),
        (source(f"{BLOCK}{START}\n"), "2 starts and 1 ends"),
        (f"{END}\n{BLOCK}{START}\n", "the end first"),
        (source(BLOCK.replace("score_tokens", "score")), r"score_tokens\(context\) in the block.*received none"),
        (source(BLOCK.replace("def select", "class A: pass\ndef selec")), "select_tokens_to_keep"),
        (source(BLOCK.replace("(scores, context)", "(context, scores)")), r"select_tokens_to_keep\(context, scores\)"),
        (source(BLOCK.replace("(scores, context)", "(scores, context, k)")), r"\(scores, context, k\)"),
        (source(BLOCK.replace("(scores, context)", "(scores, context=None)")), "context=None"),
        (source(BLOCK.replace("(scores, context)", "(*scores, context)")), r"\*scores"),
        (source(BLOCK.replace("(context)", "(context, **more)")), r"\*\*more"),
        (source(BLOCK.replace("def score_tokens(context):", "score_tokens = lambda context:\\")), "score_tokens"),
        (source(BLOCK.replace("return 0.5", "return 0.5 0.5")), "in line 8: 'return 0.5 0.5"),
        (source(BLOCK + "    oops = (\n"), "never closed in line 13"),
        (source(before="import os\n"), "'import os'"),
        (source(before="import numpy\n"), "'import numpy'"),
        (source(before="import numpy as np, os\n"), "outside the block"),
        (source(after="WEIGHT = 3\n"), "WEIGHT = 3"),
        (source(after="def helper():\n    return 1\n"), r"def helper\(\):"),
        (source(before='"""\n', after='"""\n'), "line"),
        (source(before="if True:\n"), "line"),
        (source("\0" + BLOCK), "null bytes"),
        (source(nested(5000)), "."),
        (source(BLOCK.replace("0.5", "+".join(["0.5"] * 5000))), "."),
    ],
)
def test_what_is_no_program_is_refused(text, complaint):
    with pytest.raises(ProgramError, match=complaint):
        Program(text, "candidate")


def test_a_block_that_makes_no_program_is_refused():
    with pytest.raises(ProgramError, match="score_tokens"):
        Program(source()).with_block("pass\n")
    with pytest.raises(ProgramError, match="2 starts"):
        Program(source()).with_block(f"{BLOCK}{END}\n{START}\n")


@pytest.mark.filterwarnings("error")
def test_odd_escapes_are_not_announced():
    Program(source('"\\d"\n' + BLOCK)).functions()


def test_a_file_is_read(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(source(), encoding="utf-8")
    assert read_program(path) == read_program(str(path)) == Program(source(), "mine")
    path.write_bytes(b"\xff\xfe")
    for wrong in (path, tmp_path, tmp_path / "absent.py"):
        with pytest.raises(ProgramError, match=str(wrong)):
            read_program(wrong)


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_are_programs(name):
    program = seed_program(name)
    assert program.name == name
    assert program == seed_program(name)
    assert program.chunk == (20 if name == "frc" else None)


def test_seeds_differ():
    assert len({seed_program(name).digest for name in SEEDS}) == len(SEEDS)
    with pytest.raises(PolicyError, match="'snapkv-like'"):
        seed_program("snapkv")
