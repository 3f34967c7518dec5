"""Proposals recorded and proposed again: after a stop nothing is asked for twice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.errors import ResultsError
from kvkeep.evolve.mutators.grammar import Grammar
from kvkeep.evolve.mutators.protocol import Mutator, MutatorError, Parent, Proposal
from kvkeep.evolve.mutators.replay import Recording, Replay
from kvkeep.evolve.program import seed_program

SETTINGS = {"model": "m"}


class Paid(Mutator):
    """As the grammar, but each proposal costs ten tokens; every third is a rejection."""

    name = "paid"

    def __init__(self) -> None:
        self.spent, self.calls = 0, 0

    def propose(self, parents: Sequence[Parent], random: np.random.Generator) -> Proposal:
        self.spent += 10
        self.calls += 1
        made = Grammar().propose(parents, random)
        if self.spent % 30 == 0:
            return Proposal(None, self.name, made.parents, "none", 10, rejection="no_code")
        return Proposal(made.program, self.name, made.parents, made.note, 10)

    def state(self) -> dict[str, Any]:
        return {"spent": self.spent}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.spent = state["spent"]


def walk(mutator: Mutator, start: int, end: int, proposals: list[Proposal], batch: int = 1) -> list[Proposal]:
    """Proposals number start to end, each from the last program before it; their random numbers are their number's."""
    for first in range(start, end, batch):
        programs = [proposal.program for proposal in proposals if proposal.program is not None]
        parents = [Parent(programs[-1] if programs else seed_program("frc"))]
        numbers = range(first, min(end, first + batch))
        proposals += mutator.propose_many([parents] * len(numbers), [np.random.default_rng(i) for i in numbers])
    return proposals


def test_a_recording_replays(tmp_path: Path) -> None:
    recording = Recording(Paid(), tmp_path, SETTINGS)
    made = walk(recording, 0, 7, [])
    recording.close()
    replay = Replay(tmp_path)
    assert [replay.propose([], np.random.default_rng(0)) for _ in range(4)] == made[:4]
    again = Replay(tmp_path / "rows.jsonl")
    again.restore(json.loads(json.dumps(replay.state())))
    assert [again.propose([], np.random.default_rng(0)) for _ in range(3)] == made[4:]
    with pytest.raises(MutatorError, match="the end of"):
        again.propose([], np.random.default_rng(0))
    assert any(proposal.rejection for proposal in made)


@settings(max_examples=6)
@given(stop=st.integers(0, 5), saved=st.integers(0, 5), batch=st.integers(1, 2))
def test_a_stopped_search_pays_for_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, stop: int, saved: int, batch: int
) -> None:
    """It is stopped after `stop` batches; what the search had written down ends after `saved` of them."""
    saved = min(saved, stop)
    undisturbed = walk(Paid(), 0, 6 * batch, [], batch)
    folder = tmp_path_factory.mktemp("recording")

    inner = Paid()
    recording = Recording(inner, folder, SETTINGS)
    made = walk(recording, 0, saved * batch, [], batch)
    state = json.loads(json.dumps(recording.state()))
    walk(recording, saved * batch, stop * batch, list(made), batch)
    recording.close()

    resumed = Paid()
    recording = Recording(resumed, folder, SETTINGS)
    recording.restore(state)
    assert walk(recording, saved * batch, 6 * batch, made, batch) == undisturbed
    recording.close()
    assert inner.calls + resumed.calls == 6 * batch
    assert resumed.spent == 60 * batch


def test_a_search_that_goes_another_way_is_recorded_from_there(tmp_path: Path) -> None:
    """As when a search is given more candidates after its controls have asked for children of the seed."""
    recording = Recording(Paid(), tmp_path, SETTINGS)
    searched = walk(recording, 0, 3, [])
    state = json.loads(json.dumps(recording.state()))
    aside = [recording.propose([Parent(seed_program("random"))], np.random.default_rng(7)) for _ in range(2)]
    recording.close()

    inner = Paid()
    recording = Recording(inner, tmp_path, SETTINGS)
    recording.restore(state)
    assert inner.spent == 50  # what was asked for aside was paid for
    more = walk(recording, 3, 5, list(searched))[3:]
    recording.close()
    assert inner.calls == 2

    replay = Replay(tmp_path)
    assert [replay.propose([], np.random.default_rng(0)) for _ in range(len(replay))] == [*searched, *more]

    again = Recording(Paid(), tmp_path, SETTINGS)
    again.restore(state)
    assert [again.propose([Parent(seed_program("random"))], np.random.default_rng(7)) for _ in range(2)] == aside
    again.close()


def test_other_settings_do_not_go_on_with_a_recording(tmp_path: Path) -> None:
    Recording(Paid(), tmp_path, SETTINGS).close()
    with pytest.raises(ResultsError, match="model"):
        Recording(Paid(), tmp_path, {"model": "other"})


def test_a_search_begun_without_a_recording_goes_on_with_one(tmp_path: Path) -> None:
    plain = Paid()
    made = walk(plain, 0, 3, [])
    recording = Recording(Paid(), tmp_path / "first", SETTINGS)
    recording.restore(plain.state())
    assert walk(recording, 3, 5, list(made)) == walk(Paid(), 0, 5, [])
    resumed = Paid()
    resumed.restore(recording.state())  # and without it again
    assert resumed.spent == 50
    recording.close()


def test_a_program_in_a_file_is_checked_as_any_other(tmp_path: Path) -> None:
    recording = Recording(Paid(), tmp_path, SETTINGS)
    walk(recording, 0, 1, [])
    recording.close()
    path = tmp_path / "rows.jsonl"
    record = json.loads(path.read_text())
    record["source"] = record["source"].replace("def score_tokens", "import os\n\n\ndef score_tokens")
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ResultsError, match="line 1"):
        Replay(path)


@pytest.mark.parametrize("state", [{}, {"position": -1}, {"position": 5}, {"position": "1"}])
def test_a_position_that_is_none_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    path = tmp_path / "proposals.jsonl"
    path.write_text("")
    with pytest.raises(MutatorError, match="position"):
        Replay(path).restore(state)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MutatorError, match=r"none\.jsonl"):
        Replay(tmp_path / "none.jsonl")
