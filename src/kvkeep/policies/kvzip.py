"""KVzip: an entry matters if the model looks at it while it repeats the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.observation import Needs, Observation, SecondPass
from kvkeep.policies.protocols import Scorer, require


@dataclass(frozen=True)
class KVzip(Scorer):
    """The most attention that an entry receives while the model repeats the text.

    Kim et al. 2025 (arXiv 2505.23416), section 3: the maximum over the queries of the repetition and the
    query heads of a group. The text is repeated chunk by chunk; a chunk's softmax runs over its own entries, the sinks
    and the tokens repeated so far. With `normalised`, KVzip+ (Jegou and Jeblick 2026, arXiv 2601.07891): each
    query's attention is divided by the norm of its hidden state and multiplied by that of the value behind the output
    projection. Deviations: the chat template before the text is repeated and judged with it, where the authors keep it
    whole and kvpress drops it first; scores are float32, where half precision would make many of them tie.

    Attributes:
        chunk: how many tokens are repeated at once.
        sinks: how many of the first entries stay, and take part in every chunk's softmax.
        normalised: weigh attention by what it moves.
    """

    chunk: int = 2048
    sinks: int = 4
    normalised: bool = False
    name: ClassVar[str] = "kvzip"

    def __post_init__(self) -> None:
        require(self.chunk >= 1, "chunk >= 1", f"chunk={self.chunk}", "2048 is the paper's")
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "0 keeps none by structure")

    @property
    def second_pass(self) -> SecondPass:
        """How the text is repeated."""
        return SecondPass(self.chunk, self.sinks, self.normalised)

    def needs(self) -> Needs:
        """The second pass."""
        return Needs(second_passes=frozenset({self.second_pass}))

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The sinks."""
        return self.sinks, 0

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`."""
        return observation.repeated_attention(self.second_pass).masked_fill(~observation.valid, 0)
