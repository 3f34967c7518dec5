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
    """The mLSTM's step. The state: `memory [B, C, F, P + 1]`, C and in the last column z; `exponent [B, C, 1]`."""

    def __init__(self, scorer: MLSTMScorer, cells: slice) -> None:
        super().__init__(scorer, cells)
        width, self._cap = scorer.width, scorer.config.gate_cap
        self._width, self._softmax_only = width, scorer.config.feature == "softmax"
        keys_and_values, gates = scorer.memory_weight[cells], scorer.gate_weight[cells] / (self._cap or 1.0)
        nothing = torch.zeros_like(keys_and_values[..., :1])  # of a column that is always 1, for z
        skip = nothing if scorer.skip_weight is None else scorer.skip_weight[cells][..., None]
        weight = torch.cat([scorer.query_weight[cells], keys_and_values, nothing, gates, skip], dim=-1)
        bias = torch.zeros_like(weight[:, 0])
        bias[:, 3 * width] = 1
        bias[:, 3 * width + 1 : 3 * width + 3] = scorer.gate_bias[cells] / (self._cap or 1.0)
        bias[:, 3 * width + 3] = scorer.out_bias[cells]
        self._weight, self._bias = _folded(scorer, weight, bias, cells)
        self._out = scorer.out_weight.detach()[cells, :, None]
        self._tiny = torch.finfo(self._out.dtype).tiny

    def start(self, batch: int, device: torch.device) -> State:
        """See `Stepper.start`."""
        return _joined(super().start(batch, device))

    def read(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.read`."""
        memory = state["memory"]
        apart = {"memory": memory[..., :-1], "norm": memory[..., -1], "exponent": state["exponent"][..., 0]}
        scores, after = super().read(new, leaving, apart)
        return scores, _joined(after)

    def step(self, new: Tensor, leaving: Tensor, state: State) -> tuple[Tensor, State]:
        """See `Stepper.step`."""
        width = self._width
        x = torch.cat([new, leaving], dim=2).to(self._weight.dtype)
        maps = torch.matmul(x, self._weight).add_(self._bias)  # [B, C, 1 + m, 3 P + 4]
        own = maps[:, :, :1]
        gates = own[..., 3 * width + 1 : 3 * width + 3]
        if self._cap is not None:
            gates = gates.tanh().mul_(self._cap)
        kept = logsigmoid(gates[..., 1]).add_(state["exponent"])  # [B, C, 1]
        exponent = torch.maximum(kept, gates[..., 0])
        old, more = (kept - exponent).exp_(), (gates[..., 0] - exponent).exp_()
        key = self._feature(own[..., width : 2 * width]).mul_(more[..., None])  # [B, C, 1, F]
        gain = key.transpose(-1, -2) * own[..., 2 * width : 3 * width + 1]
        memory = torch.addcmul(gain, state["memory"], old[..., None])
        after = {"memory": memory, "exponent": exponent}
        if not leaving.shape[2]:
            return maps.new_zeros(leaving.shape[:3]), after
        theirs = maps[:, :, 1:]
        found = self._feature(theirs[..., :width]) @ memory  # [B, C, 1, P + 1]
        h = found[..., :-1] / found[..., -1:].clamp_min(self._tiny)
        return (silu(h) @ self._out).add_(theirs[..., -1:]).squeeze(-1), after

    def _feature(self, x: Tensor) -> Tensor:
        if self._softmax_only:
            return x.softmax(-1)
        return torch.stack([x, -x], dim=-2).softmax(-1).flatten(-2)


def stepper_of(scorer: CellScorer, cells: slice) -> Stepper:
    """The shortest way that there is for a scorer's layer."""
    with torch.no_grad():
        if isinstance(scorer, MLSTMScorer):
            return MLSTMStepper(scorer, cells)
        if isinstance(scorer, MLPScorer):
            return MLPStepper(scorer, cells)
    return PlainStepper(scorer, cells)


def _folded(scorer: CellScorer, weight: Tensor, bias: Tensor, cells: slice) -> tuple[Tensor, Tensor]:
    """Weights `[C, I, O]` and biases `[C, 1, O]` for inputs that were not standardised."""
    weight = weight.detach() / scorer.deviation[cells, :, None]
    shift = torch.matmul(scorer.mean[cells, None], weight)  # [C, 1, O]
    return weight, bias.detach()[:, None] - shift


def _joined(state: State) -> State:
    memory = torch.cat([state["memory"], state["norm"][..., None]], dim=-1)
    return {"memory": memory, "exponent": state["exponent"][..., None]}
