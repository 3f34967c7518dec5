"""Online policies on held-out texts at one cap: how far the model strays, with intervals over documents.

Each document is read once with the full cache and once under each policy (`fidelity.stray`). A row for each document
and policy is written down as soon as it is measured; the same call goes on where a killed run stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep import __version__
from kvkeep.budget import Budget
from kvkeep.errors import ResultsError
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.fitting import served_model
from kvkeep.hf.models import weights_fingerprint
from kvkeep.hf.support import plan_model, unwrap
from kvkeep.learn.config import KVpopConfig, LearnError
from kvkeep.learn.fidelity import Strayed, stray
from kvkeep.learn.measures import Choice
from kvkeep.learn.oracle import oracle_of
from kvkeep.learn.policy import KVpop
from kvkeep.learn.texts import Window, as_batch, windows_of
from kvkeep.learn.traces import LayerTrace, trace
from kvkeep.policies import OnlinePolicy, parse_policy
from kvkeep.policies.fitting import FittingPolicy
from kvkeep.results.keyed import KeyedLog
from kvkeep.results.statistics import (
    Estimate,
    Measurement,
    Paired,
    check_equal_bytes,
    holm,
    mean_interval,
    paired_difference,
)
from kvkeep.tasks.text import Message, digest_of

ORACLE = "oracle"  # no policy that a name leads to: it knows the text


@dataclass(frozen=True)
class EvaluationSettings:
    """What the numbers hang on.

    Attributes:
        policies: names of online policies; `oracle` is the future itself (`learn.oracle`).
        entries: cap of a cell, a policy's memory included.
        length: tokens of a document, which must have so many.
        documents: at most so many.
    """

    policies: tuple[str, ...]
    entries: int
    length: int = 2048
    documents: int = 8


@dataclass(frozen=True)
class Standing:
    """One policy over all documents.

    Attributes:
        policy: its name.
        kl: KL of the full cache's predictions to these, nats a token.
        nll: negative log-likelihood of the text, nats a token.
        held_bytes: mean.
        against: KL of this policy less that of the first one; None for the first one itself, and where the two do not
            hold equally many bytes.
        p_holm: of that difference, corrected for the number of policies.
        note: why there is no comparison; empty if there is one.
        choice: recall and kept attention of a trained scorer; None for others.
        recall_by_layer: of a trained scorer, in the order of layers; empty for others.
    """

    policy: str
    kl: Estimate
    nll: Estimate
    held_bytes: float
    against: Paired | None
    p_holm: float | None
    note: str
    choice: Choice | None
    recall_by_layer: tuple[float, ...]


def evaluate(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Message],
    settings: EvaluationSettings,
    out: Path,
    *,
    name: str = "",
    on_row: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[dict[str, Any]]:
    """Measure, or go on with it.

    Args:
        model: supported.
        tokenizer: its tokenizer.
        documents: held out; the caller sees to it that no policy was trained on them.
        settings: of the run.
        out: folder of the rows, made if it is not there.
        name: of the model, for records.
        on_row: told how many rows of how many are done, and which comes next.

    Returns:
        A row for each document and policy.

    Raises:
        LearnError: documents that are too short, a policy that holds no cap at every step, or one that was made for
            another model.
        ResultsError: a folder of a run with other settings.
    """
    inner = unwrap(model)
    policies = {text: None if text == ORACLE else _online(text) for text in settings.policies}
    windows = windows_of(
        documents, tokenizer, length=settings.length, count=min(settings.documents, len(documents)), part="held-out"
    )
    facts = {
        "kind": "evaluation of online policies",
        "model": name,
        "model_fingerprint": weights_fingerprint(inner),
        "dtype": str(inner.dtype).removeprefix("torch."),
        "digest": digest_of(documents),
        "settings": asdict(settings),
        "version": __version__,
    }
    total = len(windows) * len(policies)
    with KeyedLog(out, facts) as log:
        for number, window in enumerate(windows):
            missing = [text for text in policies if _key(number, text) not in log]
            if not missing:
                continue
            on_row(len(log), total, window.document)
            ids = as_batch(window, inner.device)
            fitted = {text: _fit(policies[text], inner, ids, settings) for text in missing}
            caches = {text: KeepCache(inner, policy, entries=settings.entries) for text, policy in fitted.items()}
            found = stray(inner, ids, caches, settings.entries)
            for text in missing:
                log.append(_row(number, window, text, found[text], _choices(inner, ids, fitted[text], settings)))
        on_row(len(log), total, "")
        return log.records


def summarise(rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> list[Standing]:
    """The standing of each policy, in the order in which they were given; differences are to the first one.

    Raises:
        ResultsError: no rows of one of them.
    """
    by_policy = {name: [row for row in rows if row["policy"] == name] for name in policies}
    for name, found in by_policy.items():
        if not found:
            raise ResultsError(expected=f"rows of {name}", received="none", remedy="run the evaluation to its end")
    first = policies[0]
    notes, compared = {}, {}
    for name in policies[1:]:
        try:
            held = [_mean([row["held_bytes"] for row in by_policy[each]]) for each in (first, name)]
            check_equal_bytes(held[0], held[1], names=(first, name))
            compared[name] = paired_difference(_kl(by_policy[name]), _kl(by_policy[first]))
        except ResultsError as error:
            notes[name] = str(error)
    corrected = dict(zip(compared, holm([paired.p_value for paired in compared.values()]), strict=True))
    return [
        Standing(
            policy=name,
            kl=mean_interval(_kl(found)),
            nll=mean_interval(_measurements(found, "nll")),
            held_bytes=_mean([row["held_bytes"] for row in found]),
            against=compared.get(name),
            p_holm=corrected.get(name),
            note=notes.get(name, ""),
            choice=Choice.mean([Choice(**c) for row in found for c in row["layers"]]) if found[0]["layers"] else None,
            recall_by_layer=tuple(
                _mean([choice["recall"] for choice in layer])
                for layer in zip(*(row["layers"] for row in found), strict=True)
            ),
        )
        for name, found in by_policy.items()
    ]


def _online(text: str) -> OnlinePolicy:
    policy = parse_policy(text)
    if not isinstance(policy, OnlinePolicy):
        raise LearnError(
            expected="policies that hold a cap at every step",
            received=f"{text}, which cuts where a text ends",
            remedy="`kvkeep policies` tells the kinds apart; `kvkeep bench` compares those of the other kind",
        )
    return policy


def _fit(policy: OnlinePolicy | None, model: Any, ids: Tensor, settings: EvaluationSettings) -> OnlinePolicy:
    """The policy for this text; the oracle's sinks and window are the usual ones."""
    if policy is None:
        return oracle_of(model, ids, KVpopConfig(settings.entries, scorer="zero"))
    if isinstance(policy, FittingPolicy):
        return policy.fit(served_model(model, plan_model(model), Budget(entries=settings.entries)))
    return policy


