"""An answer that the model's own `generate` writes behind what a cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvkeep.errors import UnsupportedError
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.decoding import end_tokens
from kvkeep.hf.support import CACHE_ARGUMENT
from kvkeep.hf.watch import Watch

# Options of generate that would not leave one answer in words behind one cache, and why.
_REFUSED = {
    "inputs": "the question is the input",
    "input_ids": "the question is the input",
    "inputs_embeds": "the question is the input",
    "attention_mask": "the session makes it from what the cache has seen",
    "past_key_values": "the session has its cache",
    "cache": "the session has its cache",
    "use_cache": "without the cache the text is not seen",
    "num_beams": "a session holds one row",
    "num_return_sequences": "a session holds one row",
    "assistant_model": "assisted decoding rolls the cache back",
    "prompt_lookup_num_tokens": "assisted decoding rolls the cache back",
    "streamer": "pass on_text",
    "return_dict_in_generate": "an Answer is returned",
    "generation_config": "pass its settings one by one",
}
_HARMLESS = {"use_cache": True, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}


@dataclass(frozen=True)
class Answer:
    """What the model said.

    Attributes:
        text: without special tokens.
        new_tokens: tokens generated, the end token included.
        time_to_first_token_s: from the call of `ask` to the first token, the question's processing included.
        decode_tokens_per_s: rate of the tokens after the first; 0 if there was only one.
    """

    text: str
    new_tokens: int
    time_to_first_token_s: float
    decode_tokens_per_s: float


def joint_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second over all answers together, after the first token of each; 0 if no answer has a second one."""
    rated = [answer for answer in answers if answer.decode_tokens_per_s]
    seconds = sum((answer.new_tokens - 1) / answer.decode_tokens_per_s for answer in rated)
    return sum(answer.new_tokens - 1 for answer in rated) / seconds if seconds else 0.0


def generate_answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    cache: KeepCache,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    on_text: Callable[[str], None] | None,
    options: dict[str, Any],
) -> tuple[Answer, list[int]]:
    """Let a model answer.

    Args:
        model: that the cache was made for.
        tokenizer: its tokenizer.
        cache: of one row; question and answer are added to it.
        ids: tokens of the question, at least one.
        max_new_tokens: at most so many.
        on_text: called with each piece of the answer as it comes.
        options: anything else that `generate` takes, as `check_options` leaves it.

    Returns:
        The answer, and those of its tokens that are not in the cache: `generate` never feeds its last one back.
    """
    inputs = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    seen = cache.get_seq_length()
    streamer = Watch(tokenizer, on_text)
    ends = sorted(end_tokens(model, tokenizer))
    pad = tokenizer.pad_token_id
    options = {
        "do_sample": False,
        "pad_token_id": int(pad) if pad is not None else (ends or [0])[0],
        "eos_token_id": ends,
    } | options
    if not options["do_sample"]:
        # Sampling settings of the model's own configuration would only make generate warn.
        options = {"temperature": None, "top_p": None, "top_k": None} | options
    if "stop_strings" in options:
        options["tokenizer"] = tokenizer
    output = model.generate(
        inputs,
        attention_mask=torch.ones(1, seen + len(ids), dtype=torch.long, device=inputs.device),
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        **{CACHE_ARGUMENT: cache},
        **options,
    )
    new = output[0, len(ids) :].tolist()
    answer = Answer(
        text=str(tokenizer.decode(new, skip_special_tokens=True)),
        new_tokens=len(new),
        time_to_first_token_s=streamer.first_token_s,
        decode_tokens_per_s=streamer.tokens_per_s,
    )
    return answer, new[cache.get_seq_length() - seen - len(ids) :]


def check_options(generate: dict[str, Any]) -> dict[str, Any]:
    """Refuse options of `model.generate` that would not leave one answer in words behind one cache.

    Returns:
        The options, without those of the list that are None, which is to say not given.
    """
    for name in sorted(generate.keys() & _REFUSED.keys()):
        value = generate[name]
        if value is None or (isinstance(value, int) and name in _HARMLESS and value == _HARMLESS[name]):
            continue
        raise UnsupportedError(
            expected="options of generate that lead to one answer in words",
            received=f"{name} ({_REFUSED[name]})",
            remedy="leave it out, or call model.generate with a KeepCache",
        )
    return {name: value for name, value in generate.items() if name not in _REFUSED or value is not None}
