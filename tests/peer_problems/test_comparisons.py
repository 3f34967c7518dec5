"""Comparisons that mislead: figures that another protocol made, and a rise that is noise."""

from __future__ import annotations

import random

import torch

from kvkeep import KeepCache, RepeatPrompt, Session
from kvkeep.hf.prompting import Prompting
from kvkeep.hf.shared_prompt import SharedPrompt
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.results import FULL, Memory, Row
from kvkeep.results.metrics import measurements, metric_named
from kvkeep.results.report.tables import blocks
from kvkeep.results.statistics import holm, mean_interval, paired_difference
from kvkeep.testing import fake_model

from .common import held

TEXT = "The boat is red. The door is blue. The hat is green. " * 2
RATIOS = [tenth / 10 for tenth in range(1, 10)]


def test_p25_every_road_asks_for_the_same_repetition() -> None:
    """KVzip's figures differed between two repositories, since the model was asked otherwise: here one request serves
    caches, sessions and the benchmark. Parity with kvpress to the entry is in tests/policies/test_kvzip.py, and what
    differs on purpose in docs/from-kvpress.md."""
    model, tokenizer = fake_model(dtype=torch.float64, layers=3)
    prompting = Prompting(tokenizer)
    context = prompting.context(TEXT)
    assert prompting.repeat_prompt() == RepeatPrompt.of(tokenizer)
    budget = {"entries": 20}

    session = Session(model, tokenizer, "kvzip", **budget)
    session.ingest(TEXT)
    cache = KeepCache(model, "kvzip", repeat_prompt=prompting.repeat_prompt(), **budget)
    with torch.no_grad():
        model(torch.tensor([context.ids]), **{CACHE_ARGUMENT: cache})
    shared = SharedPrompt(model, context.ids, ["kvzip"], repeat_prompt=prompting.repeat_prompt())
    cut = shared.cut("kvzip", cache.budget)
    bare = KeepCache(model, "kvzip", **budget)
    with torch.no_grad():
        model(torch.tensor([context.ids]), **{CACHE_ARGUMENT: bare})

    for layer in range(3):
        assert held(session.cache, layer) == held(cache, layer) == held(cut, layer)
    assert any(held(bare, layer) != held(cache, layer) for layer in range(3))  # another request is another policy


def coins(name: str, ratio: float) -> list[Row]:
    """Twenty contexts, answered right as a coin falls, whatever was kept."""
    draw = random.Random(f"{name} {ratio}")
    kept = round(1000 * (1 - ratio))
    memory = Memory(held_bytes=kept, full_bytes=1000, fraction=kept / 1000, peak_bytes=1000, payload_bytes=kept)
    return [
        Row(
            sample=f"t/{index}",
            task="t",
            cluster=f"t/{index}",
            policy=name,
            budget={"compression_ratio": ratio},
            protocol="query-agnostic",
            memory=memory,
            model="none",
            model_sha256="0" * 64,
            score=float(draw.random() < 0.5),
        )
        for index in range(20)
    ]


def test_p26_a_score_that_rises_with_compression_is_shown_with_its_interval_and_not_called_a_win() -> None:
    """Accuracy seemed to rise with compression: 20 questions at nine ratios have a best one by luck alone."""
    score = metric_named("score")
    full, sweep = coins(FULL, 0.0), [coins("random", ratio) for ratio in RATIOS]
    estimates = [mean_interval(measurements(rows, score)) for rows in [full, *sweep]]
    assert max(estimate.mean for estimate in estimates[1:]) >= estimates[0].mean + 0.1  # looks like a rise
    for estimate in estimates:
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.high - estimate.low > 0.2  # and is within what twenty questions can tell
    pairs = [paired_difference(measurements(rows, score), measurements(full, score)) for rows in sweep]
    assert min(holm([pair.p_value for pair in pairs])) >= 0.05

    (table,) = [block for block in blocks([*full, *(row for rows in sweep for row in rows)]) if block.metric is score]
    for cell in [cell for cells in table.rows.values() for cell in cells]:
        assert cell is not None
        assert cell.interval.startswith("[")
        assert cell.n == "n 20"
