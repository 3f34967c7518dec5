"""`kvkeep show`: a text with the tokens that the cache kept shaded."""

from __future__ import annotations

from pathlib import Path

from kvkeep.cli.options import BudgetOptions, Device, Dtype, ModelName, TextFile, read_text, writable, write_text
from kvkeep.cli.output import note, size, stdout

_DEFAULT_BUDGET = BudgetOptions()


def show(
    *,
    model: ModelName,
    context: TextFile,
    policy: str,
    budget: BudgetOptions = _DEFAULT_BUDGET,
    question: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    html: Path | None = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Print a text with the kept tokens shaded: the darker, the more cells (layer and KV head) kept the token.

    Without colours (a pipe, NO_COLOR), tokens that fewer cells kept than the average token are printed as dots.

    Args:
        policy: What decides; see `kvkeep policies`.
        question: Lets the policy see this question (query-aware).
        layer: Only this layer of the model, from 0; all of them otherwise.
        head: Only this KV head, from 0; all of them otherwise.
        html: Write one self-contained HTML file instead.
    """
    target = None if html is None else writable(html, "--html")
    text = read_text(context, "--context")

    from kvkeep.cli import shading
    from kvkeep.cli.loading import load, working
    from kvkeep.hf.session import Session
    from kvkeep.hf.shading import kept_shares, shaded_stretches
    from kvkeep.policies import parse_policy

    budget.check(parse_policy(policy))
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    session = Session(loaded, tokenizer, policy, **budget.given())
    with working("processing the text"):
        session.ingest(text, question=question)
    shares = kept_shares(session.cache, layer, head)
    start = session.header_tokens
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    shares = shares[start : start + count]
    stretches = shaded_stretches(text, tokenizer, shares.tolist())
    ledger = session.cache.ledger
    where = "all layers" if layer is None else f"layer {layer}"
    facts = {
        "model": model,
        "policy": policy,
        "budget": str(session.cache.budget),
        "protocol": "query-agnostic" if question is None else f"query-aware: {question}",
        "shown": f"{where}, {'all KV heads' if head is None else f'KV head {head}'}",
        "text": f"{count:,} tokens, of which an average cell shown holds {float(shares.sum()):,.0f}",
        "held": f"{size(ledger.held_bytes)}, {ledger.fraction:.1%} of the full cache",
    }
    if target is not None:
        write_text(target, shading.page(stretches, facts), "--html")
        note(f"written to {target}")
        return
    shading.print_shaded(stdout(), stretches, facts)
