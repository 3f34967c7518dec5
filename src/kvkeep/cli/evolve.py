"""`kvkeep evolve`: a search for a policy, and the page of what it found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvkeep.budget import parse_bytes
from kvkeep.cli.bench import Counts, Ratios
from kvkeep.cli.evolve_output import print_search, progress_line, record_of, watching
from kvkeep.cli.loading import load
from kvkeep.cli.options import (
    Count,
    Device,
    Dtype,
    Flag,
    Json,
    ModelName,
    OptionError,
    Protocol,
    Texts,
    Whole,
    packages,
)
from kvkeep.cli.output import note, print_json

if TYPE_CHECKING:
    from kvkeep.evolve.controls import Control
    from kvkeep.evolve.history import History
    from kvkeep.evolve.loop import Progress
    from kvkeep.evolve.mutators.protocol import Mutator
    from kvkeep.evolve.program import Program
    from kvkeep.evolve.promotion import Verdict

TASKS = ("ruler/niah_single_2", "ruler/niah_multikey_1", "ruler/qa_1")


def evolve(
    *,
    model: ModelName,
    out: Path,
    seed_program: Texts = ("frc",),
    mutator: Literal["grammar", "llm", "replay"] = "grammar",
    task: Texts = TASKS,
    length: Count = 1024,
    compression_ratio: float = 0.83,
    protocol: Protocol = "query-aware",
    candidates: Count = 100,
    samples: Count = 8,
    measure: Literal["logprob", "task"] = "logprob",
    gate: float = 0.5,
    reconstruction: Flag = False,
    islands: Count = 4,
    generation: Count = 8,
    seed: Whole = 0,
    llm: str | None = None,
    base_url: str | None = None,
    token_limit: int | None = None,
    style: Literal["rewrite", "diff"] = "rewrite",
    recording: Path | None = None,
    controls: Flag = False,
    promote: Flag = False,
    promote_length: Counts = (),
    promote_ratio: Ratios = (),
    promote_samples: Count = 8,
    unseen_task: Texts = (),
    second_model: str | None = None,
    unsafe_no_sandbox: Flag = False,
    sample_cache_bytes: str = "8GiB",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    executor: Literal["serial", "processes", "ray"] = "serial",
    workers: Count = 1,
    batch_rows: Count = 16,
    json: Json = False,
) -> None:
    """Search for a policy: change programs, run them in a sandbox, keep what does better.

    Each text is processed once, and its keys, values and features stay on disk; a candidate costs a fraction of a
    prefill. A search that was killed goes on when the same command is given again, and comes to the same result. The
    best program so far is in best.py: `kvkeep run --policy program:OUT/best.py`.

    Args:
        out: Folder of the log, the best program and the page.
        seed_program: What to begin with: a seed's name (frc, snapkv-like, v1-generic, expected-attention-like), or a
            file. Repeated, islands begin with different ones.
        mutator: What changes programs: grammar needs no language model; llm asks one; replay repeats a recording.
        task: What samples are made of; see `kvkeep bench`.
        length: Tokens of context, question, answer and chat template together.
        compression_ratio: Fraction of the entries to remove.
        protocol: Was the question visible (query-aware) or hidden (query-agnostic) when entries were evicted.
        candidates: Programs to propose. A larger number in the same folder goes on from there.
        samples: Of each task, for scores; a quarter of them is the first stage. As many again are held out.
        measure: What a score is made of: the log-probability of the right answer, or the task's score of a generated
            one.
        gate: Share of the full cache's score, or of the seed's where that has less, below which stage one ends.
        reconstruction: Also refuse what rebuilds rows of attention worse than random entries do.
        islands: Apart but for migration.
        generation: Candidates that are judged together.
        seed: Of samples and of everything that is left to chance.
        llm: Name of the language model, as its server knows it.
        base_url: Of an OpenAI-compatible server, such as http://localhost:11434/v1.
        token_limit: Prompt and completion tokens in all.
        style: What the language model is asked for: whole functions, or changes.
        recording: A folder that proposals are written to; with --mutator replay, the one that they are read from.
        controls: Also spend as many evaluations on what a search must beat.
        promote: Also measure the best program on samples, lengths, ratios and tasks that the search has not seen.
        promote_length: Lengths for that; the search's and three quarters of it by default.
        promote_ratio: Ratios for that; the search's and 0.75 by default.
        promote_samples: Of each task for that.
        unseen_task: Tasks that the search has no samples of.
        second_model: Another model for that.
        unsafe_no_sandbox: Run programs where the kernel offers no isolation. They can then read your files.
        sample_cache_bytes: Most that recorded samples may take on disk.
        executor: Where candidates are scored; processes and ray load a model for each worker.
        workers: Of the executor.
        batch_rows: So many samples are read by one forward; more of them want more memory.
    """
    with packages("scores are computed with", "bench"):
        from kvkeep.results import statistics  # noqa: F401
    from kvkeep.budget import Budget
    from kvkeep.evolve.campaign import Campaign
    from kvkeep.evolve.cascade import Cascade
    from kvkeep.evolve.controls import CONTROLS
    from kvkeep.evolve.evaluating import Evaluator, ReaderMaker
    from kvkeep.evolve.evaluation import CascadeSettings
    from kvkeep.evolve.history import SearchLog
    from kvkeep.evolve.loop import SearchSettings, search_facts
    from kvkeep.evolve.promotion import PromotionSettings, check_samples
    from kvkeep.evolve.sample_store import SampleStore
    from kvkeep.evolve.samples import SampleSettings
    from kvkeep.evolve.sandbox import Sandbox
    from kvkeep.hf.models import model_sha256
    from kvkeep.hf.pools import make_pool

    _check_mutator(mutator, llm, recording)
    _check_idle(mutator == "llm", "--mutator llm", {"--base-url": base_url, "--token-limit": token_limit})
    for_promotion = {
        "--promote-length": promote_length,
        "--promote-ratio": promote_ratio,
        "--unseen-task": unseen_task,
        "--second-model": second_model,
    }
    _check_idle(promote, "--promote", for_promotion)
    seeds = [_seed(name) for name in dict.fromkeys(seed_program)]
    tasks, unseen = _tasks(task), _tasks(unseen_task)
    _check_unseen(tasks, unseen)
    cascade_settings = CascadeSettings(Budget(compression_ratio=compression_ratio), measure, gate, reconstruction)
    search_settings = SearchSettings(islands=islands, generation=generation, seed=seed)
    first = max(1, samples // 4)
    sample_settings = SampleSettings(
        length=length,
        stage1=first,
        stage2=max(1, samples - first),
        heldout=samples,
        seed=seed,
        protocol=protocol,
    )
    folder, store = out.expanduser(), SampleStore(limit_bytes=parse_bytes(sample_cache_bytes))
    with ExitStack() as stack:
        sandbox = stack.enter_context(Sandbox(unsafe=unsafe_no_sandbox))
        loaded = load(model, dtype=dtype, device=device)
        facts = {
            "model": model,
            "model_sha256": model_sha256(loaded[0]),
            "dtype": str(loaded[0].dtype).removeprefix("torch."),
            "tasks": [one.name for one in tasks],
            "samples": sample_settings.to_dict(),
            "device": device,
            "isolation": sandbox.isolation,
            "llm": llm,
            "style": style if mutator == "llm" else None,
            "versions": _versions(),
        }
        evaluator = Evaluator(*loaded, generate=measure == "task", batch_rows=batch_rows)
        maker = ReaderMaker(model, dtype, device, evaluator.generate)
        pool = stack.enter_context(make_pool(executor, maker, workers, evaluator.read_together))
        elsewhere = PromotionSettings(
            lengths=promote_length or tuple(dict.fromkeys((length, 3 * length // 4))),
            ratios=promote_ratio or tuple(dict.fromkeys((compression_ratio, 0.75))),
            seeds=(seed, seed + 1),
            protocols=("query-agnostic", "query-aware"),
            samples=max(2, promote_samples),
            search=sample_settings,
        )
        others = [] if second_model is None else [(second_model, load(second_model, dtype=dtype, device=device))]
        if promote:  # now, and not at the end of a long search
            for _, tokenizer in (loaded, *(other for _, other in others)):
                check_samples(elsewhere, tokenizer, [*tasks, *unseen])
        with watching() as watch:
            recorded = store.collect(
                *loaded,
                tasks,
                sample_settings,
                splits=("probe", "stage1", "stage2"),
                on_sample=lambda done, total: watch("recording samples", done, total),
            )
        changing = stack.enter_context(_mutator(mutator, llm, base_url, token_limit, style, seed, recording, facts))
        log = stack.enter_context(
            SearchLog(folder, search_facts(search_settings, cascade_settings, changing, seeds, **facts))
        )
        with watching() as watch:
            cascade = Cascade(recorded, cascade_settings, evaluator.read_on(pool), sandbox)
            campaign = Campaign(log, search_settings, cascade, changing, seeds)

            def on_progress(progress: Progress) -> None:
                watch(progress_line(progress), progress.done, progress.total)
                if not progress.stage:  # a generation is written down: the best so far can be looked at
                    _write_best(folder, log.history)

            result = campaign.search(candidates, on_progress)
            _write_best(folder, result.history)
            controls_run: list[Control] = []
            if controls:
                controls_run = campaign.control(
                    CONTROLS,
                    candidates,
                    _fresh(changing, mutator),
                    lambda name, done, total: watch(f"control {name}", done, total),
                )
            found: list[Verdict] = []
            if promote:
                further = [(name, Evaluator(*other, batch_rows=batch_rows)) for name, other in others]
                for name, reading in ((model, evaluator), *further):
                    found = campaign.promote(
                        elsewhere,
                        reading,
                        sandbox,
                        store,
                        tasks,
                        unseen,
                        model_name=name,
                        on_cell=lambda cell, done, total: watch(f"elsewhere: {cell}", done, total),
                    )
    page = _page(folder)
    if json:
        print_json(record_of(folder, result, controls_run, found, page))
        return
    print_search(folder, result, controls_run, found, page)


def _seed(name: str) -> Program:
    from kvkeep.evolve.program import SEEDS, read_program, seed_program

    return seed_program(name) if name in SEEDS else read_program(name)


def _tasks(names: tuple[str, ...]) -> list[Any]:
    from kvkeep.tasks.registry import expand, task

    return [task(name) for name in expand(names)]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("kvkeep", "torch", "transformers", "numpy")}


def _check_mutator(name: str, llm: str | None, recording: Path | None) -> None:
    """Refuse options that do not go together, before a model is loaded."""
    if (name == "llm") != (llm is not None) or (name == "replay" and recording is None):
        raise OptionError(
            expected="--llm MODEL with --mutator llm and only there, and --recording FOLDER with --mutator replay",
            received=f"--mutator {name}, --llm {llm}, --recording {recording}",
            remedy="for example --mutator llm --llm qwen3:8b --base-url http://localhost:11434/v1",
        )


def _check_idle(wanted: bool, by: str, options: dict[str, Any]) -> None:
    """Refuse options that do nothing without another one."""
    given = [name for name, value in options.items() if value]
    if given and not wanted:
        raise OptionError(
            expected=f"{by} beside {', '.join(given)}",
            received=f"no {by}, without which they do nothing",
            remedy=f"add {by}, or leave them out",
        )


def _check_unseen(tasks: list[Any], unseen: list[Any]) -> None:
    if seen := sorted({task.name for task in tasks} & {task.name for task in unseen}):
        raise OptionError(
            expected="as --unseen-task only what the search has no samples of",
            received=f"{', '.join(seen)}, which --task names too",
            remedy="leave it out of one of them",
        )


@contextmanager
def _mutator(
    name: str,
    llm: str | None,
    base_url: str | None,
    token_limit: int | None,
    style: Any,
    seed: int,
    recording: Path | None,
    facts: dict[str, Any],
) -> Iterator[Mutator]:
    """The mutator that options name, writing down what it proposes where a folder for that is given."""
    from kvkeep.evolve.mutators.grammar import Grammar
    from kvkeep.evolve.mutators.replay import Recording, Replay

    if name == "replay" and recording is not None:
        yield Replay(recording.expanduser())
        return
    if name == "llm" and llm is not None:
        from kvkeep.evolve.mutators.endpoint import Options
        from kvkeep.evolve.mutators.llm import LanguageModel

        made: Mutator = LanguageModel(Options(llm, base_url), style, token_limit=token_limit)
    else:
        made = Grammar()
    if recording is None:
        yield made
        return
    recorder = Recording(made, recording.expanduser(), {"mutator": name, "seed": seed, **facts})
    try:
        yield recorder
    finally:
        recorder.close()


def _fresh(mutator: Mutator, name: str) -> Mutator:
    """What makes children of the seed for the control: the grammar is as good as new; a language model pays on."""
    from kvkeep.evolve.mutators.grammar import Grammar

    return mutator if name == "llm" else Grammar()


def _write_best(folder: Path, history: History) -> None:
    from kvkeep.whole_files import write_whole

    if history.best is not None:
        write_whole(folder / "best.py", history.best.source)  # who reads it meanwhile finds the former one


def _page(folder: Path) -> Path | None:
    """The report; None where the packages for it are missing."""
    try:
        from kvkeep.evolve.report import write_search_report
    except ImportError:
        note('no page: pip install "kvkeep[report]"')
        return None
    return write_search_report(folder)
