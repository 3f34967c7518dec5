"""kvpress's side of a comparison, in kvpress's own environment: answers requests and measures its own milliseconds.

One JSON object a line on stdin, `{"do": ..., ...}`, and one a line on stdout. Started by `kvpress_side.py`, with the
folder of the model's weights and the number of threads. It imports nothing of kvkeep, and torch, transformers and
kvpress come from the environment that it runs in. Tensors are handed over in safetensors files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch
import transformers
from kvpress import (
    AdaKVPress,
    BasePress,
    ChunkKVPress,
    CriticalAdaKVPress,
    ExpectedAttentionPress,
    KnormPress,
    KVPressTextGenerationPipeline,
    KVzipPress,
    SnapKVPress,
    StreamingLLMPress,
)
from kvpress.presses import snapkv_press
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def press_of(description: dict[str, Any]) -> BasePress:
    """`{"name": ..., "ratio": ..., "window": ..., "kernel": ...}`."""
    snapkv = SnapKVPress(description["ratio"], window_size=description["window"], kernel_size=description["kernel"])
    wrapped = {
        "snapkv": lambda: snapkv,
        "chunkkv": lambda: ChunkKVPress(snapkv),
        "adakv": lambda: AdaKVPress(snapkv),
        "criticaladakv": lambda: CriticalAdaKVPress(snapkv),
        "kvzip": lambda: KVzipPress(description["ratio"]),
        "expected-attention": lambda: ExpectedAttentionPress(description["ratio"]),
        "knorm": lambda: KnormPress(description["ratio"]),
        "streaming-llm": lambda: StreamingLLMPress(description["ratio"]),
    }
    press: BasePress = wrapped[description["name"]]()
    return press


def storage_bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Worker:
    """The model, the caches that requests have filled, and the tensors of layers that they have handed over."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.folder = folder
        self.pipeline: KVPressTextGenerationPipeline | None = None
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.attentions = [layer.self_attn for layer in self.model.model.layers]
        self.caches: dict[str, DynamicCache] = {}
        self.masked: dict[str, list[Any]] = {}  # what AdaKV left on the model for each cache
        self.lengths: dict[str, int] = {}
        self.layers: list[dict[str, Tensor]] = []

    # -- whole forwards ----------------------------------------------------------------------------------------------

    def hello(self) -> dict[str, Any]:
        """Versions, and the number of threads."""
        versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
        return {"versions": versions, "threads": torch.get_num_threads()}

    def prefill(
        self, cache: str, tokens: str, press: dict[str, Any] | None = None, save: str | None = None
    ) -> dict[str, Any]:
        """Run a prompt into a new cache of that name.

        Args:
            cache: its name.
            tokens: a file with `tokens [1, L]`.
            press: see `press_of`; None for no press.
            save: a file to write the last logits to, and `kept [layers, H_kv, L]` where the press masks heads.
        """
        ids = load_file(tokens)["tokens"]
        self.forget(cache)
        filled = DynamicCache()

        def run() -> Tensor:
            logits: Tensor = self.model(input_ids=ids, past_key_values=filled, use_cache=True, logits_to_keep=1).logits
            return logits

        for attention in self.attentions:
            attention.masked_key_indices = None
        started = time.perf_counter()
        with nullcontext() if press is None else press_of(press)(self.model):
            logits = run()
        milliseconds = 1000 * (time.perf_counter() - started)
        masked = [getattr(attention, "masked_key_indices", None) for attention in self.attentions]
        self.caches[cache], self.masked[cache], self.lengths[cache] = filled, masked, ids.shape[1]
        if save is not None:
            tensors = {"logits": logits[0, -1].clone()}
            indices = [m for m in masked if m is not None]
            if len(indices) == len(masked):
                tensors["kept"] = torch.stack(
                    [self._kept(layer, m) for layer, m in zip(filled.layers, indices, strict=True)]
                )
            save_file(tensors, save)
        return {
            "ms": milliseconds,
            "bytes": storage_bytes([t for layer in filled.layers for t in (layer.keys, layer.values)]),
            "index_bytes": storage_bytes([t for m in masked if m is not None for t in m]),
        }

    def step(self, cache: str, token: int, save: str | None = None) -> dict[str, Any]:
        """One more token; `save`: a file to write its logits to."""
        for attention, masked in zip(self.attentions, self.masked[cache], strict=True):
            attention.masked_key_indices = masked
        ids = torch.tensor([[token]])
        positions = torch.tensor([[self.lengths[cache]]])
        started = time.perf_counter()
        logits = self.model(
            input_ids=ids, past_key_values=self.caches[cache], position_ids=positions, use_cache=True
        ).logits
        milliseconds = 1000 * (time.perf_counter() - started)
        self.lengths[cache] += 1
        if save is not None:
            save_file({"logits": logits[0, -1].clone()}, save)
        return {"ms": milliseconds}

    def forget(self, cache: str) -> dict[str, Any]:
        """Let go of a cache."""
        for held in (self.caches, self.masked, self.lengths):
            held.pop(cache, None)
        return {}

    @staticmethod
    def _kept(layer: Any, masked: tuple[Tensor, ...]) -> Tensor:
        kept = torch.ones(layer.keys.shape[1:3], dtype=torch.bool)
        kept[masked[1], masked[2]] = False
        return kept

    # -- kvpress's own pipeline ----------------------------------------------------------------------------------------

    def answer(
        self, context: str, question: str, answer_prefix: str, max_new_tokens: int, press: dict[str, Any]
    ) -> dict[str, Any]:
        """Cut a context, then ask about it.

        Args:
            context: is read under the press.
            question: is asked of what is left.
            answer_prefix: the beginning of the answer.
            max_new_tokens: at most so many.
            press: see `press_of`.
        """
        pipe = self._pipeline()
        acting = press_of(press)
        started = time.perf_counter()
        result = pipe(
            context, question=question, answer_prefix=answer_prefix, press=acting, max_new_tokens=max_new_tokens
        )
        return {"ms": 1000 * (time.perf_counter() - started), "answer": result["answer"]}

    def tokens(self, context: str, question: str, answer_prefix: str) -> dict[str, Any]:
        """The tokens that `answer` makes of its texts."""
        made = self._pipeline().preprocess(context, [question], answer_prefix, max_context_length=10**9)
        return {"context": made["context_ids"][0].tolist(), "question": made["questions_ids"][0][0].tolist()}

    def _pipeline(self) -> KVPressTextGenerationPipeline:
        if self.pipeline is None:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
            self.pipeline = KVPressTextGenerationPipeline(model=self.model, tokenizer=tokenizer)
        return self.pipeline

    # -- single layers -----------------------------------------------------------------------------------------------

    def load(self, tensors: str) -> dict[str, Any]:
        """Take over layers: a file with `queries`, `keys`, `values`, each `[layers, 1, heads, n, D]`.

        The queries are those of the last tokens, after rotation. kvpress projects and rotates its queries itself;
        here it gets these instead of the projection, and a rotation by zero, so that both sides judge by the same
        queries and neither pays for making them.
        """
        file = load_file(tensors)
        names = ("queries", "keys", "values")
        self.layers = [{name: file[name][i].clone() for name in names} for i in range(file["keys"].shape[0])]
        return {}

    def evict(
        self, layer: int, press: dict[str, Any], part: str = "all", mark: bool = False, save: str | None = None
    ) -> dict[str, Any]:
        """Score a loaded layer (`part="score"`), or score, choose and gather (`part="all"`).

        Args:
            layer: which of the loaded layers.
            press: see `press_of`.
            part: what is measured.
            mark: put the positions into the place of the values, so that they show what was kept.
            save: a file to write `scores [1, H_kv, L]` or the stored `keys` and `values` to.
        """
        acting = press_of(press)
        tensors = self.layers[layer]
        keys, values = tensors["keys"], tensors["values"]
        length, window = keys.shape[2], press["window"]
        if mark:
            values = torch.arange(length, dtype=values.dtype)[None, None, :, None].expand_as(values).contiguous()
        queries = tensors["queries"][:, :, -window:]
        snapkv_press.get_prerope_query_states = lambda module, hidden: queries
        hidden = keys.new_zeros(1, 1, 1).expand(1, length, self.model.config.hidden_size)
        rotation = (keys.new_ones(1, window, keys.shape[3]), keys.new_zeros(1, window, keys.shape[3]))
        arguments = (self.attentions[0], hidden, keys, values, None, {"position_embeddings": rotation})
        call: Callable[..., Any] = acting.compress
        if part == "score":
            call = acting.score if isinstance(acting, SnapKVPress) else acting.press.score
        started = time.perf_counter()
        result = call(*arguments)
        milliseconds = 1000 * (time.perf_counter() - started)
        if save is not None:
            saved = {"scores": result} if part == "score" else dict(zip(("keys", "values"), result, strict=True))
            save_file({name: tensor.contiguous().clone() for name, tensor in saved.items()}, save)
        return {"ms": milliseconds}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    transformers.utils.logging.disable_progress_bar()
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    requests = {
        name: getattr(worker, name)
        for name in ("hello", "prefill", "step", "forget", "load", "evict", "answer", "tokens")
    }
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            answer = requests[request.pop("do")](**request)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
