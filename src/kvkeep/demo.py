"""The demo: one document, several policies, the same questions of each compressed cache.

The questions are hidden when the cache is cut (query-agnostic). Each cache is made once and rewound after every
question. How far a policy is from the full cache is told twice: by right answers, and by the KL divergence between the
two caches' predictions of the reference answers, which also tells policies apart that answer equally well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.data import Demo, DemoQuestion
from kvkeep.hf.generation import joint_rate
from kvkeep.hf.policy_table import table_to_text
from kvkeep.hf.scoring import answer_logits, kl_divergence
from kvkeep.hf.session import Session

POLICIES = ("random", "streaming-llm", "keydiff", "snapkv", "adasnapkv", "frc", "contour")
RATIOS = (0.5, 0.75)
QUESTIONS = 8
MAX_NEW_TOKENS = 16


@dataclass(frozen=True)
class DemoRow:
    """What one policy kept at one ratio, and what that was good for.

    Attributes:
        policy: as text.
        compression_ratio: fraction of entries removed.
        prompt_tokens: of the document, the template's header included.
        right: questions whose answer holds an accepted one.
        questions: asked.
        entries: kept, over all cells.
        held_bytes: after the cut.
        fraction: held bytes as a share of the full cache's payload.
        peak_bytes: the most held while the document was processed.
        prefill_s: processing the document, scoring and cutting included.
        decode_tokens_per_s: joint rate of all answers, after their first tokens.
        kl: KL(full || this) in nats per token, mean over all tokens of the reference answers.
        answers: what the model said.
        notes: what the policy had to change to stay in its budget.
    """

    policy: str
    compression_ratio: float
    prompt_tokens: int
    right: int
    questions: int
    entries: int
    held_bytes: int
    fraction: float
    peak_bytes: int
    prefill_s: float
    decode_tokens_per_s: float
    kl: float
    answers: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as it goes into results."""
        return asdict(self)


def spread(questions: Sequence[DemoQuestion], count: int) -> list[DemoQuestion]:
    """`count` of the questions, evenly spread over the document; all of them if there are not more."""
    if count >= len(questions):
        return list(questions)
    return [questions[index * (len(questions) - 1) // max(1, count - 1)] for index in range(count)]


def steps(questions: int, policies: Sequence[str], ratios: Sequence[float]) -> int:
    """How often `run_demo` reports a step."""
    return (1 + len(policies) * len(ratios)) * (1 + questions)


def run_demo(
    model: Any,
    tokenizer: Any,
    demo: Demo,
    policies: Sequence[str] = POLICIES,
    ratios: Sequence[float] = RATIOS,
    *,
    questions: int = QUESTIONS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    on_step: Callable[[str], None] = lambda what: None,
) -> Iterator[DemoRow]:
    """Yield the full cache's row, then one for each policy and ratio.

    Args:
        model: a supported model.
        tokenizer: its tokenizer.
        demo: document, questions and answers.
        policies: names, with options if wanted.
        ratios: fractions of entries to remove.
        questions: how many of the document's questions are asked, evenly spread.
        max_new_tokens: at most so many for each answer.
        on_step: called with the policy after each prefill and each question.
    """
    settings = [("full", 0.0), *((policy, ratio) for policy in policies for ratio in ratios)]
    asked = spread(demo.questions, questions)
    full: list[Tensor] = []
    for policy, ratio in settings:
        session = Session(model, tokenizer, policy, compression_ratio=ratio)
        tokens = session.ingest(demo.text)
        ledger, notes = session.cache.ledger.to_dict(), session.cache.notes
        on_step(policy)
        answers, divergences = [], []
        for index, question in enumerate(asked):
            answers.append(session.ask(question.question, max_new_tokens=max_new_tokens, keep=False))
            predicted = answer_logits(session, question.question, question.reference)
            if policy == "full":
                full.append(predicted)
            divergences.append(kl_divergence(full[index], predicted))
            on_step(policy)
        yield DemoRow(
            policy=str(table_to_text(session.cache.policy)),
            compression_ratio=ratio,
            prompt_tokens=tokens,
            right=sum(q.is_right(answer.text) for q, answer in zip(asked, answers, strict=True)),
            questions=len(asked),
            entries=ledger["entries"],
            held_bytes=ledger["held_bytes"],
            fraction=ledger["fraction"],
            peak_bytes=ledger["peak_bytes"],
            prefill_s=session.prefill_seconds,
            decode_tokens_per_s=joint_rate(answers),
            kl=float(torch.cat(divergences).mean()),
            answers=tuple(answer.text for answer in answers),
            notes=tuple(notes),
        )
