"""Conversations: turns continue the cache, the budget holds for all of them, and a reset begins anew."""

from __future__ import annotations

import pytest
import torch

from kvkeep import CacheStateError, PolicyError, Session
from kvkeep.testing import fake_model

TEXT = "Mira parked the red bicycle behind the bakery on Elm Street, next to the blue van. "


def test_a_second_turn_equals_the_whole_conversation_in_one_forward() -> None:
    model, tokenizer = fake_model(dtype=torch.float64)
    fed: list[torch.Tensor] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: fed.append(kwargs["input_ids"]), with_kwargs=True)
    session = Session(model, tokenizer, "full")
    session.ingest(TEXT)
    session.ask("Where is it?", max_new_tokens=9)
    fed_before_second = len(fed)
    second = session.ask("And the van?", max_new_tokens=9)
    hook.remove()
    ids = torch.cat(fed[: fed_before_second + 1], dim=1)  # everything up to the second answer
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(ids))
    assert tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True) == second.text


@pytest.mark.parametrize("policy", ["snapkv[window=8]", "snapkv[window=8]+ada", "frc", "h2o", "knorm+threshold"])
def test_each_text_brings_the_conversation_back_to_its_budget(policy: str) -> None:
    model, tokenizer = fake_model(layers=3)
    session = Session(model, tokenizer, policy, entries=48)
    for turn in range(4):
        session.ingest(TEXT * (turn + 1))
        assert session.cache.ledger.entries <= 48 * 3 * 2
        assert session.cache.ledger.uncut_entries == 0
        before = session.cache.get_seq_length()
        session.ask("Where is it?", max_new_tokens=5)
        assert session.cache.ledger.uncut_entries >= (session.cache.get_seq_length() - before) * 3 * 2


def test_questions_that_are_forgotten_find_the_same_cache() -> None:
    model, tokenizer = fake_model()
    session = Session(model, tokenizer, "snapkv[window=8]", compression_ratio=0.6)
    session.ingest(TEXT * 3)
    held = session.cache.ledger.entries_per_cell
    answers = [session.ask("Where is it?", max_new_tokens=8, keep=False).text for _ in range(2)]
    session.ask("Something else entirely, and longer than before?", max_new_tokens=8)
    session.rewind()
    assert session.cache.ledger.entries_per_cell == held
    assert session.ask("Where is it?", max_new_tokens=8).text == answers[0] == answers[1]


def test_a_reset_is_a_new_conversation() -> None:
    model, tokenizer = fake_model()
    session = Session(model, tokenizer, "snapkv[window=8]", compression_ratio=0.6)
    session.ingest(TEXT * 3)
    first = session.ask("Where is it?", max_new_tokens=8)
    session.reset()
    assert session.cache.ledger.entries == 0
    with pytest.raises(CacheStateError, match="ingest"):
        session.rewind()
    assert session.ask("Who?", max_new_tokens=4).new_tokens  # a question without a text is not cut
    session.reset()
    session.ingest(TEXT * 3)
    assert session.ask("Where is it?", max_new_tokens=8).text == first.text


def test_a_visible_question_is_part_of_the_text() -> None:
    model, tokenizer = fake_model()
    hidden, visible = (Session(model, tokenizer, "finch[window=4]", compression_ratio=0.7) for _ in range(2))
    hidden.ingest(TEXT * 4)
    visible.ingest(TEXT * 4, question="Where is the van?")
    assert visible.answer(max_new_tokens=4).new_tokens
    with pytest.raises(CacheStateError, match="question"):
        visible.answer()
    start = visible.cache.question[0]
    kept = visible.cache.kept_positions(0)
    question = len(tokenizer("\n\nWhere is the van?")["input_ids"])
    assert set(range(start, start + question)) <= set(kept.tolist()), "Finch keeps the question that it judges by"


@pytest.mark.parametrize("how", ["cache.reset", "cache.crop"])
def test_an_emptied_cache_is_a_start_whoever_emptied_it(how: str) -> None:
    model, tokenizer = fake_model()
    session, other = (Session(model, tokenizer, "snapkv[window=8]", compression_ratio=0.6) for _ in range(2))
    whole = session.question_tokens("Where is it?")
    if how == "cache.crop":
        session.ask("Who?", max_new_tokens=4)
        session.cache.crop(-session.cache.get_seq_length())
    else:
        session.ingest(TEXT, question="Where is it?")
        session.cache.reset()
    assert session.question is None
    with pytest.raises(CacheStateError, match="no open question"):
        session.answer()
    with pytest.raises(CacheStateError, match="an ingested text"):
        session.rewind()
    assert session.question_tokens("Where is it?") == whole
    assert session.ingest(TEXT) == other.ingest(TEXT)
    assert session.ask("Where is it?", max_new_tokens=8).text == other.ask("Where is it?", max_new_tokens=8).text


def test_the_remedy_of_a_broken_cache_works_for_a_session() -> None:
    model, tokenizer = fake_model()
    session, other = (Session(model, tokenizer, "snapkv[window=8]", compression_ratio=0.6) for _ in range(2))
    session.ingest(TEXT)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.ingest(TEXT)  # which cuts
    hook.remove()
    with pytest.raises(CacheStateError, match=r"cache\.reset\(\)"):
        session.ask("Where is it?")
    session.cache.reset()
    assert session.ingest(TEXT) == other.ingest(TEXT)
    assert session.ask("Where is it?", max_new_tokens=8).text == other.ask("Where is it?", max_new_tokens=8).text


