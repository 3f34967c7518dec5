"""Keys rotated anew after a cut, so that the kept entries stand one behind the other, without the gaps of evicted ones.

A rotary position matters only by its distance to other positions. So the entries of a cell are moved up to where the
next token will stand, and the next token keeps its place: the same distances as if all were counted from zero, cell by
cell, however many entries each has. Logical positions, and what `generate` passes, do not change.

The store holds every key as the model made it, with the position that it was made for. What attention reads is made of
these: the rotation of the true position is undone, and the new one applied, once after each cut. Nothing is ever made
of keys that were rotated anew before, so that no error grows with the number of cuts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedError
from kvkeep.hf.support import LayerPlan, rope_types, rotary_of, unwrap
from kvkeep.observation import Rotary
from kvkeep.store import RaggedLayer
from kvkeep.store.prefix import Prefix

# Rotations by fixed frequencies that leave lengths alone. Those of "dynamic" and "longrope" change with the text, and
# "yarn" was not checked.
_SUPPORTED = ("default", "linear", "llama3")


def check_rerotation(model: object) -> None:
    """Refuse a model whose keys cannot be rotated anew.

    Raises:
        UnsupportedError: another kind of rotary positions than default, linear and llama3.
    """
    inner = unwrap(model)
    other = sorted(set(rope_types(inner)) - set(_SUPPORTED))
    if other:
        raise UnsupportedError(
            expected=f"rotary positions of a kind whose keys can be rotated anew: {', '.join(_SUPPORTED)}",
            received=f"rope_type {', '.join(map(repr, other))} in {type(inner).__name__}",
            remedy="leave rerotate_keys out: keys then keep the positions that they were made for",
        )


class KeyRerotation:
    """Rotates the keys of one layer's prefix anew.

    Args:
        rotary: of the layer.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary

    @classmethod
    def of(cls, decoder: Any, index: int) -> KeyRerotation:
        """For layer `index` of a decoder, from the model's own modules; keeps its rotary embedding alive, no more."""
        return cls(rotary_of(decoder, decoder.layers[index].self_attn))

    def moved_up(self, prefix: Prefix, ends: Sequence[int]) -> Prefix:
        """The prefix with its keys where the text ended; the same object where no entry has to move.

        Args:
            prefix: keys as the model made them, with their positions.
            ends: logical length of each row at the cut: the position of the next token.
        """
        new = _contiguous(prefix, ends)
        old = prefix.positions.long()
        if not len(old) or torch.equal(old, new):
            return prefix
        wide = torch.promote_types(prefix.keys.dtype, torch.float32)
        plain = self._rotary.unrotate(prefix.keys.to(wide)[None, None], old[None])
        keys = self._rotary.rotate(plain, new[None])[0, 0].to(prefix.keys.dtype)
        return replace(prefix, keys=keys.contiguous())


def with_prefix(store: RaggedLayer, prefix: Prefix) -> RaggedLayer:
    """The store as attention reads it, with other keys in its prefix; only for reading."""
    if prefix is store.prefix:
        return store
    twin = copy.copy(store)
    twin.prefix = prefix
    return twin


def with_second_keys(plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    """The layers as a budget in bytes must see them: every evictable entry has two keys, the model's and the moved."""
    return [
        plan if plan.window is not None else replace(plan, shape=replace(plan.shape, entry_bytes=_with_key(plan)))
        for plan in plans
    ]


def _with_key(plan: LayerPlan) -> int:
    return plan.shape.entry_bytes * 3 // 2


def _contiguous(prefix: Prefix, ends: Sequence[int]) -> Tensor:
    """`[entries]` int64: in each cell the last entry stands before the end of its row, the others before it."""
    counts = prefix.offsets.diff().long()  # [cells]
    last = torch.tensor(list(ends), dtype=torch.int64, device=counts.device).repeat_interleave(prefix.kv_heads)
    begin = prefix.offsets[:-1].long()
    rank = torch.arange(len(prefix.positions), device=counts.device) - begin.repeat_interleave(counts)
    return (last - counts).repeat_interleave(counts) + rank
