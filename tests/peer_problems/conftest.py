from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from ..hf.tiny import tiny_model


@pytest.fixture(scope="session")
def _llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def llama(_llama: PreTrainedModel) -> PreTrainedModel:
    """A tiny Llama in float64. All tests share it: none may change it."""
    return _llama
