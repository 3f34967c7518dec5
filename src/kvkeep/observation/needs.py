"""What a policy may ask the adapter for, beyond keys and values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SecondPass:
    """A second reading: when a text has ended, the model is made to repeat it, and looks back at what is held.

    Kim et al. 2025 (KVzip, arXiv 2505.23416), section 3: what the model looks at while it repeats a text is what the
    text can be rebuilt from, whatever will be asked.

    Attributes:
        chunk: tokens that are repeated at once. Their queries judge the entries of the same tokens.
        sinks: first positions that take part in the softmax of every later chunk.
        normalised: weigh attention by what it moves, `|W_O v| / |h|`: the entry's value behind the output projection,
            over the hidden state that the query was made of.
    """

    chunk: int = 2048
    sinks: int = 4
    normalised: bool = False


@dataclass(frozen=True)
class Needs:
    """What a policy asks of the adapter beyond keys and values; the adapter gathers only that.

    Attributes:
        queries: how many of the last queries, `None` for the queries of the whole text.
        rotary: the rotation of the layer's positions, to undo it or to apply another.
        output_weight: the slice of the output projection that belongs to each query head.
        second_passes: ways in which the model must repeat the text. They cost about as much as reading it once or
            twice more, and the cache is held in full until they are done.
        statistics: places of what `kvkeep calibrate` found out about the model: `model`, or paths of files.
    """

    queries: int | None = 0
    rotary: bool = False
    output_weight: bool = False
    second_passes: frozenset[SecondPass] = frozenset()
    statistics: frozenset[str] = frozenset()

    @property
    def whole_text(self) -> bool:
        """Whether the choice depends on the text to its end, so that no part of it can be cut before."""
        return self.queries is None or bool(self.second_passes)

    def __or__(self, other: Needs) -> Needs:
        queries = None if self.queries is None or other.queries is None else max(self.queries, other.queries)
        return Needs(
            queries,
            self.rotary or other.rotary,
            self.output_weight or other.output_weight,
            self.second_passes | other.second_passes,
            self.statistics | other.statistics,
        )
