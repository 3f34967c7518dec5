"""The mutator that asks a language model: answers, failures, spend; against a real server on localhost."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvkeep.evolve.context import FEATURES
from kvkeep.evolve.guard import check_source
from kvkeep.evolve.mutators.endpoint import Options
from kvkeep.evolve.mutators.llm import PATIENCE, LanguageModel
from kvkeep.evolve.mutators.protocol import MutatorError, Parent, Proposal, SpendLimitReached
from kvkeep.evolve.program import seed_program

from .chat_server import Reply, Server, serving

pytest.importorskip("openai", reason="the extra evolve")

FRC = seed_program("frc")
PARENT = Parent(FRC, 61.5, "layer 3: division by zero")
CODE = "def score_tokens(context):\n    return context.local_attention + 0.25 * context.key_norm\n"
FENCED = f"```python\n{CODE}```"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def asking(server: Server, **options: Any) -> LanguageModel:
    mutator = {name: options.pop(name) for name in ("style", "concurrency", "token_limit") if name in options}
    return LanguageModel(Options("m", server.base_url, **{"retries": 0, "timeout": 20.0} | options), **mutator)


def one(mutator: LanguageModel, seed: int = 0, *parents: Parent) -> Proposal:
    return mutator.propose(parents or [PARENT], np.random.default_rng(seed))


def always(reply: Reply) -> Callable[[int, dict[str, Any]], Reply]:
    return lambda number, body: reply


def test_an_answer_becomes_a_program() -> None:
    with serving(always(Reply(FENCED))) as server:
        mutator = asking(server)
        proposal = one(mutator)
    assert proposal.program is not None
    check_source(proposal.program.source)
    assert "0.25 * context.key_norm" in proposal.program.block
    assert "np.bincount" in proposal.program.block  # the selection, which the answer left out, is the parent's
    assert "by_largest" not in proposal.program.block  # what only the replaced function needed is gone
    assert proposal.parents == (FRC.digest,)
    assert proposal.tokens == mutator.spend.spent == 100
    assert proposal.program.name == f"llm-{proposal.program.short_digest}"


def test_what_the_model_is_told() -> None:
    other = Parent(seed_program("snapkv-like"), None)
    with serving(always(Reply(FENCED))) as server:
        mutator = asking(server, temperature=0.3, extra={"reasoning_effort": "low"})
        proposal = one(mutator, 0, PARENT, other)
        one(mutator, 1)
    first, second = server.requests
    system, user = (message["content"] for message in first["messages"])
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert all(name in system for name in FEATURES)
    assert "argsort" in system
    assert FRC.block.strip() in user
    assert other.program.block.strip() in user
    assert "61.5" in user
    assert "not fully evaluated" in user
    assert "layer 3: division by zero" in user
    assert (first["model"], first["temperature"], first["reasoning_effort"]) == ("m", 0.3, "low")
    assert first["max_tokens"] == 4096
    assert first["seed"] != second["seed"]
    assert proposal.parents == (FRC.digest, other.program.digest)


def test_the_same_random_numbers_ask_the_same() -> None:
    with serving(always(Reply(FENCED))) as server:
        mutator = asking(server)
        one(mutator, 5)
        one(mutator, 5)
        asked = {json.dumps(one(mutator, seed) and server.requests[-1]["messages"]) for seed in range(12)}
    assert server.requests[0] == server.requests[1]
    assert len(asked) > 2  # other kinds of change are asked for


def test_text_of_programs_and_evaluations_is_no_template() -> None:
    with serving(always(Reply(FENCED))) as server:
        one(asking(server), 0, Parent(FRC, 1.0, "$code $score ${format} " + "x" * 5000))
    user = server.requests[0]["messages"][1]["content"]
    assert "$code $score ${format}" in user
    assert len(user) < 5000


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(always(Reply(FENCED))) as server:
        one(asking(server))
        monkeypatch.setenv("OPENAI_API_KEY", "of-a-test")
        one(asking(server))
    assert server.keys == ["Bearer none", "Bearer of-a-test"]


def test_without_a_server_or_a_key_it_says_so() -> None:
    with pytest.raises(MutatorError, match="OPENAI_API_KEY"):
        LanguageModel(Options("m"))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "openai":
            raise ImportError("No module named 'openai'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MutatorError, match=r"kvkeep\[evolve\]"):
        LanguageModel(Options("m", "http://127.0.0.1:1/v1"))


def test_changes_are_asked_for_where_that_is_the_style() -> None:
    change = "<<<<<<< SEARCH\nCHUNK = 20\n=======\nCHUNK = 12\n>>>>>>> REPLACE"
    with serving(always(Reply(change))) as server:
        proposal = one(asking(server, style="diff"))
    assert "SEARCH" in server.requests[0]["messages"][1]["content"]
    assert proposal.program is not None
    assert proposal.program.chunk == 12


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(""), "empty"),
        (Reply("I cannot help with that."), "no_code"),
        (Reply("```python\ndef score_tokens(context):\n    return (context.\n```"), "syntax"),
        (Reply(f"```python\n{FRC.block}```"), "unchanged"),
        (Reply("```python\nimport os\n\n\n" + CODE + "```"), "import"),
        (Reply("```python\ndef score_tokens(context):\n    return open('/etc/passwd')\n```"), "name"),
        (Reply("```python\ndef score_tokens(context, scale):\n    return context.key_norm\n```"), "program"),
        (Reply("```python\ndef score_tok", finish="length"), "cut_off"),
        (Reply(body=b'{"id": "1", "choices": [{"mess'), "bad_response"),
        (Reply(body=b'{"id": "1", "object": "chat.completion", "choices": []}'), "bad_response"),
        (Reply(body=b'{"id": "1", "object": "chat.completion", "choices": [{"message": {"content": null}}]}'), "empty"),
        (Reply(body=b'"text"'), "bad_response"),
        (Reply(body=b"[]"), "bad_response"),
        (Reply(status=400), "bad_request"),
        (Reply(status=500), "server_error"),
        (Reply(status=503), "server_error"),
        (Reply(status=429), "rate_limit"),
        (Reply(FENCED, wait=5), "timeout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_answer_is_a_counted_rejection(reply: Reply, reason: str) -> None:
    with serving(always(reply)) as server:
        mutator = asking(server, timeout=0.5 if reason == "timeout" else 20.0)
        proposal = one(mutator)
    assert proposal.program is None
    assert proposal.rejection == reason
    assert proposal.note
    assert mutator.rejections == {reason: 1}


def test_a_server_that_is_not_there_is_a_rejection_too() -> None:
    with serving(always(Reply())) as server:
        pass
    assert one(asking(server)).rejection == "connection"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_an_unknown_model_ends_the_search(status: int) -> None:
    with serving(always(Reply(status=status))) as server, pytest.raises(MutatorError, match=f"status {status}"):
        one(asking(server, retries=3))
    assert len(server.requests) == 1


def test_it_waits_as_long_as_the_server_says_and_asks_again() -> None:
    def reply(number: int, body: dict[str, Any]) -> Reply:
        return Reply(status=429, headers={"Retry-After": "1"}) if number == 0 else Reply(FENCED)

    with serving(reply) as server:
        proposal = one(asking(server, retries=2))
    assert proposal.program is not None
    assert len(server.requests) == 2
    assert server.times[1] - server.times[0] >= 1


def test_errors_of_the_server_are_retried() -> None:
    with serving(lambda number, body: Reply(status=500) if number == 0 else Reply(FENCED)) as server:
        assert one(asking(server, retries=1)).program is not None
    assert len(server.requests) == 2


def test_it_gives_up_after_many_failures_and_starts_again_with_new_patience() -> None:
    with serving(always(Reply(status=400))) as server:
        mutator = asking(server)
        for _ in range(PATIENCE):
            assert one(mutator).rejection == "bad_request"
        with pytest.raises(MutatorError, match=f"{PATIENCE} failures in a row"):
            one(mutator)
        again = asking(server)
        again.restore(json.loads(json.dumps(mutator.state())))
        assert one(again).rejection == "bad_request"
        assert again.rejections == {"bad_request": PATIENCE + 1}


def test_the_limit_of_spend_holds_over_restarts() -> None:
    with serving(always(Reply(FENCED, usage={"total_tokens": 1500}))) as server:
        state = asking(server).state()

        def ask_after_a_restart(seed: int) -> None:
            mutator = asking(server, token_limit=20_000, max_tokens=50)
            mutator.restore(state)
            one(mutator, seed)
            state.update(mutator.state())

        def ask_without_end() -> None:
            for seed in range(20):
                ask_after_a_restart(seed)

        with pytest.raises(SpendLimitReached, match="20000 tokens"):
            ask_without_end()
        assert 0 < len(server.requests) < 20
        assert state["spent"] == 1500 * len(server.requests) <= 20_000


def test_tokens_are_estimated_where_the_server_does_not_count() -> None:
    with serving(always(Reply(FENCED, usage=None))) as server:
        mutator = asking(server)
        proposal = one(mutator)
    prompt = sum(len(message["content"]) for message in server.requests[0]["messages"])
    assert (prompt + len(FENCED)) / 4 < proposal.tokens == mutator.spend.spent < (prompt + len(FENCED)) / 2


def test_many_at_a_time_keep_their_order() -> None:
    def reply(number: int, body: dict[str, Any]) -> Reply:
        weight = body["messages"][1]["content"].count("mark") / 8
        code = f"def score_tokens(context):\n    return {weight} * context.key_norm\n"
        return Reply(f"```\n{code}```", wait=0.05 * (3 - number % 4))

    parents = [Parent(FRC, 1.0, "mark " * i) for i in range(1, 8)]
    with serving(reply) as server:
        mutator = asking(server, concurrency=4)
        proposals = mutator.propose_many([[parent] for parent in parents], [np.random.default_rng(0)] * 7)
    blocks = [proposal.program.block for proposal in proposals if proposal.program is not None]
    assert [f"return {i / 8} *" in block for i, block in zip(range(1, 8), blocks, strict=True)] == [True] * 7
    assert mutator.spend.spent == 700
    assert mutator.requests == len(server.requests) == 7


def test_what_was_paid_for_is_not_lost_when_the_spend_ends_within_a_batch() -> None:
    with serving(always(Reply(FENCED, wait=0.2))) as server:
        probe = asking(server)
        one(probe)
        prompt = sum(len(message["content"]) for message in server.requests[0]["messages"])
        limit = int(2.5 * (prompt / 3 + 100))
        mutator = asking(server, token_limit=limit, max_tokens=100, concurrency=4)
        proposals = mutator.propose_many([[PARENT]] * 4, [np.random.default_rng(i) for i in range(4)])
    assert sorted(proposal.rejection for proposal in proposals) == ["", "", "spend", "spend"]
    assert mutator.rejections == {"spend": 2}


def test_a_state_that_is_none_is_refused() -> None:
    with serving(always(Reply())) as server, pytest.raises(MutatorError, match="state"):
        asking(server).restore({"spent": "many"})
