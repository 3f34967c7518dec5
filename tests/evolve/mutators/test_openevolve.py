"""OpenEvolve as the engine: a real run against a server that answers as a language model would."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvkeep.evolve.mutators import openevolve_evaluator
from kvkeep.evolve.mutators.endpoint import Options
from kvkeep.evolve.mutators.openevolve import NOT_EVALUATED, run_openevolve
from kvkeep.evolve.mutators.protocol import MutatorError
from kvkeep.evolve.program import Program, seed_program

from .chat_server import Reply, serving

FRC = seed_program("frc")


def answer(weight: float) -> str:
    return f"```python\n{FRC.source.replace('0.55', repr(weight))}\n```"


def local_weight(source: str) -> float:
    """Of a program that is FRC but for that weight."""
    return float(source.split(" * local")[0].rsplit(" ", 1)[1])


@pytest.mark.slow
def test_a_run_finds_the_best_that_was_evaluated(tmp_path: Path) -> None:
    pytest.importorskip("openevolve", reason="the extra openevolve")
    outside = answer(0.8).replace("import numpy as np", "import numpy as np\nimport sys")
    answers = [answer(0.7), answer(0.9).replace("CHUNK = 20", "import os\nCHUNK = 20"), outside, answer(0.95)]
    sources: list[str] = []

    def evaluate(source: str) -> Mapping[str, float]:
        sources.append(source)
        weight = local_weight(source)
        return {"accuracy": 1.0} if weight == 0.95 else {"combined_score": weight - 5, "accuracy": weight}

    def reply(number: int, body: dict[str, Any]) -> Reply:
        return Reply(answers[number % 4])

    with serving(reply) as server:
        found = run_openevolve(
            tmp_path,
            FRC,
            evaluate,
            Options("m", server.base_url, retries=0, timeout=20),
            iterations=4,
            settings={"database": {"num_islands": 1}},
        )
    told = server.requests[0]["messages"][0]["content"]
    assert "neighbor_attn_density" in told
    # What imports is refused before it is evaluated; what has no score loses, although scores are negative.
    assert all("import os" not in source for source in sources)
    assert all("import sys" not in source for source in sources)  # outside the block: undone
    assert local_weight(found.program.source) == 0.8
    assert found.metrics["combined_score"] == pytest.approx(-4.2)
    assert found.evaluations == 5
    assert found.refused == 2


@pytest.mark.slow
def test_an_evaluation_that_breaks_stops_the_run(tmp_path: Path) -> None:
    pytest.importorskip("openevolve", reason="the extra openevolve")

    def evaluate(source: str) -> Mapping[str, float]:
        raise ZeroDivisionError("in the evaluation")

    with serving(lambda number, body: Reply(answer(0.6))) as server, pytest.raises(ZeroDivisionError):
        run_openevolve(tmp_path, FRC, evaluate, Options("m", server.base_url, retries=0), iterations=3)


def test_without_openevolve_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(MutatorError, match=r"kvkeep\[openevolve\]"):
        run_openevolve(tmp_path, FRC, lambda source: {}, Options("m"), iterations=1)


def test_a_version_that_only_hints_at_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.2")
    with pytest.raises(MutatorError, match=r"0\.4 or newer"):
        run_openevolve(tmp_path, FRC, lambda source: {}, Options("m"), iterations=1)


def test_an_evaluator_that_is_gone_gives_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(Program(FRC.source).source)
    monkeypatch.setenv(openevolve_evaluator.URL, "http://127.0.0.1:9/")
    monkeypatch.setenv(openevolve_evaluator.KEY, "k")
    monkeypatch.setenv(openevolve_evaluator.SECONDS, "2")
    assert openevolve_evaluator.evaluate(str(program)) == {"combined_score": NOT_EVALUATED}
    assert openevolve_evaluator.evaluate(str(tmp_path / "none.py")) == {"combined_score": NOT_EVALUATED}