@torch.no_grad()
def _choices(model: Any, ids: Tensor, policy: OnlinePolicy, settings: EvaluationSettings) -> list[Choice]:
    """By layer, for trained scorers."""
    if not isinstance(policy, KVpop):
        return []
    scorer, itemsize = policy.scorer, model.dtype.itemsize
    config, size = scorer.config, scorer.shape.head_size
    geometry = policy.geometry(settings.entries, config.state_entries(size, itemsize))
    found: list[Choice] = []

    def see(layer: LayerTrace) -> None:
        cells = scorer.shape.cells_of(layer.ordinal)
        priorities = scorer.priorities(layer.inputs(config.inputs), cells)
        target, gamma = layer.target(config), scorer.log_gamma(cells)
        found.append(Choice.of(priorities.cpu(), target.cpu(), gamma.cpu(), geometry, ids.shape[1]))

    trace(model, ids, see)
    return found


def _row(number: int, window: Window, text: str, found: Strayed, layers: Sequence[Choice]) -> dict[str, Any]:
    return {
        "key": _key(number, text),
        "document": f"{number:04d} {window.document}",
        "policy": text,
        **asdict(found),
        "layers": [asdict(choice) for choice in layers],
    }


def _key(number: int, text: str) -> str:
    return f"{number:04d} {text}"


def _kl(rows: Sequence[dict[str, Any]]) -> list[Measurement]:
    return _measurements(rows, "kl")


def _measurements(rows: Sequence[dict[str, Any]], name: str) -> list[Measurement]:
    return [Measurement("texts", row["document"], row["document"], row[name]) for row in rows]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
