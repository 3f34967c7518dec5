"""What a policy may see of a layer: the entries that it holds, and the queries that may judge them.

The first prompt is the case in which every cell holds every position. Later pieces of text meet cells that hold
different entries already, so positions and validity are given for each cell; a policy that uses them serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.calibrated import LayerStatistics
from kvkeep.errors import PolicyError

# Attention rows are computed in blocks of at most this many probabilities, so that no L x L matrix ever exists. Blocks
# are small on a CPU: fresh memory for a large one costs more than what is computed in it.
_BLOCK_ELEMENTS = 2**21
_BLOCK_ELEMENTS_ON_DEVICES = 2**23

# Sums over queries are taken in pieces of so many, counted from the last one: what a window of 32 has summed up, one of
# 64 need not do again, and the result does not depend on who asked first.
_PIECE = 32


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


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one layer, as the model itself computes it.

    Attributes:
        cos_sin: maps positions `[..., N]` to cosine and sine `[..., N, R]`, R <= D the rotated size.
        apply: rotates `x [B, H, N, D]` by cosine and sine `[B, N, R]`.
    """

    cos_sin: Callable[[Tensor], tuple[Tensor, Tensor]]
    apply: Callable[[Tensor, Tensor, Tensor], Tensor]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x [B, H, N, D]` to `positions [B, N]`."""
        return self.apply(x, *self.cos_sin(positions))

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotation of `x [B, H, N, D]` at `positions [B, N]`, scaled variants (yarn) included."""
        cos, sin = self.cos_sin(positions)
        rotated = self.apply(x, cos, -sin)
        scale = (cos.square() + sin.square())[:, None].to(x.dtype)  # [B, 1, N, R]
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return rotated / scale
        return torch.cat([rotated[..., :size] / scale, rotated[..., size:]], dim=-1)

    def mean_rotation(self, positions: Tensor, head_size: int) -> Tensor:
        """The matrix `[D, D]` that rotates a column vector by the average over `positions [N]`.

        A rotation is linear in its cosine and sine, so the average rotation is the rotation by their averages.
        """
        cos, sin = self.cos_sin(positions[None])
        identity = torch.eye(head_size, dtype=cos.dtype, device=cos.device)[None, None]
        mean_cos = cos.mean(1, keepdim=True).expand(1, head_size, -1)
        mean_sin = sin.mean(1, keepdim=True).expand(1, head_size, -1)
        return self.apply(identity, mean_cos, mean_sin)[0, 0].T


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
    _memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

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
            start = max(first, end - _PIECE)
            piece: Tensor | None = self._memo.get(f"sum {start} {end}")
            if piece is None:
                piece = self._attention_from(start, end)
                self._memo[f"sum {start} {end}"] = piece
            total += piece
        return total.div_(window * self.group)

    def accumulated_attention(self) -> Tensor:
        """Attention received from all queries of the text: sum over queries, mean over the group, `[B, H_kv, N]`."""
        total: Tensor | None = self._memo.get("accumulated")
        if total is None:
            total = self._attention_from(0, self.queries.shape[2]).div_(self.group)
            self._memo["accumulated"] = total
        return total

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
        try:
            return self.second_passes[second_pass]
        except KeyError:
            raise PolicyError(
                expected="a policy whose `needs` declares its second pass",
                received=f"a use of {second_pass} in layer {self.layer}, where {len(self.second_passes)} others are",
                remedy="return Needs(second_passes=frozenset({SecondPass(...)})) with the very same options",
            ) from None

    def calibrated(self, place: str) -> LayerStatistics:
        """What a calibration knows of the layer.

        Args:
            place: one that the policy declares in its `needs`.

        Raises:
            PolicyError: it was not declared.
        """
        try:
            return self.statistics[place]
        except KeyError:
            raise PolicyError(
                expected="a policy whose `needs` declares its statistics",
                received=f"a use of {place!r} in layer {self.layer}, where {len(self.statistics)} others are",
                remedy="return Needs(statistics=frozenset({...})) with the very same place",
            ) from None

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

    def _float(self, name: str) -> Tensor:
        # Norms and dot products are taken in float32: squares of a half-precision key overflow.
        if name not in self._memo:
            self._memo[name] = getattr(self, name).float()
        tensor: Tensor = self._memo[name]
        return tensor

    def _heads_agree(self) -> bool:
        """Whether all cells of a row hold the same positions, as after a first prompt."""
        agree: bool | None = self._memo.get("heads agree")
        if agree is None:
            agree = bool(self.valid.all()) and bool((self.positions == self.positions[:, :1]).all())
            self._memo["heads agree"] = agree
        return agree

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
        """Yield attention probabilities `[B, H_kv, G, q, N]` of the queries `start` to `end`, block by block.

        All blocks use the same memory: each is valid until the next is asked for. No gradient flows through them.
        """
        batch, heads, count, size = self.queries.shape
        kv_heads, held = self.keys.shape[1], self.keys.shape[2]
        end = count if end is None else end
        keys = self._float("keys").detach().transpose(2, 3)
        open_columns = self._open_columns(start)
        positions, missing = self.positions[:, :, None, open_columns:], ~self.valid[:, :, None, open_columns:]
        on_cpu = keys.device.type == "cpu"
        elements = _BLOCK_ELEMENTS if on_cpu else _BLOCK_ELEMENTS_ON_DEVICES
        block = max(1, min(end - start, elements // (batch * heads * held)))
        memory = keys.new_empty(batch * heads * block * held)
        for first in range(start, end, block):
            last = min(first + block, end)
            # The few queries are scaled, not their many products.
            queries = self.queries[:, :, first:last].detach().float() * self.scaling
            grouped = queries.reshape(batch, kv_heads, self.group * (last - first), size)
            logits = memory[: batch * heads * (last - first) * held].view(batch, kv_heads, -1, held)
            for row in range(batch):  # all at once, a product would copy keys that do not lie side by side
                torch.bmm(grouped[row], keys[row], out=logits[row])
            logits = logits.view(batch, kv_heads, self.group, last - first, held)
            at = self.query_positions[:, None, first:last, None]
            hidden = (positions > at) | missing  # [B, H_kv, q, n]
            logits[..., open_columns:].masked_fill_(hidden[:, :, None], -math.inf)
            # In place where fresh memory is what costs; elsewhere it is not promised to work.
            attention = torch.softmax(logits, -1, out=logits) if on_cpu else logits.softmax(-1)
            if not open_columns:
                blind = hidden.all(-1)  # queries of an earlier chunk: nothing of what they saw is left
                if not on_cpu or bool(blind.any()):
                    attention.masked_fill_(blind[:, :, None, :, None], 0)
            yield attention

    def _open_columns(self, first: int) -> int:
        """From which column on an entry may be hidden from one of the queries `first` and later.

        All earlier columns are seen by all of them, so that masks need not cover the whole text.
        """
        earliest = self.query_positions[:, first:].amin(1)[:, None, None]
        hidden = ((self.positions > earliest) | ~self.valid).flatten(0, 1).any(0)
        return int(hidden.int().argmax()) if bool(hidden.any()) else hidden.shape[0]


def smooth(scores: Tensor, kernel: int, pool: str = "avg", valid: Tensor | None = None) -> Tensor:
    """Pool scores `[B, H_kv, N]` over `kernel` neighbours, the window centred, edges padded with zeros.

    Args:
        scores: what to pool, over the last dimension; zero or positive.
        kernel: width of the window, odd.
        pool: `avg` or `max`.
        valid: `[B, H_kv, N]` which entries are held: neighbours are then the nearest ones that the cell holds, however
            many missing ones lie between. How many there are depends on the other cells, and must not matter.

    Returns:
        `[B, H_kv, N]`, zero where `valid` is false.
    """
    if kernel <= 1:
        return scores
    if valid is not None and not bool(valid.all()):
        held_first = (~valid).long().argsort(dim=-1, stable=True)
        packed = scores.masked_fill(~valid, 0).gather(-1, held_first)
        pooled = torch.empty_like(packed).scatter_(-1, held_first, smooth(packed, kernel, pool))
        return pooled.masked_fill(~valid, 0)
    if pool == "max":
        return torch.nn.functional.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    return torch.nn.functional.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)
