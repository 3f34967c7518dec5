"""Products of queries and keys in blocks, for sums over one of the two that never hold them all.

Query heads that share a KV head lie side by side, so that a block is one matrix product for each KV head. Block i of
the queries and block j of the keys cover the same positions where i = j; only those blocks are cut by the causal mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvkeep.learn.config import LearnError

_BLOCK = 256  # on a CPU: a block of float32 products of three heads stays in the cache of a core
_BLOCK_ON_DEVICES = 2048


def block_size(device: torch.device) -> int:
    """Positions to compute at once where nobody says."""
    return _BLOCK if device.type == "cpu" else _BLOCK_ON_DEVICES


class Grouped:
    """Queries and keys of the same S positions, cut into blocks.

    Args:
        queries: `[B, H, S, D]`.
        keys: `[B, H_kv, S, D]`.
        bias: `[B, H, S]`, taken off the products of each query; None is none.
        scaling: factor on the products.
        block: positions of a block.
        evicted: `[B, H_kv, S]`: the position from which on no query sees a key.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        bias: Tensor | None,
        scaling: float,
        block: int,
        evicted: Tensor | None = None,
    ) -> None:
        batch, heads, length, size = queries.shape
        kv_heads = keys.shape[1]
        self.dtype = self.dtype_of(queries)
        self.device = queries.device
        self.group = heads // kv_heads
        self.length = length
        self.block = max(1, min(block, length))
        self.blocks = math.ceil(length / self.block)
        self.shape = (batch * kv_heads, self.group, length)
        self.scaling = scaling
        self._queries = queries.reshape(batch * kv_heads, self.group, length, size)
        self._keys = keys.reshape(batch * kv_heads, length, size)
        self._bias = None if bias is None else bias.reshape(self.shape)
        self._evicted = None if evicted is None else evicted.reshape(batch * kv_heads, length)
        self._last_seen = self._last_positions()
        self._part: tuple[int, Tensor, Tensor | None] | None = None

    @staticmethod
    def dtype_of(queries: Tensor) -> torch.dtype:
        """What products of these are computed in."""
        return torch.float64 if queries.dtype == torch.float64 else torch.float32

    def span(self, index: int) -> slice:
        """The positions of a block."""
        return slice(index * self.block, min((index + 1) * self.block, self.length))

    def first_block(self, part: int, look_ahead: int | None) -> int:
        """The first block of keys that queries of block `part` see with `t >= d - L`."""
        return 0 if look_ahead is None else max(0, (part * self.block - look_ahead) // self.block)

    def last_block(self, own: int, look_ahead: int | None) -> int:
        """The last block of queries that keys of block `own` meet with `d <= t + L`."""
        last = self.blocks - 1
        return last if look_ahead is None else min(last, (self.span(own).stop - 1 + look_ahead) // self.block)

    def is_unseen(self, own: int, part: int) -> bool:
        """Whether all keys of block `own` are evicted before the queries of block `part` come."""
        return self._last_seen is not None and self._last_seen[own] <= part * self.block

    def logits(self, part: int, own: int, look_ahead: int | None = None) -> Tensor:
        """`l(d, t)` less the bias of d; `-inf` where `d < t`, `d > t + L`, or the key is evicted.

        Args:
            part: block of queries.
            own: block of keys.
            look_ahead: L; None is without end.

        Returns:
            `[B H_kv, t, G, d]`, which may be written to.
        """
        queries, bias = self._queries_of(part)
        keys = self._keys[:, self.span(own)].to(self.dtype)
        shape = (keys.shape[0], keys.shape[1], queries.shape[-1])
        if bias is None:
            products = torch.empty(shape, dtype=self.dtype, device=self.device)
            products = torch.baddbmm(products, keys, queries, beta=0, alpha=self.scaling)
        else:
            products = torch.baddbmm(bias.expand(shape), keys, queries, alpha=self.scaling)
        logits = products.reshape(*shape[:2], self.group, -1)
        hidden = self._hidden(part, own, look_ahead)
        return logits if hidden is None else logits.masked_fill_(hidden, -math.inf)

    def _queries_of(self, part: int) -> tuple[Tensor, Tensor | None]:
        """A block's queries `[B H_kv, D, G d]` and bias `[B H_kv, 1, G d]`; the last ones stay at hand."""
        if self._part is None or self._part[0] != part:
            span = self.span(part)
            queries = self._queries[:, :, span].to(self.dtype).flatten(1, 2).transpose(1, 2)
            bias = None if self._bias is None else -self._bias[:, :, span].to(self.dtype).flatten(1).unsqueeze(1)
            self._part = part, queries, bias
        return self._part[1], self._part[2]

    def _hidden(self, part: int, own: int, look_ahead: int | None) -> Tensor | None:
        """What is masked, as it broadcasts to `[B H_kv, t, G, d]`; None where nothing is."""
        at_query, at_key = self.span(part), self.span(own)
        positions = torch.arange(at_query.start, at_query.stop, device=self.device)
        keys = torch.arange(at_key.start, at_key.stop, device=self.device)[:, None, None]
        hidden = None
        if part == own:
            hidden = positions < keys
        if look_ahead is not None and at_query.stop - 1 > at_key.start + look_ahead:
            late = positions > keys + look_ahead
            hidden = late if hidden is None else hidden | late
        if self._evicted is not None:
            gone = positions >= self._evicted[:, at_key, None, None]
            hidden = gone if hidden is None else hidden | gone
        return hidden

    def _last_positions(self) -> list[int] | None:
        """For each block of keys, the first position from which on none of them is seen."""
        if self._evicted is None:
            return None
        return [int(self._evicted[:, self.span(index)].amax()) for index in range(self.blocks)]


def check_shapes(queries: Tensor, keys: Tensor, lse: Tensor | None = None, evicted: Tensor | None = None) -> None:
    """Refuse what does not fit together.

    Raises:
        LearnError: with all shapes.
    """
    shapes = {"queries": queries, "keys": keys, "lse": lse, "evicted": evicted}
    told = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shapes.items() if tensor is not None)
    if queries.dim() != 4 or keys.dim() != 4:
        fits = False
    else:
        batch, heads, length, size = queries.shape
        kv_heads = keys.shape[1]
        fits = (
            keys.shape == (batch, kv_heads, length, size)
            and kv_heads > 0
            and heads % kv_heads == 0
            and (lse is None or lse.shape == (batch, heads, length))
            and (evicted is None or evicted.shape == (batch, kv_heads, length))
        )
    if not fits:
        raise LearnError(
            expected="queries [B, H, S, D], keys [B, H_kv, S, D] with H_kv a divisor of H, lse [B, H, S], "
            "evicted [B, H_kv, S]",
            received=told,
            remedy="pass the tensors of one layer, of the same positions",
        )
