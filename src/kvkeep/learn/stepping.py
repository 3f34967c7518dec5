"""One token through the scorers of a layer, in as few operations as there can be: what a decode step pays.

The same numbers as `CellScorer.advance`, which is what the tests compare with. Standardisation is folded into the
weights, all linear maps of an entry are one product, and the memory's norm z stands as one more column of C.

Shapes: `B` rows, `C` cells of the layer, `D` head size, `I` inputs, `P` width, `F` features.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from kvkeep.learn.scorers import CellScorer, MLPScorer, MLSTMScorer
from kvkeep.policies.online import State

_HARMLESS_CAP = 20.0  # sums of e^20 over any text are far below the largest float32


class Stepper(Protocol):
    """One layer's scorer in a cache."""

    def start(self, batch: int, device: torch.device) -> State:
        """The state before the first token, `[B, ...]` each."""
        ...

    def step(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """Take in one token and score the one that leaves the window, if there is one.

        Args:
            new: `[B, C, 1, I]`.
            leaving: `[B, C, m, I]`, m of 0 or 1.
            state: behind the token before.

        Returns:
            `[B, C, m]`, and the state behind the token.
        """
        ...

    def read(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """The same for any number of tokens, as `CellScorer.advance`."""
        ...


class PlainStepper:
    """A scorer as it is."""

    def __init__(self, scorer: CellScorer, cells: slice) -> None:
        self._scorer, self._cells = scorer, cells

    def start(self, batch: int, device: torch.device) -> State:
        """See `Stepper.start`."""
        return self._scorer.start(batch, self._cells, device)

    def step(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.step`."""
        return self.read(new, leaving, state)

    def read(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.read`."""
        return self._scorer.advance(new, leaving, state, self._cells)


class MLPStepper(PlainStepper):
    """`a^T SiLU(W x + c) + b`, standardisation folded in."""

    def __init__(self, scorer: MLPScorer, cells: slice) -> None:
        super().__init__(scorer, cells)
        self._weight, self._bias = _folded(scorer, scorer.hidden_weight[cells], scorer.hidden_bias[cells], cells)
        self._out = scorer.out_weight.detach()[cells, :, None]
        self._out_bias = scorer.out_bias.detach()[cells, None, None]

    def step(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.step`."""
        hidden = silu(torch.matmul(leaving.to(self._weight.dtype), self._weight).add_(self._bias))
        return (hidden @ self._out).add_(self._out_bias).squeeze(-1), state


class MLSTMStepper(PlainStepper):
    """The mLSTM's step. The state: `memory [B, C, F, P + 1]`, C and in the last column z; `exponent [B, C, 1]`.

    C and z are over `e^m`. Where gates are capped nothing can grow beyond float32, and m is always 0.
    """

    def __init__(self, scorer: MLSTMScorer, cells: slice) -> None:
        super().__init__(scorer, cells)
        width, cap = scorer.width, scorer.config.gate_cap
        self._width, self._cap, self._parts = width, cap, 1 if scorer.config.feature == "softmax" else 2
        self._bounded = cap is not None and cap <= _HARMLESS_CAP
        query, memory = scorer.query_weight[cells], scorer.memory_weight[cells]
        # The signs that the feature map takes stand in the weights: q, -q, k, -k.
        signed = [(query, -query)[: self._parts], (memory[..., :width], -memory[..., :width])[: self._parts]]
        nothing = torch.zeros_like(memory[..., :1])  # of a column that is always 1, for z
        gates = scorer.gate_weight[cells] / (cap or 1.0)
        skip = nothing if scorer.skip_weight is None else scorer.skip_weight[cells][..., None]
        weight = torch.cat([*signed[0], *signed[1], memory[..., width:], nothing, gates, skip], dim=-1)
        self._features = 2 * self._parts * width
        behind = self._features + width
        self._value = slice(self._features, behind + 1)
        self._gates = slice(behind + 1, behind + 3)
        bias = torch.zeros_like(weight[:, 0])
        bias[:, behind] = 1
        bias[:, self._gates] = scorer.gate_bias[cells] / (cap or 1.0)
        bias[:, -1] = scorer.out_bias[cells]
        self._weight, self._bias = _folded(scorer, weight, bias, cells)
        self._out = scorer.out_weight.detach()[cells, :, None]
        self._tiny = torch.finfo(self._out.dtype).tiny

    def start(self, batch: int, device: torch.device) -> State:
        """See `Stepper.start`."""
        return self._joined(super().start(batch, device))

    def read(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.read`."""
        memory = state["memory"]
        apart = {"memory": memory[..., :-1], "norm": memory[..., -1], "exponent": state["exponent"][..., 0]}
        scores, after = super().read(new, leaving, apart)
        return scores, self._joined(after)

    def step(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.step`."""
        x = torch.cat([new, leaving], dim=2).to(self._weight.dtype)
        maps = torch.matmul(x, self._weight).add_(self._bias)  # [B, C, 1 + m, O]
        apart = torch.unflatten(maps[..., : self._features], -1, (2, self._parts, self._width))
        features = apart.softmax(-1).flatten(-2)  # [B, C, 1 + m, 2, F]: of the query, of the key
        gates = maps[:, :, :1, self._gates]
        if self._cap is not None:
            gates = gates.tanh().mul_(self._cap)
        exponent = state["exponent"]
        if self._bounded:
            old, more = gates[..., 1:].sigmoid(), gates[..., :1].exp()
        else:
            kept = logsigmoid(gates[..., 1]).add_(exponent)  # [B, C, 1]
            exponent = torch.maximum(kept, gates[..., 0])
            old, more = (kept - exponent).exp_()[..., None], (gates[..., 0] - exponent).exp_()[..., None]
        key = features[:, :, 0, 1].unsqueeze(-1)  # [B, C, F, 1]
        gain = (key * more) * maps[:, :, :1, self._value]
        memory = torch.addcmul(gain, state["memory"], old)
        after = {"memory": memory, "exponent": exponent}
        if not leaving.shape[2]:
            return maps.new_zeros(leaving.shape[:3]), after
        found = features[:, :, 1:, 0] @ memory  # [B, C, 1, P + 1]
        h = found[..., :-1] / found[..., -1:].clamp_min(self._tiny)
        return (silu(h) @ self._out).add_(maps[:, :, 1:, -1:]).squeeze(-1), after

    def _joined(self, state: State) -> State:
        memory, exponent = torch.cat([state["memory"], state["norm"][..., None]], dim=-1), state["exponent"][..., None]
        if self._bounded:
            return {"memory": memory * exponent[..., None].exp(), "exponent": torch.zeros_like(exponent)}
        return {"memory": memory, "exponent": exponent}


class EarlyStepper:
    """A memory that is read when an entry comes; its score waits until the entry leaves the window.

    The state: that of the memory, and `waiting [B, C, w]`, the scores of the last w tokens.
    """

    def __init__(self, memory: Stepper, window: int) -> None:
        self._memory, self._window = memory, window

    def start(self, batch: int, device: torch.device) -> State:
        """See `Stepper.start`."""
        state = self._memory.start(batch, device)
        like = next(iter(state.values()))
        return {**state, "waiting": like.new_zeros(*like.shape[:2], self._window)}

    def step(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.step`."""
        return self._passed(leaving.shape[2], state, *self._memory.step(new, new, state))

    def read(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.read`."""
        return self._passed(leaving.shape[2], state, *self._memory.read(new, new, state))

    def _passed(self, leaving: int, state: State, scores: Tensor, after: State) -> tuple[Tensor, State]:
        """The scores that were waiting for so many tokens, of which each stands w before one of the last new ones."""
        known, count = torch.cat([state["waiting"], scores], dim=2), scores.shape[2]
        waiting = known[:, :, count:].clone()  # a view would keep the chunk's scores, too
        return known[:, :, count - leaving : count], {**after, "waiting": waiting}


def stepper_of(scorer: CellScorer, cells: slice) -> Stepper:
    """The shortest way that there is for a scorer's layer."""
    with torch.no_grad():
        if isinstance(scorer, MLSTMScorer):
            memory = MLSTMStepper(scorer, cells)
            return memory if scorer.config.delayed else EarlyStepper(memory, scorer.config.protected_window)
        if isinstance(scorer, MLPScorer):
            return MLPStepper(scorer, cells)
    return PlainStepper(scorer, cells)


def _folded(scorer: CellScorer, weight: Tensor, bias: Tensor, cells: slice) -> tuple[Tensor, Tensor]:
    """Weights `[C, I, O]` and biases `[C, 1, O]` for inputs that were not standardised."""
    weight = weight.detach() / scorer.deviation[cells, :, None]
    shift = torch.matmul(scorer.mean[cells, None], weight)  # [C, 1, O]
    return weight, bias.detach()[:, None] - shift
