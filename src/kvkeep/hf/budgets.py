"""What a budget allows each row of a cache, and whether what the policies kept stays within it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvkeep.budget import Budget
from kvkeep.errors import BudgetError, PolicyError
from kvkeep.hf.layers import KeepLayer
from kvkeep.hf.spans import Span, positions_in
from kvkeep.hf.support import LayerPlan
from kvkeep.policies import Full, PromptPolicy, policy_string


def cell_budgets(
    budget: Budget,
    lengths: Sequence[int],
    plans: Sequence[LayerPlan],
    table: Sequence[PromptPolicy],
    protect: Sequence[Span] = (),
) -> list[int]:
    """Entries per cell on average, row by row, for the layers whose policy evicts.

    Args:
        budget: of the whole cache.
        lengths: logical length of each row at the cut.
        plans: the model's layers.
        table: the policy of each evictable layer.
        protect: position ranges that stay.

    Raises:
        BudgetError: layers kept in full, or protected entries, need more than the budget.
    """
    evictable = [plan.shape for plan in plans if plan.window is None]
    reserved = len(lengths) * sum(plan.window_bytes(max(lengths)) for plan in plans)
    average = budget.entries_per_cell(lengths, evictable, reserved)
    full = sum(isinstance(policy, Full) for policy in table)
    budgets = []
    for length, entries in zip(lengths, average, strict=True):
        if 0 < full < len(table):
            entries = (entries * len(table) - length * full) // (len(table) - full)
        elif full and entries < length:
            raise BudgetError(
                expected=f"a budget of {length} entries per cell, all that policy 'full' keeps",
                received=f"{entries} ({budget})",
                remedy="choose a policy that evicts, or compression_ratio=0",
            )
        pinned = len(positions_in(protect, length))
        if entries < max(1, pinned):
            raise BudgetError(
                expected=f"a budget of at least {max(1, pinned)} entries per cell"
                + (f" for {pinned} protected positions" if pinned else "")
                + (f" beside {full} layers that are kept in full" if full else ""),
                received=f"{entries} ({budget} of a text of {length} tokens)",
                remedy="raise the budget, protect less, or keep fewer layers in full",
            )
        budgets.append(entries)
    return budgets


def check_kept(layers: Sequence[KeepLayer], budgets: Sequence[int]) -> None:
    """A policy may share its budget as it likes; it may not exceed it.

    Args:
        layers: all evictable layers, right after the cut.
        budgets: what `cell_budgets` gave.

    Raises:
        PolicyError: the layers of a policy hold more than its budget in some row.
    """
    waiting = [layer for layer in layers if not isinstance(layer.policy, Full)]
    while waiting:
        policy = waiting[0].policy
        stores = [layer.store for layer in waiting if layer.policy == policy]
        waiting = [layer for layer in waiting if layer.policy != policy]
        held = torch.stack([store.cell_counts().sum(1).cpu() for store in stores]).sum(0)
        cells = sum(store.kv_heads for store in stores)
        allowed = [budget * cells for budget in budgets]
        if any(count > limit for count, limit in zip(held.tolist(), allowed, strict=True)):
            raise PolicyError(
                expected=f"at most {allowed} entries in each row, the budget of {len(stores)} layers",
                received=f"{held.tolist()} from {policy_string(policy)}",
                remedy="choose no more than `judgement.budget` entries per cell on average",
            )
