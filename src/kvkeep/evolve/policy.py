"""Programs as policies: `program:path/to/file.py` or `program:frc` wherever the name of a policy may stand."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep.evolve.context import QUERIES, PrefillContext, contexts_of
from kvkeep.evolve.guard import PolicyRefused, check_scores, check_selection, check_source
from kvkeep.evolve.program import SEEDS, Program, ProgramError, read_program, seed_program
from kvkeep.observation import Needs, Observation
from kvkeep.policies.protocols import Judgement, Scope, caller_protected

_WITH_DIGEST = re.compile(r"(.*)@([0-9a-f]{8,64})", re.DOTALL)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class ProgramPolicy:
    """A program chooses the positions of each layer; all KV heads keep the same ones.

    CacheCraft 2026 (arXiv 2608.14555), section 3. The program is asked for exactly as many positions as the budget
    leaves, at most so many if it keeps whole chunks; an answer that breaks this is an error, never cut to size. Where
    the caller protects positions, the program scores the whole text, and selects among the others what is left of the
    budget. It is not asked where everything may stay. Where heads hold different entries, after another policy's cut, a
    head keeps what it holds of the chosen positions. Deviation: rows of a batch are chosen for one by one, so that rows
    of whole chunks may keep different numbers of entries; the paper wants one number, since its caches are rectangular.

    The program runs in this process, after its text was checked against an allow-list: that stops mistakes and
    mischief, not endless loops. The search runs programs in a sandbox.

    Attributes:
        program: what chooses.
        place: the path or the name of the seed that it was read from, if that is to be found in results.

    Raises:
        PolicyRefused: the text of the program does what programs may not.
    """

    program: Program
    place: str = field(default="", compare=False)
    scope: ClassVar[Scope] = "layer"

    def __post_init__(self) -> None:
        check_source(self.program.source)

    @property
    def name(self) -> str:
        """The program's."""
        return self.program.name

    @property
    def text(self) -> str | None:
        """What names this program and no other: `program:frc@` and the first digits of its digest; None without place.

        Reading it back fails once the file holds another program.
        """
        return f"program:{self.place}@{self.program.short_digest}" if self.place else None

    def needs(self) -> Needs:
        """The queries of the global attention, and the rotation to undo."""
        return Needs(queries=QUERIES, rotary=True)

    def judge(self, observation: Observation) -> Judgement:
        """Run the program on each row. What it selects is the judgement's `weights`, ones and zeros.

        Raises:
            PolicyRefused: the program fails, or its answer breaks a rule.
            BudgetError: the caller protects more entries than the budget holds.
        """
        protected = caller_protected(observation)
        scores, chosen = observation.zeros(), observation.valid.float()
        fits = (observation.held <= observation.budget).all(-1)  # [B]
        if not bool(fits.all()):
            for row, context in enumerate(contexts_of(observation)):
                if not bool(fits[row]):
                    pinned = np.unique(observation.positions[row][protected[row]].cpu().numpy())
                    room = observation.budget - int(protected[row].sum(-1).max())
                    given, kept = self._choose(context, pinned, room)
                    positions, valid = observation.positions[row], observation.valid[row]
                    everywhere = torch.from_numpy(context.position.astype(np.int64)).to(positions.device)
                    index = torch.searchsorted(everywhere, positions.contiguous()).clamp_(max=context.L - 1)
                    scores[row] = torch.from_numpy(given).to(positions.device)[index].masked_fill(~valid, 0)
                    chosen[row] = (torch.isin(positions, everywhere[torch.from_numpy(kept)]) & valid).float()
        return Judgement.of(observation, scores, protected, weights=chosen)

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """What the program selected, and what the caller protects."""
        return [
            judgement.valid & (judgement.protected | (judgement.weights > 0))
            for judgement in judgements
            if judgement.weights is not None
        ]

    def _choose(
        self, context: PrefillContext, pinned: NDArray[np.int64], room: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores of all positions, and indices of those that stay beside the pinned positions, `room` of them."""
        functions = _answer(self.program.functions)
        scores = check_scores(_answer(functions.score_tokens, context), context)
        most = np.finfo(np.float32).max
        shown = np.clip(scores, -most, most).astype(np.float32)
        free = np.flatnonzero(~np.isin(context.position, pinned))
        if len(free) <= room or not room:
            return shown, free[:room]
        left = context.restricted(free, room) if len(pinned) else context
        selected = _answer(functions.select_tokens_to_keep, scores[free], left)
        return shown, free[check_selection(selected, left, chunk=self.program.chunk)]


def policy_of(text: str) -> ProgramPolicy:
    """The policy that `program:text` names.

    Args:
        text: a path, or the name of a seed; behind it, if it must be one certain program, `@` and the first digits of
            its digest, as results have them.

    Raises:
        ProgramError: there is no such program, or another one.
        PolicyRefused: its text does what programs may not.
    """
    match = _WITH_DIGEST.fullmatch(text)
    place, digest = match.groups() if match else (text, "")
    program = seed_program(place) if place in SEEDS else read_program(place)
    if not program.digest.startswith(digest):
        raise ProgramError(
            expected=f"the program of digest {digest} in {place}",
            received=f"one of digest {program.digest[: len(digest)]}",
            remedy="the file was changed since; bring the former one back, or leave the digest out",
        )
    return ProgramPolicy(program, place)


def _answer(function: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """What a program's function gives; what it raises is a refusal, and what numpy remarks is not announced."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*arguments)
    except Exception as error:
        raise PolicyRefused(
            "crash",
            "invariant",
            expected="an answer of the program",
            received=f"{type(error).__name__}: {error}",
            remedy="mend the program",
        ) from error
