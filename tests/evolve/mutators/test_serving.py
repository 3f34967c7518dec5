"""A real language model behind a real endpoint: `transformers serve` with the small embedded model.

Its answers are hardly ever programs. What is tested is that the mutator understands such a server, and survives it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvkeep.evolve.guard import check_source
from kvkeep.evolve.mutators.endpoint import Options
from kvkeep.evolve.mutators.llm import LanguageModel
from kvkeep.evolve.mutators.protocol import Parent
from kvkeep.evolve.program import seed_program
from kvkeep.hf.embedded import fetch_model

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Base URL and name of the model."""
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason="transformers[serving]")
    model = str(_servable(fetch_model("smollm2-135m"), tmp_path_factory.mktemp("model")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        *(str(Path(sys.executable).with_name("transformers")), "serve", model),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "bfloat16"),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with open(log, "wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 240
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1", model
    finally:
        server.kill()
        server.wait()


def _servable(folder: Path, copy: Path) -> Path:
    """The same model with its architecture in its configuration, which a server asks for and a GGUF does not tell."""
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    config = copy / "config.json"
    told = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps(told | {"architectures": ["LlamaForCausalLM"]}))
    return copy


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def test_a_small_model_is_survived_and_counted(endpoint: tuple[str, str]) -> None:
    base_url, model = endpoint
    options = Options(model, base_url, temperature=0.8, max_tokens=48, timeout=400, retries=0)
    mutator = LanguageModel(options, concurrency=1)
    parent = Parent(seed_program("v1-generic"), 41.0)
    proposals = [mutator.propose([parent], np.random.default_rng(seed)) for seed in range(2)]
    assert mutator.requests == 2
    assert sum(mutator.rejections.values()) == sum(proposal.program is None for proposal in proposals)
    for proposal in proposals:
        assert proposal.rejection not in ("timeout", "connection", "server_error", "bad_request", "bad_response")
        if proposal.program is not None:
            check_source(proposal.program.source)
    # What the server counts: more than a thousand tokens of prompt, at most 48 of an answer.
    assert mutator.spend.spent == sum(proposal.tokens for proposal in proposals)
    assert all(1000 < proposal.tokens < 8000 for proposal in proposals)
