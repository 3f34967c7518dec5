"""`kvkeep tune`: the smallest cache for one's own text."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvkeep.cli.bench import Ratios, progress_of_rows
from kvkeep.cli.loading import load
from kvkeep.cli.options import Count, Device, Dtype, Json, ModelName, OptionError, Texts
from kvkeep.cli.output import print_json, stdout

_POLICIES = ("snapkv", "adasnapkv", "chunkkv", "frc", "keydiff", "expected-attention", "streaming-llm")


def tune(
    *,
    model: ModelName,
    text: Path,
    max_kl: float = 0.02,
    policy: Texts = _POLICIES,
    compression_ratio: Ratios = (),
    length: Count = 1024,
    samples: Count = 24,
    out: Path | None = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Find the policy and the smallest cache that still predicts your text as the full cache does.

    The text is cut into pieces. Each piece but its last 128 tokens is compressed by every policy at every ratio, and
    the predictions of those last tokens are compared with the full cache's. The answer is the choice of fewest bytes
    whose whole 95 % interval of the divergence stays below --max-kl.

    Args:
        text: A text file, or a folder of them, like what the cache will be used for.
        max_kl: Mean divergence from the full cache that is still good, in nats a token.
        policy: Those that are tried; repeat it for several.
        compression_ratio: Those that are tried; 0.1 to 0.95 by default.
        length: Tokens of a piece.
        samples: Pieces, at most.
        out: Keep the measurements in this folder, and go on from those that are there.
    """
    from kvkeep.bench.runner import run
    from kvkeep.bench.settings import Settings
    from kvkeep.bench.tuning import LEAST_TEXTS, RATIOS, choices, smallest
    from kvkeep.budget import Budget
    from kvkeep.policies import parse_policy, policy_string
    from kvkeep.results import read_rows
    from kvkeep.tasks.continuation import Continuation

    if not max_kl > 0:
        raise OptionError(
            expected="--max-kl above 0", received=f"{max_kl}", remedy="0.02 is a strict bound, 0.2 a lax one"
        )
    loaded = load(model, dtype=dtype, device=device)
    task = Continuation(haystack=text.expanduser())
    count = min(samples, task.available(loaded[1], length))
    if count < LEAST_TEXTS:
        raise OptionError(
            expected=f"text for at least {LEAST_TEXTS} pieces of {length} tokens, to tell one policy from another",
            received=f"text for {count}",
            remedy="give more text, or a smaller --length",
        )
    settings = Settings(
        model=model,
        tasks=(task.name,),
        lengths=(length,),
        samples=count,
        policies=tuple(dict.fromkeys(policy_string(parse_policy(name)) for name in policy)),
        budgets=tuple(Budget(compression_ratio=ratio) for ratio in compression_ratio or RATIOS),
        dtype=dtype,
        template=False,
        task_options={"haystack": str(text)},
    )
    with tempfile.TemporaryDirectory() as scratch, progress_of_rows() as on_rows:
        folder = run(settings, [task], out or Path(scratch), loaded=loaded, device=device, on_rows=on_rows)
        found = choices(read_rows(folder))
    best = smallest(found, max_kl)
    if json:
        print_json(
            {
                "schema_version": 1,
                "max_kl": max_kl,
                "best": None if best is None else best.to_dict(),
                "choices": [choice.to_dict() for choice in found],
            }
        )
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold")
    for heading in ("ratio", "held MiB", "of full", "KL", "95 % interval", "n"):
        table.add_column(heading, justify="right", no_wrap=True)
    for choice in found:
        table.add_row(
            Text(choice.policy, style="bold" if choice == best else ""),
            f"{choice.compression_ratio:.2f}",
            f"{choice.held_bytes / 2**20:.1f}",
            f"{choice.fraction:.1%}",
            f"{choice.kl:.4f}",
            f"{choice.low:.4f}..{choice.high:.4f}",
            f"{choice.texts}",
        )
    stdout().print(table)
    if best is None:
        stdout().print(f"\nnone of these stays below a divergence of {max_kl}: keep more, or allow more")
        return
    stdout().print(
        f"\n--policy {best.policy} --compression-ratio {best.compression_ratio:g}: {best.fraction:.1%} of the bytes, "
        f"divergence {best.kl:.4f} ({best.low:.4f} to {best.high:.4f}, {best.texts} texts)"
    )
