"""One layer as a policy sees it, and summaries of its attention, each computed once.

The first prompt is the case in which every cell holds every position. Later pieces of text meet cells that hold
different entries already, so positions and validity are given for each cell; a policy that uses them serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvkeep.calibrated import LayerStatistics
from kvkeep.errors import PolicyError
from kvkeep.observation.attention import attention_blocks
from kvkeep.observation.needs import SecondPass
from kvkeep.observation.rotary import Rotary

# Sums over queries are taken in pieces of so many, counted from the last one: what a window of 32 has summed up, one of
# 64 need not do again, and the result does not depend on who asked first.
_PIECE = 32

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Observation:
    """One layer's held entries and the queries that may judge them.

    All rows of an observation have the same logical length and the same budget; the adapter gives rows of different
    length one by one, without their padding.

    Attributes:
        queries: `[B, H, Q, D]` the last queries that were asked for, after rotation.
        query_positions: `[B, Q]` their logical positions.
        keys: `[B, H_kv, N, D]` held keys, after rotation, in ascending order of position.
        values: `[B, H_kv, N, D]` held values.
        positions: `[B, H_kv, N]` int64 logical positions of the held entries.
        valid: `[B, H_kv, N]` false where a cell holds fewer than N entries.
        scaling: factor on the dot products.
        length: tokens seen so far, by row; the logical length L.
        budget: entries that a cell may keep on average.
        layer: index of the layer in the model, for messages.
        ordinal: which of the `layers` evictable layers this is, from 0.
        layers: number of evictable layers that share the budget.
        question: `(start, end)` positions of the question where it is visible, else None.
        protected: `[B, H_kv, N]` entries that stay whatever the scores say.
        protected_positions: how many positions the caller protects, held or not, so that all layers reckon with the
            same number; None: as many as the cell that holds most of them.
        rotary: the layer's rotary embedding, if it was asked for.
        output_weight: `[H, hidden, D]` output projection of each query head, if it was asked for.
        second_passes: what each second pass that was asked for has given, `[B, H_kv, N]` float32; see
            `repeated_attention`.
        statistics: what a calibration knows of the layer, by place, if it was asked for; see `calibrated`.
    """

    queries: Tensor
    query_positions: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    valid: Tensor
    scaling: float
    length: int
    budget: int
    layer: int = 0
    ordinal: int = 0
    layers: int = 1
    question: tuple[int, int] | None = None
    protected: Tensor | None = None
    protected_positions: int | None = None
    rotary: Rotary | None = None
    output_weight: Tensor | None = None
    second_passes: Mapping[SecondPass, Tensor] = field(default_factory=dict)
    statistics: Mapping[str, LayerStatistics] = field(default_factory=dict)
    # Not an argument: an observation that `replace` makes from other tensors must not inherit these summaries.
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per KV head, G."""
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def held(self) -> Tensor:
        """`[B, H_kv]` number of valid entries of each cell."""
        return self.valid.sum(-1)

    def with_protected(self, protected: Tensor) -> Observation:
        """The same observation (its summaries are shared) with entries marked as protected."""
        return self.for_cut(protected=protected)

    def for_cut(self, **changes: Any) -> Observation:
        """The same entries and queries (their summaries are shared) for another cut: other `budget`, `ordinal`,
        `layers`, `question`, `protected` or `protected_positions`, on which no summary depends."""
        same = replace(self, **changes)
        object.__setattr__(same, "_memo", self._memo)
        return same

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What `compute` gives, the first time; what it gave then, at every later cut of the same entries.

        Args:
            key: names it. A policy takes itself, which equals another one with the same options, or a tuple that begins
                with its class; bare texts are the observation's own.
            compute: must look at nothing that `for_cut` changes, and nobody may write to what it returns.
        """
        if key not in self._memo:
            self._memo[key] = compute()
        found: T = self._memo[key]
        return found

    def protected_or_none(self) -> Tensor:
        """`[B, H_kv, N]` the protected entries; all false where nothing is protected."""
        return torch.zeros_like(self.valid) if self.protected is None else self.protected

    def recent(self, window: int) -> Tensor:
        """`[B, H_kv, N]` true for entries among the last `window` positions of the text."""
        return self.valid & (self.positions >= self.length - window)

    def zeros(self) -> Tensor:
        """A float32 tensor of zeros in the shape of scores, `[B, H_kv, N]`."""
        return torch.zeros(self.positions.shape, dtype=torch.float32, device=self.keys.device)

    def attention_rows(self, window: int) -> Tensor:
        """Causal attention of the last `window` queries, averaged over the query heads of each group.

        Returns:
            `[B, H_kv, W, N]` float32; each row sums to one over the valid entries, or is zero where the query came
            before all of them. W is `window`, or the number of queries if there are fewer (a short text, a short later
            piece). Computed once and shared by all callers.

        Raises:
            PolicyError: the policy uses queries and declared none in `needs`.
        """
        window = self._queries_of(window)
        rows: Tensor | None = self._memo.get("rows")
        if rows is None or rows.shape[2] < window:
            first = self.queries.shape[2] - window
            rows = torch.cat([block.mean(2) for block in self._probabilities(first)], dim=2)  # mean over the group
            self._memo["rows"] = rows
        return rows[:, :, rows.shape[2] - window :]

    def window_attention(self, window: int) -> Tensor:
        """Attention received from the last `window` queries: mean over queries and group, `[B, H_kv, N]` float32.

        The same as `attention_rows(window).mean(2)`, without the rows.
        """
        window = self._queries_of(window)
        total, last = self.zeros(), self.queries.shape[2]
        first = last - window
        for end in range(last, first, -_PIECE):
            piece = max(first, end - _PIECE), end
            total += self.once(("sum", piece), partial(self._attention_from, *piece))
        return total.div_(window * self.group)

    def accumulated_attention(self) -> Tensor:
        """Attention received from all queries of the text: sum over queries, mean over the group, `[B, H_kv, N]`."""
        queries = self.queries.shape[2]
        return self.once("accumulated", lambda: self._attention_from(0, queries).div_(self.group))

    def attention_peaks(self, weights: Tensor | None = None) -> Tensor:
        """The most attention that each entry receives from one query, by query head: `[B, H_kv, G, N]` float32.

        Args:
            weights: `[B, Q]` factors on the attention of each query, not negative; None for ones.
        """
        peaks: Tensor | None = None
        first = 0
        for block in self._probabilities(0):
            last = first + block.shape[3]
            if weights is not None:
                block.mul_(weights[:, None, None, first:last, None])
            best = block.amax(3)
            peaks, first = best if peaks is None else torch.maximum(peaks, best), last
        if peaks is None:
            self._queries_of(1)  # says what is missing
            raise RuntimeError("queries without attention")
        return peaks

    def repeated_attention(self, second_pass: SecondPass) -> Tensor:
        """The most attention that an entry received while the model repeated the text: `[B, H_kv, N]` float32.

        The maximum over the query heads of a group and the queries of the entry's chunk, of a softmax over the chunk,
        the sinks, and what was repeated so far.

        Args:
            second_pass: one that the policy declares in its `needs`.

        Raises:
            PolicyError: it was not declared.
        """
        remedy = "return Needs(second_passes=frozenset({SecondPass(...)})) with the very same options"
        return self._declared(self.second_passes, second_pass, "second pass", remedy)

    def calibrated(self, place: str) -> LayerStatistics:
        """What a calibration knows of the layer.

        Args:
            place: one that the policy declares in its `needs`.

        Raises:
            PolicyError: it was not declared.
        """
        remedy = "return Needs(statistics=frozenset({...})) with the very same place"
        return self._declared(self.statistics, place, "statistics", remedy)

    def pool_heads(self, summary: Tensor, how: str = "mean") -> Tensor:
        """One value for all heads of a layer, given back to each cell that holds the position.

        Args:
            summary: `[B, H_kv, N]` float32, zero or positive (attention and the like).
            how: `mean` over the KV heads (a head that no longer holds the position counts as zero) or `max`.

        Returns:
            `[B, H_kv, N]` float32, zero where a cell holds no entry.
        """
        if self._heads_agree():
            pooled = summary.mean(1, keepdim=True) if how == "mean" else summary.amax(1, keepdim=True)
            return pooled.expand_as(summary)
        batch, heads, _ = summary.shape
        index = self.positions.masked_fill(~self.valid, 0)
        spread = summary.new_zeros(batch, heads, self.length)
        spread.scatter_add_(2, index, summary.masked_fill(~self.valid, 0))
        pooled = spread.mean(1, keepdim=True) if how == "mean" else spread.amax(1, keepdim=True)
        return pooled.expand(-1, heads, -1).gather(2, index).masked_fill(~self.valid, 0)

    def key_norms(self) -> Tensor:
        """Euclidean norms of the keys, `[B, H_kv, N]` float32."""
        norms: Tensor = torch.linalg.vector_norm(self._float("keys"), dim=-1)
        return norms

    def value_norms(self) -> Tensor:
        """Euclidean norms of the values, `[B, H_kv, N]` float32."""
        norms: Tensor = torch.linalg.vector_norm(self._float("values"), dim=-1)
        return norms

    def _declared(self, given: Mapping[Any, T], key: object, what: str, remedy: str) -> T:
        """What the adapter gathered, since the policy had asked for it."""
        try:
            return given[key]
        except KeyError:
            raise PolicyError(
                expected=f"a policy whose `needs` declares its {what}",
                received=f"a use of {key!r} in layer {self.layer}, where {len(given)} others are",
                remedy=remedy,
            ) from None

    def _float(self, name: str) -> Tensor:
        # Norms and dot products are taken in float32: squares of a half-precision key overflow.
        tensor: Tensor = getattr(self, name)
        return self.once(f"{name} in float32", tensor.float)

    def _heads_agree(self) -> bool:
        """Whether all cells of a row hold the same positions, as after a first prompt."""
        return self.once(
            "heads agree",
            lambda: bool(self.valid.all()) and bool((self.positions == self.positions[:, :1]).all()),
        )

    def _queries_of(self, window: int) -> int:
        """How many queries a window has, at most those that are there."""
        have = self.queries.shape[2]
        if have == 0:
            raise PolicyError(
                expected="a policy whose `needs` declares the queries that it uses",
                received=f"a window of {window} without any query in layer {self.layer}",
                remedy="return Needs(queries=...) with the largest window that `score` uses",
            )
        return min(window, have)

    def _attention_from(self, start: int, end: int) -> Tensor:
        """Attention of the queries `start` to `end`: sum over queries and group, `[B, H_kv, N]` float32."""
        total = self.zeros()
        for block in self._probabilities(start, end):
            total += block.flatten(2, 3).sum(2)
        return total

    def _probabilities(self, start: int, end: int | None = None) -> Iterator[Tensor]:
        """Attention `[B, H_kv, G, q, N]` of the queries `start` to `end`, block by block; see `attention_blocks`."""
        return attention_blocks(
            self.queries[:, :, start:end],
            self.query_positions[:, start:end],
            self._float("keys"),
            self.positions,
            self.valid,
            self.scaling,
        )