@pytest.mark.parametrize("words", [None, 3, "", b"bytes", ["a"]], ids=repr)
def test_words_that_are_none_are_refused_and_change_nothing(words: object) -> None:
    model, tokenizer = fake_model()
    session = Session(model, tokenizer, "snapkv[window=8]", compression_ratio=0.6)
    session.ingest(TEXT)
    held, expected = session.cache.ledger.to_dict(), session.ask("Where?", max_new_tokens=8, keep=False).text
    received = "received an empty string" if words == "" else f"received {type(words).__name__}"
    with pytest.raises(CacheStateError, match=f"expected a text, as a string; {received}"):
        session.ingest(words)  # type: ignore[arg-type]
    for call in (session.ask, session.question_tokens):
        with pytest.raises(CacheStateError, match=f"expected a question, as a string; {received}"):
            call(words)  # type: ignore[arg-type]
    if words is not None:
        with pytest.raises(CacheStateError, match=f"expected a question, as a string; {received}"):
            session.ingest(TEXT, question=words)  # type: ignore[arg-type]
    assert session.cache.ledger.entries == held["entries"]
    assert session.ask("Where?", max_new_tokens=8).text == expected


@pytest.mark.parametrize("policy", ["snapkv[window=8]", "frc", "knorm+threshold", "streaming-llm"])
def test_a_text_in_chunks_is_never_held_whole(policy: str) -> None:
    model, tokenizer = fake_model(layers=3)
    session = Session(model, tokenizer, policy, entries=48, chunk_tokens=20)
    held: list[int] = []
    finish = session.cache.finish_forward

    def watched() -> None:
        finish()
        held.append(session.cache.ledger.entries)

    session.cache.finish_forward = watched  # type: ignore[method-assign]
    for _ in range(3):
        tokens = session.ingest(TEXT * 6)
        assert len(held) == -(-tokens // 20)
        assert max(held) <= 48 * 3 * 2
        session.ask("Where is it?", max_new_tokens=4)
        session.rewind()
        held.clear()
    assert session.cache.get_seq_length() > 400


def test_chunks_keep_the_ratio_of_the_whole_text() -> None:
    model, tokenizer = fake_model(layers=3)
    whole, chunks = (
        Session(model, tokenizer, "streaming-llm", compression_ratio=0.8, chunk_tokens=n) for n in (None, 30)
    )
    for session in (whole, chunks):
        session.ingest(TEXT * 12)
    assert chunks.cache.ledger.entries_per_cell == whole.cache.ledger.entries_per_cell
    assert chunks.cache.ledger.peak_bytes < 0.75 * whole.cache.ledger.peak_bytes
    assert whole.ask("Where?", max_new_tokens=3).new_tokens
    with pytest.raises(CacheStateError, match="a text without its question"):
        chunks.ingest(TEXT, question="Where is it?")


@pytest.mark.parametrize("chunk_tokens", [0, -3, 2.5, "20"])
def test_sizes_of_chunks_that_make_no_sense_are_refused(chunk_tokens: object) -> None:
    model, tokenizer = fake_model()
    with pytest.raises(CacheStateError, match="chunk_tokens as a whole number"):
        Session(model, tokenizer, "knorm", entries=9, chunk_tokens=chunk_tokens)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="queries of the whole text"):
        Session(model, tokenizer, "h2o", entries=9, chunk_tokens=20)


def test_an_interruption_between_chunks_leaves_what_was_read() -> None:
    model, tokenizer = fake_model(layers=3)
    session = Session(model, tokenizer, "snapkv[window=8]", entries=48, chunk_tokens=20)
    calls = 0

    def interrupt(module: object, args: object, kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(interrupt, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        session.ingest(TEXT * 6)
    hook.remove()
    assert session.cache.get_seq_length() == 60
    assert session.cache.ledger.entries == 48 * 3 * 2
    assert session.cache.ledger.state_bytes == 0
    first = session.ask("Where is it?", max_new_tokens=5).text
    session.rewind()
    assert session.ask("Where is it?", max_new_tokens=5).text == first
    session.ingest(TEXT)


@pytest.mark.parametrize(("policy", "entries"), [("online-tova", 40), ("snapkv[window=8]", 40), ("full", None)])
def test_an_interruption_within_an_answer_takes_it_back(policy: str, entries: int | None) -> None:
    """Also in the middle of a forward, where some layers have the token and others have not."""
    model, tokenizer = fake_model(layers=3)
    session = Session(model, tokenizer, policy, entries=entries)

    def ask_in_vain(after: int) -> None:
        calls = 0

        def interrupt(*args: object) -> None:
            nonlocal calls
            calls += 1
            if calls == after:
                raise KeyboardInterrupt

        hook = model.get_decoder().layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.ask("Where is it?", max_new_tokens=9)
        hook.remove()

    ask_in_vain(1)
    assert not session.cache.is_broken
    assert session.cache.get_seq_length() == 0
    session.ingest(TEXT)
    read = session.cache.get_seq_length()
    expected = session.ask("Where is it?", max_new_tokens=5, keep=False).text
    for after in (1, 3):
        ask_in_vain(after)
        assert session.cache.get_seq_length() == read
        assert session.ask("Where is it?", max_new_tokens=5, keep=False).text == expected
