"""Policies with statistics of a model, and moved keys, against what kvpress 0.5.5 decided with the same statistics."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from kvkeep.calibrated import LayerStatistics
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.calibrations import Calibration
from kvkeep.hf.models import model_sha256
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.policies import parse_policy
from kvkeep.testing import gathered

from ..kvpress_fixtures import FOLDER, MODEL_FOLDER, load
from .test_kvpress_parity import HEADS, LAYERS, LENGTH, observations


@cache
def theirs() -> dict[str, Tensor]:
    return load_file(FOLDER / "calibrated.safetensors")


def known(layer: int) -> LayerStatistics:
    names = ("query_mean", "query_covariance", "filters", "copying")
    return LayerStatistics(**{name: theirs()[name][layer] for name in names})


@pytest.mark.parametrize(
    ("policy", "scores", "forced"),
    [("qfilter", "qfilter", 0), ("expected-attention[statistics=model]", "expected_attention_stats", 4)],
)
def test_scores_are_the_same(policy: str, scores: str, forced: int) -> None:
    parsed = parse_policy(policy)
    for index, seen in enumerate(observations(load().cases["knorm@0.5"])):
        shown = gathered(replace(seen, statistics={"model": known(index)}), parsed.needs())
        ours = parsed.judge(shown).scores[0, :, forced:]
        torch.testing.assert_close(ours, theirs()[f"scores/{scores}"][index][:, forced:], rtol=1e-5, atol=2e-6)


@pytest.fixture(scope="module", name="model")
def _model() -> Any:
    return LlamaForCausalLM.from_pretrained(MODEL_FOLDER, attn_implementation="sdpa").eval().requires_grad_(False)


@pytest.fixture(scope="module", name="file")
def _file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    facts = {"model_sha256": model_sha256(model)}
    calibration = Calibration({layer: known(layer) for layer in range(LAYERS)}, facts)
    return calibration.save(tmp_path_factory.mktemp("calibrations") / "theirs.safetensors")


def fed(model: Any, policy: str, **options: Any) -> KeepCache:
    kept = KeepCache(model, policy, **options)
    with torch.no_grad():
        model(load().input_ids[None], **{CACHE_ARGUMENT: kept})
    return kept


@pytest.mark.parametrize(
    ("policy", "scores"), [("qfilter", "qfilter"), ("expected-attention", "expected_attention_stats")]
)
def test_the_same_entries_stay(model: Any, file: Path, policy: str, scores: str) -> None:
    ours = fed(model, f"{policy}[statistics={file}]", compression_ratio=0.5)
    table = theirs()[f"scores/{scores}"]
    for layer in range(LAYERS):
        for head in range(HEADS):
            best = table[layer, head].topk(118).indices.sort().values
            assert ours.kept_positions(layer, 0, head).tolist() == best.tolist()


def test_the_same_heads_stream(model: Any, file: Path) -> None:
    kept = theirs()["kept/duo"]
    entries = int(kept.sum()) // (LAYERS * HEADS)
    assert entries * LAYERS * HEADS == int(kept.sum())
    assert sorted({int(n) for n in kept.sum(-1).flatten()}) == [21, LENGTH]
    ours = fed(model, f"duo[sinks=4,recent=17,statistics={file}]", entries=entries)
    for layer in range(LAYERS):
        for head in range(HEADS):
            assert ours.kept_positions(layer, 0, head).tolist() == kept[layer, head].nonzero()[:, 0].tolist()


def test_moved_keys_say_the_same(model: Any) -> None:
    """kvpress counts on from 118, ours from 237: the same distances."""
    with torch.no_grad():
        logits = {
            moved: model(
                load().question_ids[None],
                **{
                    CACHE_ARGUMENT: fed(model, "snapkv[window=32,kernel=5]", compression_ratio=0.5, rerotate_keys=moved)
                },
            ).logits[0]
            for moved in (True, False)
        }
    torch.testing.assert_close(logits[True], theirs()["logits/rerotated"], rtol=0, atol=1e-3)
    assert (logits[False] - logits[True]).abs().max() > 0.05
