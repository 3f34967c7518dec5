"""OpenEvolve as the engine of a search: it keeps the programs and asks the language model, kvkeep judges.

The built-in search needs none of it. Whoever has a set-up for OpenEvolve uses kvkeep's evaluation and guards by this.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError
from kvkeep.evolve.guard import PolicyRefused, check_source
from kvkeep.evolve.mutators import openevolve_evaluator as evaluator
from kvkeep.evolve.mutators.endpoint import BASE_URL, KEY, Options
from kvkeep.evolve.mutators.openevolve_evaluator import NOT_EVALUATED
from kvkeep.evolve.mutators.prompting import Style, interface
from kvkeep.evolve.mutators.protocol import MutatorError
from kvkeep.evolve.program import Program, ProgramError

# Edits outside the block are undone from this version on.
OLDEST = (0, 4)

SCORE = "combined_score"

Evaluate = Callable[[str], Mapping[str, float]]

_MARKERS = "\n\nKeep both marker lines of the block, and everything outside it, exactly as they are."


@dataclass(frozen=True)
class Found:
    """What OpenEvolve found best.

    Attributes:
        program: that passed `check_source`.
        metrics: as its evaluation gave them.
        evaluations: how many programs were sent to be judged.
        refused: how many of them were not judged.
    """

    program: Program
    metrics: dict[str, float]
    evaluations: int
    refused: int


def run_openevolve(
    folder: str | os.PathLike[str],
    seed: Program,
    evaluate: Evaluate,
    options: Options,
    *,
    iterations: int,
    style: Style = "rewrite",
    settings: Mapping[str, Any] | None = None,
    evaluation_seconds: float = 3600.0,
    random_seed: int = 0,
) -> Found:
    """Let OpenEvolve search, in a process of its own, with all evaluations in this one.

    Only what is inside the block may change; programs that `check_source` refuses are not evaluated. What is not fully
    evaluated gets -1e9, so that it loses against everything that is.

    Args:
        folder: for OpenEvolve's files, its log and checkpoints.
        seed: to begin with.
        evaluate: gives the metrics of a source, among them `combined_score`, higher is better; it may raise a
            `KvkeepError` for a program that is invalid. It is called by one thread at a time.
        options: the language model; `extra`, `max_tokens_name` and `seeded` do not reach it.
        iterations: programs to propose.
        style: whole functions, or SEARCH/REPLACE changes.
        settings: more of OpenEvolve's configuration, such as {"database": {"num_islands": 2}}.
        evaluation_seconds: the most that one evaluation may take, waiting for others included.
        random_seed: of OpenEvolve; with several workers its order is not repeatable all the same.

    Raises:
        MutatorError: OpenEvolve is missing, too old, or ends with an error.
        Exception: whatever else `evaluate` raises; OpenEvolve is stopped then.
    """
    _check_version()
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    first, config = folder / "initial_program.py", folder / "config.yaml"
    first.write_text(seed.source, encoding="utf-8")
    plain = _configuration(options, style, evaluation_seconds, random_seed)
    config.write_text(json.dumps(_merged(plain, settings or {}), indent=2), encoding="utf-8")  # JSON is YAML
    command = [
        *(sys.executable, "-m", "openevolve.cli", str(first), str(Path(evaluator.__file__).resolve())),
        *("--config", str(config), "--output", str(folder / "output"), "--iterations", str(iterations)),
    ]
    judge = _Judge(evaluate)
    with _serving(judge) as url:
        environment = os.environ | {
            evaluator.URL: url,
            evaluator.KEY: judge.key,
            evaluator.SECONDS: str(evaluation_seconds),
            KEY: os.environ.get(KEY) or "none",
        }
        status = _run(command, environment, folder, judge)
    if judge.error is not None:
        raise judge.error
    if status:
        raise MutatorError(
            expected="OpenEvolve to end without an error",
            received=f"status {status}: {_last_line(folder / 'openevolve.log')}",
            remedy=f"see {folder / 'openevolve.log'}",
        )
    return _found(folder, seed, judge)


def _check_version() -> None:
    try:
        found = metadata.version("openevolve")
    except metadata.PackageNotFoundError:
        found = "none"
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise MutatorError(
            expected=f"openevolve {'.'.join(map(str, OLDEST))} or newer",
            received=found,
            remedy='pip install "kvkeep[openevolve]"; the built-in search needs no other engine',
        )


def _configuration(options: Options, style: Style, seconds: float, random_seed: int) -> dict[str, Any]:
    base_url = options.base_url or os.environ.get(BASE_URL)
    model = {
        "name": options.model,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "timeout": math.ceil(options.timeout),
        "retries": options.retries,
        "api_key": "${" + KEY + "}",
    }
    return {
        "random_seed": random_seed,
        "diff_based_evolution": style == "diff",
        "enforce_evolve_blocks": True,
        "checkpoint_interval": 10,
        "llm": ({"api_base": base_url} if base_url else {}) | {"api_key": "${" + KEY + "}", "models": [model]},
        "prompt": {"system_message": interface() + _MARKERS},
        # No cascade here, since kvkeep's own is behind the evaluation; no second evaluation of what failed; a limit of
        # time that never comes first, since OpenEvolve gives what it has stopped waiting for a score of 0.
        "evaluator": {
            "cascade_evaluation": False,
            "max_retries": 0,
            "parallel_evaluations": 1,
            "timeout": math.ceil(seconds) + 600,
        },
    }


def _merged(plain: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(plain)
    for name, value in more.items():
        former = merged.get(name)
        merged[name] = _merged(former, value) if isinstance(former, dict) and isinstance(value, Mapping) else value
    return merged


class _Judge:
    """Evaluates what OpenEvolve sends, one program at a time.

    Attributes:
        key: that a request must carry: other users of the machine may see the port.
        scores: metrics by the digest of the program.
        evaluations: how many were sent.
        refused: how many were not judged.
        error: what `evaluate` raised, if that was no refusal.
        failed: set with it.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self.key = secrets.token_hex(16)
        self.scores: dict[str, dict[str, float]] = {}
        self.evaluations = self.refused = 0
        self.error: Exception | None = None
        self.failed = threading.Event()
        self._evaluate, self._lock = evaluate, threading.Lock()

    def metrics(self, source: str) -> dict[str, float]:
        """Of a program; `NOT_EVALUATED` where there are none."""
        with self._lock:
            self.evaluations += 1
            try:
                program = Program(source)
                check_source(source)
                metrics = {name: float(value) for name, value in self._evaluate(source).items()}
            except (KvkeepError, ProgramError, PolicyRefused):
                metrics = {}
            except Exception as error:  # handed on to the caller by run_openevolve
                self.error = error
                self.failed.set()
                metrics = {}
            if not metrics or SCORE not in metrics or not all(map(math.isfinite, metrics.values())):
                self.refused += 1
                return {SCORE: NOT_EVALUATED}
            self.scores[program.digest] = metrics
            return metrics


