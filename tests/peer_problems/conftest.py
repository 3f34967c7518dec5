from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from ..hf.tiny import tiny_model


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models spend more time on waking threads than on numbers: ten times more on a busy machine."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture(scope="session")
def _llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def llama(_llama: PreTrainedModel) -> PreTrainedModel:
    """A tiny Llama in float64. All tests share it: none may change it."""
    return _llama
