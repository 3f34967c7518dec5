"""What `kvkeep run` does once its options are read: one text, one or more cuts, and the questions asked of them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.cli.loading import working
from kvkeep.cli.options import OptionError
from kvkeep.cli.output import WrappedStream, note, size
from kvkeep.hf.generation import Answer, joint_rate
from kvkeep.hf.models import model_sha256
from kvkeep.hf.policy_table import table_to_text
from kvkeep.hf.session import Session
from kvkeep.hf.sources import dtype_name

SCHEMA_VERSION = 1


@dataclass
class Outcome:
    """What came of one policy.

    Attributes:
        policy: as text.
        budget: the one field that is set.
        protocol: query-agnostic or query-aware.
        rerotate_keys: kept keys were rotated anew.
        prompt_tokens: tokens that were processed before the cut.
        cache: the ledger after the cut, before the questions; of the first question's cut if there are several.
        answers: question, answer and new tokens of each; where each question has a cut of its own, its ledger too.
        timings: prefill and eviction in all; over the answers, the mean time to the first token and the joint rate.
        notes: what the policy had to change, in words.
        process_peak_bytes: the most memory that the process ever had; None where the system does not tell.
    """

    policy: str
    budget: dict[str, Any]
    protocol: str
    rerotate_keys: bool
    prompt_tokens: int
    cache: dict[str, Any]
    answers: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    process_peak_bytes: int | None = None


class Talk:
    """Runs questions through sessions, and prints the answers as they come.

    Args:
        console: where answers are printed; None prints nothing.
        max_new_tokens: at most so many for each answer.
    """

    def __init__(self, console: Console | None, max_new_tokens: int) -> None:
        self._console = console
        self._max_new_tokens = max_new_tokens

    def start(
        self,
        make: Callable[[], Session],
        text: str,
        questions: Sequence[str],
        *,
        aware: bool,
        save: Path | None = None,
    ) -> Outcome:
        """Process a text and ask.

        Args:
            make: gives a new session; query-aware, one for each question.
            text: the document.
            questions: asked one by one, each of the cache as the cut left it.
            aware: let the policy see the question.
            save: a file for the cache, written before the first question.
        """
        if not aware:
            session = make()
            outcome = self._ingest(session, text, None, save)
            self._print_heading(outcome)
            answers = [self._ask(session, question) for question in questions]
            return _finish(outcome, questions, answers)
        outcomes, answers = [], []
        for question in questions:
            session = make()
            outcomes.append(self._ingest(session, text, question, save))
            if len(outcomes) == 1:
                self._print_heading(outcomes[0])
            answers.append(self._answer(session, question))
        whole = outcomes[0]
        for other in outcomes[1:]:
            whole.timings["prefill_s"] += other.timings["prefill_s"]
            whole.timings["evict_s"] += other.timings["evict_s"]
        if len(questions) > 1:
            whole.notes.append(
                f"query-aware: the text was processed {len(questions)} times, once for each question, since the cut "
                "depends on it; entries and bytes are those of the first cut"
            )
        whole = _finish(whole, questions, answers)
        for answer, outcome in zip(whole.answers, outcomes, strict=True):
            answer["cache"] = outcome.cache
        return whole

    def resume(self, session: Session, questions: Sequence[str]) -> Outcome:
        """Ask a session that was loaded from a file.

        Raises:
            OptionError: no question for a query-agnostic cache, or another one for a query-aware cache.
        """
        own = session.question
        if own is None and not questions:
            raise OptionError(expected="a question to ask", received="no --question", remedy='add --question "..."')
        if own is not None and questions and list(questions) != [own]:
            raise OptionError(
                expected=f"the question that this cache was cut for, {own!r}",
                received=", ".join(repr(question) for question in questions),
                remedy="leave --question out, or save a query-agnostic cache",
            )
        outcome = _outcome(session, session.cache.get_seq_length(), aware=own is not None)
        self._print_heading(outcome)
        if own is not None:
            return _finish(outcome, [own], [self._answer(session, own)])
        return _finish(outcome, questions, [self._ask(session, question) for question in questions])

    def _ingest(self, session: Session, text: str, question: str | None, save: Path | None) -> Outcome:
        with working("processing the text"):
            tokens = session.ingest(text, question=question)
        if save is not None:
            session.save(save)
        return _outcome(session, tokens, aware=question is not None)

    def _ask(self, session: Session, question: str) -> Answer:
        return self._streamed(
            question,
            lambda on_text: session.ask(question, max_new_tokens=self._max_new_tokens, keep=False, on_text=on_text),
        )

    def _answer(self, session: Session, question: str) -> Answer:
        return self._streamed(
            question, lambda on_text: session.answer(max_new_tokens=self._max_new_tokens, on_text=on_text)
        )

    def _print_heading(self, outcome: Outcome) -> None:
        if self._console is not None:
            words = [outcome.policy, *(f"{name}={value}" for name, value in outcome.budget.items())]
            words = ["full cache"] if outcome.policy == "full" else words
            words += [outcome.protocol, *(["keys rotated anew"] if outcome.rerotate_keys else [])]
            words += [f"{outcome.prompt_tokens:,} tokens"]
            self._console.print(Text(", ".join(words), style="bold"))

    def _streamed(self, question: str, ask: Callable[[Callable[[str], None] | None], Answer]) -> Answer:
        if self._console is None:
            return ask(None)
        self._console.print(Text.assemble(("Q ", "bold cyan"), question))
        stream = WrappedStream(self._console, Text("A ", style="bold green"), indent="  ")
        answer = ask(stream.write)
        stream.end()
        return answer


def record(outcome: Outcome, full: Outcome | None, *, model: str, loaded: Any, seed: int) -> dict[str, Any]:
    """The JSON object of a run."""
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "model_sha256": model_sha256(loaded),
        "dtype": dtype_name(loaded.dtype),
        "policy": outcome.policy,
        "budget": outcome.budget,
        "protocol": outcome.protocol,
        "rerotate_keys": outcome.rerotate_keys,
        "prompt_tokens": outcome.prompt_tokens,
        "answers": outcome.answers,
        "cache": outcome.cache,
        "timings": outcome.timings,
        "process_peak_bytes": outcome.process_peak_bytes,
        "seed": seed,
        "notes": outcome.notes,
        "versions": {
            "kvkeep": version("kvkeep"),
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    }
    if full is not None:
        result["full"] = {"answers": full.answers, "cache": full.cache, "timings": full.timings}
    return result


def print_summary(console: Console, outcome: Outcome, full: Outcome | None) -> None:
    """Entries, bytes and times, the full cache's beside them."""
    outcomes = [outcome] if full is None else [outcome, full]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    for one in outcomes:
        table.add_column(one.policy, justify="right", overflow="fold")

    def row(name: str, value: Callable[[Outcome], str]) -> None:
        table.add_row(name, *(value(one) for one in outcomes))

    row("entries kept", lambda o: f"{o.cache['entries']:,}")
    row("  of", lambda o: f"{o.cache['entries_full']:,}")
    row("held", lambda o: size(o.cache["held_bytes"]))
    row("  payload", lambda o: size(o.cache["payload_bytes"]))
    row("  metadata", lambda o: size(o.cache["metadata_bytes"]))
    if outcome.cache["state_bytes"]:
        row("  state", lambda o: size(o.cache["state_bytes"]))
    row("  share of the full cache", lambda o: f"{o.cache['fraction']:.1%}")
    if outcome.cache["window_bytes"]:
        row("sliding windows, besides", lambda o: size(o.cache["window_bytes"]))
    row("peak", lambda o: size(o.cache["peak_bytes"]))
    row("prefill", lambda o: f"{o.timings['prefill_s']:.2f} s")
    row("  of it eviction", lambda o: f"{o.timings['evict_s']:.2f} s")
    row("time to first token", lambda o: f"{o.timings['time_to_first_token_s']:.2f} s")
    row("decoding", lambda o: f"{o.timings['decode_tokens_per_s']:.1f} tokens/s")
    console.print()
    console.print(table)
    for remark in outcome.notes:
        note(remark)


def _process_peak_bytes() -> int | None:
    """The most memory that this process ever had in RAM, the model included; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _outcome(session: Session, tokens: int, *, aware: bool) -> Outcome:
    return Outcome(
        policy=str(table_to_text(session.cache.policy)),
        budget=session.cache.budget.describe(),
        protocol="query-aware" if aware else "query-agnostic",
        rerotate_keys=session.cache.rerotate_keys,
        prompt_tokens=tokens,
        cache=session.cache.ledger.to_dict(),
        timings={"prefill_s": session.prefill_seconds, "evict_s": session.cache.evict_seconds},
        notes=session.cache.notes,
    )


def _finish(outcome: Outcome, questions: Sequence[str], answers: Sequence[Answer]) -> Outcome:
    outcome.answers = [
        {"question": question, "answer": answer.text, "new_tokens": answer.new_tokens}
        for question, answer in zip(questions, answers, strict=True)
    ]
    first = [answer.time_to_first_token_s for answer in answers]
    outcome.timings["time_to_first_token_s"] = sum(first) / len(first) if first else 0.0
    outcome.timings["decode_tokens_per_s"] = joint_rate(answers)
    outcome.process_peak_bytes = _process_peak_bytes()  # of this run, whatever follows
    return outcome
