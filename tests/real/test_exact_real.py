"""Exactness on the real models: transformers' own tokens at ratio 0, dense attention with `-inf` where entries went."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvkeep import KeepCache, attached, load_model
from kvkeep.data import load_demo
from kvkeep.hf.support import CACHE_ARGUMENT
from tests.hf.dense_reference import dense_logits, kept_logits

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def model_and_ids(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Tensor]:
    model, tokenizer = load_model(request.param)
    ids = tokenizer(load_demo().text, return_tensors="pt")["input_ids"]
    return model, ids


def test_ratio_zero_generates_transformers_tokens(model_and_ids: tuple[PreTrainedModel, Tensor]) -> None:
    model, ids = model_and_ids
    prompt = ids[:, :400]
    options = {"max_new_tokens": 32, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(prompt, **options)
    with attached(model):
        cache = KeepCache(model, "snapkv", compression_ratio=0.0)
        ours = model.generate(prompt, **options, **{CACHE_ARGUMENT: cache})
    differences = 0
    for step, (a, b) in enumerate(zip(expected.sequences[0, 400:], ours.sequences[0, 400:], strict=False)):
        if a != b:
            best = expected.logits[step][0].topk(2).values
            assert best[0] - best[1] < 1e-4, f"step {step}: {a} became {b} although the two were apart"
            differences += 1
            break  # what follows continues another text
    print(
        f"{type(model).__name__}: {differences} near ties resolved otherwise in {ours.sequences.shape[1] - 400} steps"
    )


@pytest.mark.parametrize("policy", ["snapkv", "snapkv+ada", "frc", "knorm+threshold"])
def test_eviction_equals_dense_attention(model_and_ids: tuple[PreTrainedModel, Tensor], policy: str) -> None:
    model, ids = model_and_ids
    pieces = [ids[:, :600], ids[:, 600:612], ids[:, 612:613], ids[:, 613:614]]
    with attached(model):
        cache = KeepCache(model, policy, compression_ratio=0.7)
        ours = torch.cat(kept_logits(model, cache, pieces)[1:], dim=1)
    eager, sdpa = (torch.cat(dense_logits(model, cache, pieces, kernel=k)[1:], dim=1) for k in ("eager", "sdpa"))
    full = torch.cat(dense_logits(model, None, pieces, kernel="sdpa")[1:], dim=1)
    noise, difference, effect = ((a - sdpa).abs().max() for a in (eager, ours, full))
    print(f"{type(model).__name__} {policy}: {difference:.2e} against {noise:.2e} between eager and sdpa")
    assert difference <= 2 * noise
    assert effect > 100 * noise, "eviction changed nothing; the test shows nothing"
