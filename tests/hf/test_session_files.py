"""Session.save and Session.load: a conversation goes on where it stood."""

from __future__ import annotations

import pytest

from kvkeep import KeepCache, Session
from kvkeep.errors import CacheStateError
from kvkeep.testing import fake_model

TEXT = "The ferry leaves at nine, and the harbour is cold."


def session(architecture="llama", policy="snapkv", **options):
    model, tokenizer = fake_model(architecture)
    return Session(model, tokenizer, policy, compression_ratio=0.5, **options)


def reloaded(original, path):
    original.save(path)
    model, tokenizer = original.model, original.tokenizer
    return Session.load(path, model, tokenizer)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_after_a_text(architecture, tmp_path):
    original = session(architecture, system="Be brief.")
    original.ingest(TEXT)
    copy = reloaded(original, tmp_path / "s")
    for _ in range(2):
        expected = original.ask("When?", max_new_tokens=6, keep=False).text
        assert copy.ask("When?", max_new_tokens=6, keep=False).text == expected
    assert copy.header_tokens == original.header_tokens
    original.ingest(" More."), copy.ingest(" More.")
    assert copy.cache.ledger.to_dict()["entries"] == original.cache.ledger.to_dict()["entries"]


def test_in_the_middle_of_a_conversation(tmp_path):
    original = session()
    original.ingest(TEXT)
    original.ask("When?", max_new_tokens=6)
    copy = reloaded(original, tmp_path / "s")
    assert copy.question is None
    expected = [original.ask("Why?", max_new_tokens=6).text, original.ask("Where?", max_new_tokens=6).text]
    assert [copy.ask("Why?", max_new_tokens=6).text, copy.ask("Where?", max_new_tokens=6).text] == expected
    copy.rewind()
    assert [copy.ask("Why?", max_new_tokens=6).text, copy.ask("Where?", max_new_tokens=6).text] == expected


def test_with_an_open_question(tmp_path):
    original = session()
    original.ingest(TEXT, question="When?")
    copy = reloaded(original, tmp_path / "s")
    assert copy.question == original.question == "When?"
    assert copy.answer(max_new_tokens=6).text == original.answer(max_new_tokens=6).text
    assert copy.question is None
    with pytest.raises(CacheStateError, match="no open question"):
        copy.answer()


def test_the_file_is_a_cache_too_but_not_the_other_way_round(tmp_path):
    original = session()
    original.ingest(TEXT)
    original.save(tmp_path / "s")
    cache = KeepCache.load(tmp_path / "s", original.model)
    assert cache.ledger.to_dict() == original.cache.ledger.to_dict()
    cache.save(tmp_path / "c")
    with pytest.raises(CacheStateError, match="a file that Session"):
        Session.load(tmp_path / "c", original.model, original.tokenizer)
    with pytest.raises(CacheStateError, match="a whole file"):
        Session.load(tmp_path / "gone", original.model, original.tokenizer)


def test_a_cap_holds_after_loading_too(tmp_path):
    original = session(policy="streaming-llm", chunk_tokens=20)
    original.ingest(TEXT * 4)
    copy = reloaded(original, tmp_path / "s")
    peaks = []
    for each in (original, copy):
        each.cache.ledger.restart()
        each.ingest(TEXT * 8)
        peaks.append(each.cache.ledger.peak_bytes)
    assert peaks[0] == peaks[1]
    assert copy.cache.ledger.entries == original.cache.ledger.entries
