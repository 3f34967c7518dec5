"""DuoAttention: heads that fetch words from far away keep everything, the others the ends of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.calibrated import OF_MODEL
from kvkeep.observation import Needs, Observation
from kvkeep.policies.ends import Ends, part_of
from kvkeep.policies.protocols import Judgement, Scope, caller_protected, check_scores, require


@dataclass(frozen=True)
class Duo:
    """As many KV heads as the budget demands stream: they keep sinks and recent entries; retrieval heads keep all.

    Xiao et al. 2024 (DuoAttention, arXiv 2410.10819). Deviations: which heads retrieve is measured, where the paper
    learns a gate for each head by distillation on passkeys: `kvkeep calibrate` lets the model read a passage twice, and
    a head's score is the attention that goes back to where the words stood the first time; a KV head has the score of
    its best query head. The budget decides how many heads stream, where the paper's ratio of heads leaves the size of
    the cache to the length of the text; sinks and recent entries are at most half of the budget when heads are counted,
    and what retrieval heads leave of it goes to the recent entries of the others, all alike.

    Attributes:
        sinks: how many of the first entries a streaming head keeps.
        recent: how many of the latest entries it keeps at least, where half of the budget holds them.
        statistics: `model`: those that `kvkeep calibrate` wrote for the model; or the path of its file.
    """

    sinks: int = 64
    recent: int = 256
    statistics: str = OF_MODEL
    name: ClassVar[str] = "duo"
    scope: ClassVar[Scope] = "model"

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "64 is the paper's")
        require(self.recent >= 1, "recent >= 1", f"recent={self.recent}", "256 is the paper's")
        require(bool(self.statistics.strip()), "a place for statistics", "none", "model, or the path of a file")

    def needs(self) -> Needs:
        """The head scores."""
        return Needs(statistics=frozenset({self.statistics}))

    def judge(self, observation: Observation) -> Judgement:
        """Every entry has the score of its head.

        Raises:
            BudgetError: the caller protects more entries than the budget holds.
        """
        protected = caller_protected(observation)
        copying = observation.calibrated(self.statistics).copying  # [H]
        heads = copying.view(observation.keys.shape[1], -1).amax(1)  # [H_kv]
        scores = heads.float()[None, :, None].expand(observation.positions.shape).contiguous()
        check_scores(scores, observation, self.name)
        notes = self._ends.notes(self.name, observation, "streaming heads")
        return Judgement.of(observation, scores, protected, notes=notes)

    def choose(self, judgements: Sequence[Judgement]) -> list[Tensor]:
        """All entries of a cell, or its sinks and the latest ones; row by row."""
        masks = [judgement.valid.clone() for judgement in judgements]
        heads = judgements[0].valid.shape[1]
        places = [(index, head) for index in range(len(judgements)) for head in range(heads)]
        retrieval = torch.stack([j.scores.masked_fill(~j.valid, -torch.inf).amax(-1) for j in judgements])  # [l, B, H]
        for row in range(judgements[0].valid.shape[0]):
            cells = [part_of(judgements[index], row, head) for index, head in places]
            eagerness = (-retrieval[:, row]).flatten().tolist()
            short, count = self._ends.share(cells, eagerness, judgements[0].budget * len(cells))
            for each in short:
                index, head = places[each]
                masks[index][row, head] = self._ends.of(cells[each], count)[0, 0]
        return masks

    @property
    def _ends(self) -> Ends:
        return Ends(self.sinks, self.recent)
