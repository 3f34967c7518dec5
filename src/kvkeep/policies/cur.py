"""CurDKV: keep the rows of keys and values that a CUR decomposition would keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.observation import Observation
from kvkeep.policies.protocols import Scorer, require

_COMBINED = ("product", "mean", "key", "value")


@dataclass(frozen=True)
class CUR(Scorer):
    """Leverage of an entry's key and value among its neighbours, multiplied.

    Sengupta et al. 2025 (CurDKV, arXiv 2509.15038): the leverage of a row is approximated by its squared norm, as a
    share of the sum over the entry's window; the scores of a cell sum to one. Deviations: the norms themselves, where
    the paper projects keys and values at random, which approximates them; windows of
    neighbours that a cell holds, so that a later cut judges entries in the company that they have; a window of zeros
    scores zero.

    Attributes:
        sinks: how many of the first entries stay.
        window: entries among which a norm is a share; 0 takes all of the cell.
        combine: `product` of the shares of key and value, their `mean`, or that of the `key` or the `value` alone.
    """

    sinks: int = 4
    window: int = 16
    combine: str = "product"
    name: ClassVar[str] = "cur"

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "sinks >= 0", f"sinks={self.sinks}", "4 is the usual number")
        sensible = self.window == 0 or self.window >= 2
        require(sensible, "window=0 or window >= 2", f"window={self.window}", "in a window of 1 all entries are alike")
        known = self.combine in _COMBINED
        require(known, f"combine one of {', '.join(_COMBINED)}", f"combine={self.combine}", "product is the paper's")

    def protects(self, observation: Observation) -> tuple[int, int]:
        """The sinks."""
        return self.sinks, 0

    def score(self, observation: Observation) -> Tensor:
        """`[B, H_kv, N]`, zero or positive; the valid ones of a cell sum to one."""
        key = self._share(observation.key_norms().square(), observation.valid)
        value = self._share(observation.value_norms().square(), observation.valid)
        combined = {"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}[self.combine]
        return _normalised(combined)

    def _share(self, leverage: Tensor, valid: Tensor) -> Tensor:
        """Of the sum over the entry's window; the windows follow one another along the entries that a cell holds."""
        leverage = leverage.masked_fill(~valid, 0)
        if not self.window:
            return _normalised(leverage)
        held_first = (~valid).long().argsort(dim=-1, stable=True)
        missing = -leverage.shape[-1] % self.window
        packed = torch.nn.functional.pad(leverage.gather(-1, held_first), (0, missing))
        shares = _normalised(packed.view(*packed.shape[:2], -1, self.window)).flatten(-2)
        return torch.empty_like(leverage).scatter_(-1, held_first, shares[..., : leverage.shape[-1]])


def _normalised(x: Tensor) -> Tensor:
    """Of sum one over the last dimension; zeros stay zeros."""
    return x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
