"""What an online policy may hold in each cell, from a budget in entries or in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.budget import POSITION_BYTES, Budget
from kvkeep.errors import BudgetError, CacheStateError, PolicyError
from kvkeep.hf.spans import Span
from kvkeep.hf.support import LayerPlan
from kvkeep.policies.online import (
    PRIORITY_BYTES,
    Cells,
    Geometry,
    OnlinePolicy,
    StaticPolicy,
    WatchingPolicy,
    refuse_ratio,
    split_cap,
    state_bytes,
)


class Cap:
    """The cap of a cache's cells.

    Args:
        policy: governs all evictable layers.
        budget: entries of each cell; or bytes of the whole cache, which hold at every step.
        plans: the model's layers.
        dtype: of keys and values.
        protect: position ranges that stay; they take slots.

    Raises:
        BudgetError: a ratio, which needs the length of a text that has not ended; a budget without a slot to give away;
            or a protected range that is counted from the end.
        PolicyError: a policy that gives no priorities, or divides the cap in an impossible way.
    """

    def __init__(
        self,
        policy: OnlinePolicy,
        budget: Budget,
        plans: Sequence[LayerPlan],
        dtype: torch.dtype,
        protect: Sequence[Span] = (),
    ) -> None:
        if not isinstance(policy, StaticPolicy | WatchingPolicy):
            raise PolicyError(
                expected="a StaticPolicy or a WatchingPolicy",
                received=f"{type(policy).__name__}, which is neither",
                remedy="derive from one of them: priorities either never change, or follow the attention",
            )
        self.policy, self._budget = policy, budget
        self._plans, self._dtype = plans, dtype
        self.spans = [_from_start(span) for span in protect]
        refuse_ratio(policy, budget)
        self._known: dict[int, dict[int, Geometry]] = {}
        self.geometries(1)

    def geometries(self, rows: int) -> dict[int, Geometry]:
        """How the cells of each evictable layer spend their cap, by the layer's index in the model.

        Args:
            rows: of the cache; a budget in bytes is shared by all of them.

        Raises:
            BudgetError: no slot is left to give away.
        """
        if self._budget.bytes is None:
            rows = 1
        if rows not in self._known:
            entries = self._budget.entries or self._entries_in(self._budget.bytes or 0, rows)
            self._known[rows] = self._split(entries)
        return self._known[rows]

    def check_rows(self, rows: int, made_for: int) -> None:
        """Refuse more rows than the cells were made for.

        Raises:
            BudgetError: they would hold more bytes than the budget.
        """
        limit, held = self._budget.bytes, self._bytes(rows, self.geometries(made_for))
        if limit is not None and held > limit:
            raise BudgetError(
                expected=f"at most {made_for} rows, which {self._budget} was divided among",
                received=f"{rows}, which would hold {held} bytes",
                remedy="give a fresh cache all rows with the first text: its cells are then made smaller",
            )

    def pinned(self, positions: Tensor) -> Tensor | None:
        """Which positions the caller protects, a mask of their shape; None where nothing is protected."""
        if not self.spans:
            return None
        inside = torch.zeros_like(positions, dtype=torch.bool)
        for start, end in self.spans:
            inside |= (positions >= start) & (positions < end)
        return inside

    def _split(self, entries: int) -> dict[int, Geometry]:
        return {
            plan.index: split_cap(self.policy, entries, self._cells(plan, 1), self.spans)
            for plan in self._plans
            if plan.window is None
        }

    def _cells(self, plan: LayerPlan, rows: int) -> Cells:
        size = plan.shape.entry_bytes // (2 * self._dtype.itemsize)
        return Cells(rows, plan.shape.kv_heads, size, size, self._dtype, torch.device("meta"), plan.index)

    def _bytes(self, rows: int, geometries: dict[int, Geometry]) -> int:
        """All that a full cache of these cells holds, the windows of sliding layers included."""
        total = 0
        for plan in self._plans:
            if plan.window is not None:
                total += rows * plan.window_bytes(plan.window)
                continue
            at = geometries[plan.index]
            rated = at.held if isinstance(self.policy, WatchingPolicy) else at.slots
            cell = at.held * plan.shape.entry_bytes + at.slots * POSITION_BYTES + rated * PRIORITY_BYTES
            total += rows * plan.shape.kv_heads * cell + state_bytes(self.policy, self._cells(plan, rows))
        return total

    def _entries_in(self, limit: int, rows: int) -> int:
        """The largest cap that fits; where none does, the smallest one that there is says so."""

        def fits(entries: int) -> bool:
            try:
                return self._bytes(rows, self._split(entries)) <= limit
            except BudgetError:
                return True  # too small to be divided, and no reason to go lower

        low, high = 1, 2
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        try:
            self._split(low)
        except BudgetError as error:
            raise BudgetError(
                expected=f"bytes for {rows} rows that leave at least one slot in each cell",
                received=f"{self._budget}, which is {low} entries per cell",
                remedy=f"raise the budget, or shorten the batch ({error.remedy})",
            ) from None
        return low


def _from_start(span: Span) -> tuple[int, int]:
    start, end = span
    if end is None or end < 0 or (start or 0) < 0:
        raise BudgetError(
            expected="protected ranges counted from the start of the text, whose end an online policy does not know",
            received=f"{span}",
            remedy="for example protect=[(0, 24)]; the newest tokens are protected by the window",
        )
    return start or 0, end


def refuse_for_online(policy: OnlinePolicy, **options: Any) -> None:
    """Refuse options of a cache that say how a text is cut where it ends.

    Args:
        policy: the online policy.
        options: by name; None and False are not given.

    Raises:
        CacheStateError: one of them is given.
    """
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        raise CacheStateError(
            expected=f"no {' and no '.join(given)} beside {policy.name}, which holds its cap at every step",
            received=", ".join(f"{name}={options[name]!r}" for name in given),
            remedy="leave it out; prompts may come in chunks of any size",
        )
