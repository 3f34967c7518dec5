"""Copies of a model that kvkeep is attached to are attached models of their own."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvkeep import CacheStateError, KeepCache, detach
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.testing import fake_model

IDS = torch.arange(3, 60)[None]


def through_a_file(model: PreTrainedModel) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def logits(model: Any, cache: KeepCache | None = None) -> torch.Tensor:
    """Of the text and one token more."""
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    with torch.no_grad():
        if cache is not None:
            model(IDS, **given)
            return model(IDS[:, :1], **given).logits
        return model(IDS).logits


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_copy_serves_caches_of_its_own(architecture: str, copied: Callable[[Any], Any]) -> None:
    model, _ = fake_model(architecture)
    plain = logits(model)
    expected = logits(model, KeepCache(model, "snapkv", entries=8))
    twin = copied(model)
    assert torch.equal(logits(twin), plain)
    cache = KeepCache(twin, "snapkv", entries=8)
    assert torch.equal(logits(twin, cache), expected)
    assert cache.model is twin
    assert len(twin.get_decoder()._forward_pre_hooks) == len(twin.get_decoder()._forward_hooks) == 1
    with pytest.raises(CacheStateError, match="the model that this cache was made for"):
        model(IDS, **{CACHE_ARGUMENT: KeepCache(twin, "snapkv", entries=8)})


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_copies_are_detached_one_by_one(copied: Callable[[Any], Any]) -> None:
    model, _ = fake_model()
    cache = KeepCache(model, "snapkv", entries=8)
    twin = copied(model)
    detach(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert not twin.get_decoder()._forward_pre_hooks
    assert not twin.get_decoder()._forward_hooks
    assert torch.equal(logits(twin), logits(model))
    logits(model, cache)  # the original is still attached
    assert cache.ledger.entries_per_cell[0] == [[9, 9]]
    detach(model)
    assert not model.get_decoder()._forward_pre_hooks


def test_a_hook_that_comes_after_a_copy_is_one_more(tmp_path: Path) -> None:
    """Hooks are numbered by a counter of the process: one that starts anew must not give out a number twice."""
    model, _ = fake_model()
    KeepCache(model, "snapkv", entries=8)
    torch.save(model, tmp_path / "model.pt")
    torch.save(logits(model), tmp_path / "logits.pt")
    code = """
import torch
model = torch.load("model.pt", weights_only=False)
model.get_decoder().register_forward_pre_hook(lambda *_: None)
assert len(model.get_decoder()._forward_pre_hooks) == 2
ids = torch.arange(3, 60)[None]
with torch.no_grad():
    assert torch.equal(model(ids).logits, torch.load("logits.pt"))
from kvkeep import KeepCache
cache = KeepCache(model, "snapkv", entries=8)
model.generate(ids, past_key_values=cache, max_new_tokens=2)
assert cache.ledger.entries_per_cell[0] == [[9, 9]]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
