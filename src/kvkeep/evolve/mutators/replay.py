"""Proposals written down, and proposed again: a search repeated without the language model that it once asked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvkeep.evolve.guard import PolicyRefused, check_source
from kvkeep.evolve.mutators.protocol import Mutator, MutatorError, Parent, Proposal, first_of
from kvkeep.evolve.program import Program, ProgramError
from kvkeep.results.appending import ROWS, AppendLog, damaged, whole_lines


class Replay(Mutator):
    """Proposes what a file holds, in its order, whatever the parents are.

    Where a recorded search went back and on from an earlier proposal, the way to its last one counts.

    Args:
        path: of the JSONL file, or of the folder that a `Recording` made.

    Raises:
        MutatorError: no such file.
        ResultsError: a line that is no proposal.
    """

    name = "replay"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        self._path = path / ROWS if path.is_dir() else path
        if not self._path.is_file():
            raise MutatorError(
                expected="a file of recorded proposals",
                received=f"{path}",
                remedy="a search with --recording writes one",
            )
        self._proposals = _last_path([_read(where, record) for where, record in whole_lines(self._path)])
        self._position = 0

    def __len__(self) -> int:
        """How many are left."""
        return len(self._proposals) - self._position

    def propose(self, parents: Sequence[Parent], random: np.random.Generator) -> Proposal:
        """The next one, with the parents that it had when it was recorded.

        Raises:
            MutatorError: no more.
        """
        if not len(self):
            raise MutatorError(
                expected="another recorded proposal",
                received=f"the end of {self._path} after {self._position}",
                remedy="end the search here, or go on with another mutator",
            )
        proposal = self._proposals[self._position]
        self._position += 1
        return proposal

    def state(self) -> dict[str, Any]:
        """How many were proposed."""
        return {"position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after so many.

        Raises:
            MutatorError: no such state, or more than the file holds.
        """
        position = state.get("position")
        if not isinstance(position, int) or not 0 <= position <= len(self._proposals):
            raise MutatorError(
                expected=f"a position from 0 to {len(self._proposals)}",
                received=f"{position!r}",
                remedy="pass what state() gave",
            )
        self._position = position


class Recording(Mutator):
    """Hands on what another mutator proposes, and writes it down before.

    A search that was stopped between a proposal and the use of it finds it here: what was recorded after the restored
    proposal, and has the same parent, is proposed again instead of asked for, and paid for, anew.

    Args:
        mutator: that proposes.
        folder: where `rows.jsonl` is kept; `Replay` reads it.
        settings: of the search, which are the same when it goes on.

    Raises:
        ResultsError: another process records there, other settings, a line that is no proposal.
    """

    def __init__(self, mutator: Mutator, folder: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.name = mutator.name
        self._mutator, self._last = mutator, _NONE
        self._log = _Log(folder, settings)
        self._catch_up()

    def propose(self, parents: Sequence[Parent], random: np.random.Generator) -> Proposal:
        """As the mutator, save for what was recorded and not used."""
        return self.propose_many([parents], [random])[0]

    def propose_many(
        self, batches: Sequence[Sequence[Parent]], randoms: Sequence[np.random.Generator]
    ) -> list[Proposal]:
        """As the mutator, save for those that were recorded and not used."""
        proposals: list[Proposal] = []
        for parents in batches:
            number = self._log.find(self._last, first_of(parents).program.digest)
            if number is None:
                break
            proposals.append(self._log.records[number].proposal)
            self._last = number
        fresh = len(proposals)
        if fresh < len(batches):
            made = self._mutator.propose_many(batches[fresh:], randoms[fresh:])
            state = self._mutator.state()
            for proposal in made:
                self._last = self._log.add(_Record(proposal, self._last, state))
            self._log.flush()  # these may have cost money
            proposals += made
        return proposals

    def state(self) -> dict[str, Any]:
        """The mutator's, and the number of the last proposal that was handed on."""
        return {**self._mutator.state(), "recorded": self._last}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there; from the end of the recording, where the state was not made with it.

        Raises:
            MutatorError: no such state.
        """
        newest = len(self._log.records) - 1
        recorded = state.get("recorded", newest)
        if not isinstance(recorded, int) or recorded < _NONE:
            raise MutatorError(
                expected="the number of a recorded proposal", received=f"{recorded!r}", remedy="pass what state() gave"
            )
        self._last = min(recorded, newest)
        self._mutator.restore(state)
        self._catch_up()

    def close(self) -> None:
        """Let others record there."""
        self._log.close()

    def _catch_up(self) -> None:
        """What was spent for all that is recorded is spent, whichever of it is used."""
        if self._log.records:
            self._mutator.restore(self._log.records[-1].state)


_NONE = -1  # before the first


class _Record(NamedTuple):
    """A line of a recording.

    Attributes:
        proposal: that was made.
        follows: number of the one before it in its search.
        state: of its mutator after it.
    """

    proposal: Proposal
    follows: int
    state: dict[str, Any]


class _Log(AppendLog):
    """The file of a recording; a proposal's key is its number."""

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.records: list[_Record] = []
        super().__init__(folder, settings)

    def find(self, last: int, parent: str) -> int | None:
        """The newest proposal that follows a given one and has this parent."""
        numbers = range(len(self.records) - 1, last, -1)
        wanted = last, (parent,)
        found = (n for n in numbers if (self.records[n].follows, self.records[n].proposal.parents[:1]) == wanted)
        return next(found, None)

    def add(self, record: _Record) -> int:
        """Append one; its number."""
        proposal, program = record.proposal, record.proposal.program
        line = {
            "source": None if program is None else program.source,
            "name": None if program is None else program.name,
            "mutator": proposal.mutator,
            "parents": list(proposal.parents),
            "note": proposal.note,
            "tokens": proposal.tokens,
            "rejection": proposal.rejection,
            "follows": record.follows,
            "state": record.state,
        }
        self._append(len(self.records), line)
        self.records.append(record)
        return len(self.records) - 1

    def _note(self, where: str, record: Any) -> int:
        self.records.append(_read(where, record))
        return len(self.records) - 1


def _read(where: str, line: Any) -> _Record:
    """A line as a record. A file may come from anywhere: its programs are checked as all others.

    Raises:
        ResultsError: it is no proposal, or its program is not allowed.
    """
    try:
        source = line["source"]
        program = None if source is None else Program(source, str(line["name"]))
        if program is not None:
            check_source(program.source)
        proposal = Proposal(
            program,
            str(line["mutator"]),
            tuple(str(digest) for digest in line["parents"]),
            str(line["note"]),
            int(line["tokens"]),
            str(line["rejection"]),
        )
        return _Record(proposal, int(line["follows"]), dict(line["state"]))
    except (KeyError, TypeError, ValueError, AttributeError, ProgramError, PolicyRefused) as error:
        raise damaged(where, f"{type(error).__name__}: {error}") from error


def _last_path(records: Sequence[_Record]) -> list[Proposal]:
    """From the first proposal to the last, without those that the search went back from."""
    path: list[Proposal] = []
    number = len(records) - 1
    while number > _NONE:
        path.append(records[number].proposal)
        number = min(records[number].follows, number - 1)  # a damaged number must not lead round in circles
    return path[::-1]
