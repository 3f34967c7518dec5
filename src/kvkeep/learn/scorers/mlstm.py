"""Scores an entry when it leaves the window, by a memory that has read on until then."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, silu

from kvkeep.learn.config import KVpopConfig, ModelShape
from kvkeep.learn.scorers import recurrence
from kvkeep.learn.scorers.base import CellScorer, part
from kvkeep.policies.online import State

STATE = ("memory", "norm", "exponent")  # C, z, m
CHUNK = 64  # tokens that are computed at once where there are many


class MLSTMScorer(CellScorer):
    """An mLSTM of one head for each cell, without output gate; it reads entry `u = q - w` when it has taken in q.

    KVpop (arXiv 2607.05061), section 3 and equations 38 to 42: q, k and v are linear maps of the inputs, q and k behind
    a softmax feature map; the gates are scalars; `score = a^T SiLU(h) + b`. The delay is no more than a shift: at q the
    memory is asked with the query of `q - w`.

    Left out: the norm of h, which the paper calls optional (h is a weighted mean of v and cannot grow). Begins with q
    and k like the first numbers of the key and v like those of the value, gates that take everything in alike and
    forget slowly (biases from 3 to 6 over the heads of a layer; the paper gives none), and a last layer of zero.

    The state, in the type of the parameters: `memory [B, C, F, P]`, `norm [B, C, F]`, `exponent [B, C]`.
    """

    def __init__(self, config: KVpopConfig, shape: ModelShape) -> None:
        super().__init__(config, shape)
        width, size = config.inner_width(shape.head_size), self.size
        self.width = width
        self.features = config.feature_size(shape.head_size)
        self.query_weight = nn.Parameter(torch.eye(size, width).repeat(shape.cells, 1, 1))
        likeness = torch.cat([torch.eye(size, width), torch.eye(size, width).roll(size - shape.head_size, 0)], dim=1)
        self.memory_weight = nn.Parameter(likeness.repeat(shape.cells, 1, 1))  # of k and v
        self.gate_weight = nn.Parameter(torch.zeros(shape.cells, size, 2))  # input, forget
        forget = torch.linspace(3, 6, shape.kv_heads).repeat(shape.layers)
        self.gate_bias = nn.Parameter(torch.stack([torch.zeros(shape.cells), forget], dim=-1))
        self.out_weight = nn.Parameter(torch.zeros(shape.cells, width))
        self.out_bias = nn.Parameter(torch.zeros(shape.cells))
        self.skip_weight = nn.Parameter(torch.zeros(shape.cells, size)) if config.skip else None

    def start(self, batch: int, cells: slice | None = None, device: torch.device | None = None) -> State:
        """See `CellScorer.start`."""
        like = part(self.out_bias, cells)
        memory = recurrence.start((batch, len(like)), self.features, self.width, like.dtype, device or like.device)
        return dict(zip(STATE, memory, strict=True))

    def forward(self, x: Tensor, cells: slice | None = None, valid: Tensor | None = None) -> Tensor:
        """See `CellScorer.forward`."""
        count = x.shape[2] - self.config.protected_window
        if count <= 0:
            return self.normal(x[:, :, :0], cells)[..., 0]
        x = self.normal(x, cells)
        read = x if self.config.delayed else x[:, :, :count]  # without delay later tokens change nothing
        queries = pad(self._queries(x[:, :, :count], cells), (0, 0, self.config.delay, 0))  # the shift
        h, _ = self._recall(queries, read, self.start(x.shape[0], cells), cells, valid)
        return self._score(h[:, :, self.config.delay :], x[:, :, :count], cells)

    def advance(
        self, new: Tensor, leaving: Tensor, state: State, cells: slice | None = None, valid: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """See `CellScorer.advance`.

        Without delay `leaving` must be `new`: the score is that of the token that comes.
        """
        new, leaving = self.normal(new, cells), self.normal(leaving, cells)
        earlier = new.shape[2] - leaving.shape[2]
        queries = pad(self._queries(leaving, cells), (0, 0, earlier, 0))
        h, after = self._recall(queries, new, state, cells, valid)
        return self._score(h[:, :, earlier:], leaving, cells), after

    def _queries(self, x: Tensor, cells: slice | None) -> Tensor:
        return self._feature(torch.einsum("bcti,cip->bctp", x, part(self.query_weight, cells)))

    def _recall(
        self, queries: Tensor, x: Tensor, state: State, cells: slice | None, valid: Tensor | None
    ) -> tuple[Tensor, State]:
        """Take in `x [B, C, T, I]` and answer `queries [B, C, T, F]`, each behind its token: `[B, C, T, P]`."""
        keys, values = torch.einsum("bcti,cip->bctp", x, part(self.memory_weight, cells)).chunk(2, dim=-1)
        keys = self._feature(keys)
        raw = torch.einsum("bcti,cig->bctg", x, part(self.gate_weight, cells)) + part(self.gate_bias, cells)[:, None]
        if (cap := self.config.gate_cap) is not None:
            raw = cap * torch.tanh(raw / cap)
        gate, log_forget = raw[..., 0], logsigmoid(raw[..., 1])
        if valid is not None:
            gate = torch.where(valid[:, None, : gate.shape[-1]], gate, -torch.inf)
            log_forget = torch.where(valid[:, None, : gate.shape[-1]], log_forget, 0.0)
        memory = state["memory"], state["norm"], state["exponent"]
        if x.shape[2] == 1:
            gates = gate[..., 0], log_forget[..., 0]
            h, memory = recurrence.step(queries[:, :, 0], keys[:, :, 0], values[:, :, 0], *gates, memory)
            h = h.unsqueeze(2)
        else:
            h, memory = recurrence.chunkwise(queries, keys, values, gate, log_forget, memory, CHUNK)
        return h, dict(zip(STATE, memory, strict=True))

    def _feature(self, x: Tensor) -> Tensor:
        if self.config.feature == "softmax":
            return x.softmax(-1)
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)

    def _score(self, h: Tensor, x: Tensor, cells: slice | None) -> Tensor:
        score = torch.einsum("bctp,cp->bct", silu(h), part(self.out_weight, cells))
        if self.skip_weight is not None:
            score = score + torch.einsum("bcti,ci->bct", x, part(self.skip_weight, cells))
        return score + part(self.out_bias, cells)[:, None]
