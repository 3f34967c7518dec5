"""`kvkeep plan`: what a cache will weigh, before anything is run."""

from __future__ import annotations

from rich.table import Table

from kvkeep.cli.options import BudgetOptions, Count, Dtype, Json, ModelName
from kvkeep.cli.output import note, print_json, size, stdout

_DEFAULT_BUDGET = BudgetOptions()


def plan(
    *,
    model: ModelName,
    context_length: Count,
    policy: str = "snapkv",
    budget: BudgetOptions = _DEFAULT_BUDGET,
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Tell the bytes of a cache from the model's configuration: full, kept, and at the peak. No weights are loaded.

    Policies that spend their budget whatever the scores are give exact numbers; for others they are upper bounds, and
    the output says so.

    Args:
        context_length: Tokens of the prompt.
        policy: As `kvkeep policies` lists them.
    """
    from kvkeep.budget import Budget
    from kvkeep.hf.planning import empty_model, plan_cache
    from kvkeep.hf.sources import dtype_name
    from kvkeep.policies import Full, parse_prompt_policy, policy_string

    parsed = parse_prompt_policy(policy)
    given = budget.given()
    if isinstance(parsed, Full) and not given:
        given = {"compression_ratio": 0.0}
    amount = Budget(**given)
    empty = empty_model(model, dtype)
    planned = plan_cache(empty, parsed, amount, context_length)
    kind = dtype_name(empty.dtype)
    remarks = []
    trained = planned.max_position_embeddings
    if trained is not None and context_length > trained:
        remarks.append(f"the model was trained on positions up to {trained:,}; eviction does not shorten positions")
    if not planned.held_is_exact:
        remarks.append(f"{policy} may use less than its budget, by its scores: held and peak are upper bounds")
    elif not planned.peak_is_exact:
        remarks.append(f"{policy} waits for all layers: the peak depends on its scores and is an upper bound")
    if json:
        record = {"schema_version": 1, "model": model, "policy": policy_string(parsed), "budget": amount.describe()}
        print_json(record | {"dtype": kind, **planned.to_dict(), "notes": remarks})
        return
    console = stdout()
    console.print(f"{model}, {context_length:,} tokens, {policy}, {amount}, {kind}\n")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    bound, peak_bound = ("" if exact else "at most " for exact in (planned.held_is_exact, planned.peak_is_exact))
    table.add_row("full cache", size(planned.full_bytes), f"{planned.entries_full:,} entries in {planned.cells} cells")
    table.add_row("held", size(planned.held_bytes), f"{bound}{planned.fraction:.1%} of the full cache")
    table.add_row("  payload", size(planned.payload_bytes), f"{bound}{planned.entries_per_cell:,} entries per cell")
    table.add_row("  metadata", size(planned.metadata_bytes), "positions and offsets")
    if planned.window_bytes:
        table.add_row("windows", size(planned.window_bytes), "of sliding layers, which are not evicted")
    table.add_row("peak", size(planned.peak_bytes), f"{peak_bound and 'at most, '}while the prompt is processed")
    console.print(table)
    for remark in remarks:
        note(remark)