@contextlib.contextmanager
def _serving(judge: _Judge) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if not hmac.compare_digest(self.headers.get("X-Key", ""), judge.key):
                self.send_error(403)
                return
            source = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode(errors="replace")
            content = json.dumps(judge.metrics(source)).encode()
            with contextlib.suppress(OSError):  # it may have been stopped meanwhile
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _run(command: list[str], environment: Mapping[str, str], folder: Path, judge: _Judge) -> int:
    """The status of OpenEvolve's process; it and its workers end when this ends, whatever the reason."""
    with open(folder / "openevolve.log", "ab") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while (status := process.poll()) is None and not judge.failed.wait(0.1):
                pass
            return 0 if status is None else status
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _found(folder: Path, seed: Program, judge: _Judge) -> Found:
    """The best program, as judged here: what OpenEvolve says of a score is not needed."""
    best = folder / "output" / "best" / "best_program.py"
    try:
        program = Program(best.read_text(encoding="utf-8"), "openevolve")
        check_source(program.source)
        if program.with_block(seed.block).source != seed.with_block(seed.block).source:
            raise MutatorError(
                expected="a program that differs from the seed inside the block only",
                received=f"{best}",
                remedy="check enforce_evolve_blocks in the settings",
            )
        return Found(program, judge.scores[program.digest], judge.evaluations, judge.refused)
    except (OSError, KeyError, ProgramError, PolicyRefused) as error:
        raise MutatorError(
            expected="a best program that was evaluated",
            received=f"{type(error).__name__}: {error}",
            remedy=f"see {folder / 'openevolve.log'}; was any program evaluated at all?",
        ) from error


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "nothing"
