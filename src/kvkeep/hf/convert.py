"""From a GGUF file to a model folder of transformers, and the check that a model reads prose as it should.

transformers reads GGUF files itself, and keeps to itself when it reads them wrongly: between its releases a tokenizer
came out that splits every text into unknown tokens, with the right weights. So a converted model proves itself on a
bundled page of public-domain prose, after the conversion and at each load.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kvkeep.data import check_text
from kvkeep.errors import ModelFileError
from kvkeep.hf.embedded import WEIGHTS, ModelRecord

CHECK_TOKENS = 512
QUICK_CHECK_TOKENS = 128


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and log lines, which come back afterwards as they were."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF file into a float32 model on the CPU and its tokenizer. The weights are dequantised.

    Raises:
        ModelFileError: transformers cannot read it.
    """
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    # Where transformers can also keep the blocks packed, say that they are to be unpacked.
    packed = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _keeps_blocks() else {}
    try:
        # One of transformers' progress bars here obeys no switch and writes to stderr; errors are raised, not written.
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, dtype=torch.float32, attn_implementation="sdpa", **options, **packed
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    except Exception as error:  # whatever a reader of binary files raises on a file that it does not understand
        raise ModelFileError(
            expected=f"a GGUF file that transformers {transformers.__version__} can read: {path}",
            received=f"{type(error).__name__}: {error}",
            remedy="if it is complete and its architecture is supported, check that `accelerate` and `gguf` are there",
        ) from error
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    if hasattr(model, "hf_quantizer"):  # a plain dense model from here on, which can be saved and moved
        del model.hf_quantizer
    return model.eval(), tokenizer


def _keeps_blocks() -> bool:
    return hasattr(transformers, "GgufConfig")


def convert_gguf(record: ModelRecord, gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a model folder, and check the model as read back from that folder.

    Raises:
        ModelFileError: the file cannot be read, or the model fails the check.
    """
    model, tokenizer = read_gguf(gguf)
    write_folder(model, tokenizer, folder)
    del model, tokenizer
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    check_model(model.eval(), tokenizer, record, tokens=CHECK_TOKENS)


def write_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write config, generation config, tokenizer, chat template and `model.safetensors` into an existing folder.

    Tensors that share their storage (tied embeddings) are written once, under the name that comes first in the model;
    transformers ties them again from the config.
    """
    state: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if key not in seen:
            seen.add(key)
            state[name] = tensor.contiguous()
    with quiet():
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
        model.config.architectures = [type(model).__name__]  # a .gguf file has none; servers ask for it
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # safetensors writes for the owner only; a shared cache folder wants what the user's umask gives the other files.
    (folder / WEIGHTS).chmod((folder / "config.json").stat().st_mode)


def check_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: ModelRecord, *, tokens: int
) -> float:
    """Check that the tokenizer gives the bundled prose back and that the model finds it likely; return its mean NLL.

    Args:
        model: the model, on any device and in any floating type.
        tokenizer: its tokenizer.
        record: says how high the mean may be: `nll_bound` from 512 tokens on, `quick_nll_bound` for fewer.
        tokens: how many tokens of the prose are read.

    Raises:
        ModelFileError: the text does not come back, or its mean NLL (nats a token) is above the bound or not a number.
    """
    text = check_text()
    remedy = (
        f"this happens with releases of transformers that read the files wrongly (here: {transformers.__version__}); "
        "install another, remove the model's folder and load it again"
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    back = tokenizer.decode(ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if back != text:
        start = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
        raise ModelFileError(
            expected=f"the tokenizer of {record.name} to give the text {text[start : start + 40]!r} back",
            received=repr(back[start : start + 40]),
            remedy=remedy,
        )
    bound = record.nll_bound if tokens >= CHECK_TOKENS else record.quick_nll_bound
    nll = mean_nll(model, ids[:, :tokens])
    if not nll <= bound:  # NaN is not below anything
        raise ModelFileError(
            expected=f"{record.name} to read {tokens} tokens of plain prose with a mean NLL of at most {bound}",
            received=f"{nll:.2f} in {model.dtype}",
            remedy=remedy,
        )
    return nll


def mean_nll(model: PreTrainedModel, ids: Tensor) -> float:
    """Mean negative log-likelihood, in nats a token, of `ids [1, T]` but for the first."""
    ids = ids.to(model.device)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
