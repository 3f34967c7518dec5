"""`kvkeep run`: a text in, a small cache, questions and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvkeep.cli.options import (
    BudgetOptions,
    Count,
    Device,
    Dtype,
    Flag,
    Json,
    ModelName,
    OptionError,
    Protocol,
    TextFile,
    Texts,
    read_text,
    seeded_policy,
    writable,
)
from kvkeep.cli.output import print_json, stdout

_DEFAULT_BUDGET = BudgetOptions()


def run(
    *,
    model: ModelName,
    context: TextFile | None = None,
    question: Texts = (),
    policy: str | None = None,
    budget: BudgetOptions = _DEFAULT_BUDGET,
    protocol: Protocol | None = None,
    chunk_tokens: Count | None = None,
    rerotate_keys: Flag = False,
    max_new_tokens: Count = 64,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    seed: int | None = None,
    compare_full: Flag = False,
    save_cache: Path | None = None,
    load_cache: Path | None = None,
    json: Json = False,
) -> None:
    """Process a text once, cut its cache to a budget, and ask questions of what is left.

    Each question finds the cache as the cut left it; questions do not see one another.

    Args:
        question: Repeat it for several questions.
        policy: What decides; see `kvkeep policies`.
        protocol: Was the question hidden (query-agnostic, the default: one cut for all questions) or visible
            (query-aware: the text is processed again for each question) when the cut was made.
        chunk_tokens: Process the text in chunks of so many tokens and cut after each, so that no more than the budget
            and one chunk is ever held. For policies that `kvkeep policies` marks with "chunks".
        rerotate_keys: After a cut, rotate the kept keys anew, so that they stand one behind the other without the gaps
            of what was evicted; they are held twice.
        max_new_tokens: At most so many for each answer.
        seed: Of torch, and of policies that draw (random); 0 by default.
        compare_full: Also run the full cache, for its answers and bytes.
        save_cache: Write the cut cache to a file.
        load_cache: Ask a cache that --save-cache wrote; instead of context, policy and budget.
    """
    _check(
        question=question,
        making={
            "--context": context,
            "--policy": policy,
            "--protocol": protocol,
            "--chunk-tokens": chunk_tokens,
            "--rerotate-keys": rerotate_keys or None,
            "--save-cache": save_cache,
            "--compare-full": compare_full or None,
            "--seed": seed,
            **{f"--{name.replace('_', '-')}": value for name, value in budget.given().items()},
        },
        load_cache=load_cache,
    )
    target = None if save_cache is None else writable(save_cache, "--save-cache")
    text = None if context is None else read_text(context, "--context")

    import torch

    from kvkeep.cli import conversation
    from kvkeep.cli.loading import load
    from kvkeep.hf.caps import refuse_for_online
    from kvkeep.hf.session import Session
    from kvkeep.policies import OnlinePolicy

    seed = seed or 0
    chosen = None if policy is None else seeded_policy(policy, seed)
    if load_cache is None:
        budget.check(chosen)
        if isinstance(chosen, OnlinePolicy):
            refuse_for_online(chosen, rerotate_keys=rerotate_keys)
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    torch.manual_seed(seed % 2**63)
    talk = conversation.Talk(None if json else stdout(), max_new_tokens)
    if load_cache is not None:
        outcome = talk.resume(Session.load(load_cache.expanduser(), loaded, tokenizer), question)
        full = None
    else:

        def session(name: Any, **more: Any) -> Session:
            return Session(loaded, tokenizer, name, chunk_tokens=chunk_tokens, **more)

        def evicting() -> Session:
            return session(chosen, rerotate_keys=rerotate_keys, **budget.given())

        aware = protocol == "query-aware"
        outcome = talk.start(evicting, text or "", question, aware=aware, save=target)
        full = talk.start(lambda: session("full"), text or "", question, aware=aware) if compare_full else None
    if json:
        print_json(conversation.record(outcome, full, model=model, loaded=loaded, seed=seed))
    else:
        conversation.print_summary(stdout(), outcome, full)


def _check(*, question: tuple[str, ...], making: dict[str, Any], load_cache: Path | None) -> None:
    """Refuse options that do not go together, before a model is loaded.

    Args:
        question: the questions.
        making: options that say how a cache is made, None where they were not given.
        load_cache: the file of a cache that is made already.
    """
    given = [name for name, value in making.items() if value is not None]
    if load_cache is not None:
        if given:
            raise OptionError(
                expected="--load-cache without the options that say how a cache is made",
                received=", ".join(given),
                remedy="the file tells policy and budget; leave these options out, or leave out --load-cache",
            )
        return
    missing = [name for name in ("--context", "--policy") if name not in given]
    if missing:
        raise OptionError(
            expected="--context and --policy, or --load-cache",
            received=f"no {' and no '.join(missing)}",
            remedy="for example --context notes.txt --policy snapkv --compression-ratio 0.75",
        )
    if not question and "--save-cache" not in given:
        raise OptionError(
            expected="a question to ask, or a file to save the cache to",
            received="neither --question nor --save-cache",
            remedy='add --question "..."',
        )
    if making["--protocol"] == "query-aware" and not question:
        raise OptionError(
            expected="a question, which a query-aware cut needs",
            received="no --question",
            remedy='add --question "...", or use --protocol query-agnostic',
        )
    if making["--protocol"] == "query-aware" and "--chunk-tokens" in given:
        raise OptionError(
            expected="a text that is cut at its end, where a visible question stands",
            received="--protocol query-aware with --chunk-tokens",
            remedy="leave out --chunk-tokens, or use --protocol query-agnostic",
        )
    if making["--protocol"] == "query-aware" and "--save-cache" in given and len(question) > 1:
        raise OptionError(
            expected="one question for a query-aware cache that is saved, since the cut depends on it",
            received=f"{len(question)} questions with --save-cache",
            remedy="save one cache for each question, or use --protocol query-agnostic",
        )
