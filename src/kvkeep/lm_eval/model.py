"""The harness's model: contexts are read and cut, and whatever is scored or generated is read from what is left.

The last token of a context waits until the cut is made, so that no prediction that counts comes from the full cache:

- log-likelihoods: the context but its last token is read and cut, then that token and the continuation are fed. A
  context that several continuations share is read once.
- generation: the same, then tokens one by one.
- rolling log-likelihoods: a text has no context of its own. It is read in pieces of `rolling_tokens`; each piece is
  predicted from what the pieces before it left, and everything is cut again behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from kvkeep.budget import read_budget
from kvkeep.errors import UnsupportedError, near_names
from kvkeep.hf.cache import KeepCache
from kvkeep.hf.decoding import decode_batch, greedy
from kvkeep.hf.models import load_model, model_sha256
from kvkeep.hf.repeat_prompt import RepeatPrompt
from kvkeep.hf.sampling import Sampling
from kvkeep.lm_eval.caches import Caches, Short

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_OPTIONS = (
    *("max_length", "add_bos_token", "prefix_token_id"),
    *("think_end_token", "enable_thinking", "chat_template_args"),
)

# A request of the harness: what was asked, as text (or None), and its context and continuation, as tokens.
Scored = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("kvkeep")
class KvkeepLM(HFLM):  # type: ignore[misc]  # the harness is not typed
    """A model of the harness whose cache is cut by a policy.

    Args:
        pretrained: a known model, a folder, a .gguf file, a hub id, or a loaded model.
        policy: as on the command line. The harness splits `key=value` arguments at commas: a policy with several
            options goes into a JSON object, `--model_args '{"policy": "snapkv[window=64,kernel=5]", ...}'`.
        compression_ratio: fraction of entries to remove.
        entries: or: entries that a cell keeps on average.
        bytes: or: bytes of the whole cache.
        tokenizer: of a loaded model.
        short_contexts: contexts too short to evict from are counted ("count"; the share goes into the results), or an
            error ("refuse"). If nothing is evicted at all, that is an error in any case.
        rolling_tokens: size of a piece for rolling log-likelihoods.
        seed: of drawn tokens.
        dtype: of weights and cache.
        device: of torch; a GPU by default, and the CPU where there is none.
        batch_size: contexts that generate together. Log-likelihoods are scored one by one.
        max_batch_size: ignored; there is no batch size to be found.
        options: of the harness's own model class that concern texts: max_length, add_bos_token, prefix_token_id,
            think_end_token, enable_thinking, chat_template_args.

    Raises:
        BudgetError: no budget, or more than one.
        PolicyError: an unknown policy.
        UnsupportedError: a model that kvkeep has not checked, an unknown argument, or a batch size of "auto".
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str = "full",
        *,
        compression_ratio: float | None = None,
        entries: int | None = None,
        bytes: int | str | None = None,
        tokenizer: Any = None,
        short_contexts: Short = "count",
        rolling_tokens: int = 512,
        seed: int = 0,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UnsupportedError(
                expected="batch_size as a whole number of at least 1",
                received=f"{batch_size!r}",
                remedy="so many contexts generate together; for example batch_size=8",
            )
        if short_contexts not in ("count", "refuse") or rolling_tokens < 1:
            raise UnsupportedError(
                expected="short_contexts=count or refuse, and rolling_tokens of at least 1",
                received=f"short_contexts={short_contexts}, rolling_tokens={rolling_tokens}",
                remedy="leave them out for count and 512",
            )
        for name in options:
            if name not in _OPTIONS:
                known = [*_OPTIONS, "policy", "compression_ratio", "entries", "bytes", "dtype", "device"]
                raise UnsupportedError(
                    expected="an argument that this model knows", received=name, remedy=near_names(name, known)
                )
        if not isinstance(pretrained, str) and tokenizer is None:
            raise UnsupportedError(
                expected="tokenizer= beside a loaded model", received="none", remedy="pass the model's tokenizer"
            )
        model = pretrained
        if isinstance(pretrained, str):
            # The harness's command says cuda:0 where nobody says anything; its own model then takes what there is.
            asked = device or "cuda"
            place = "cpu" if asked.startswith("cuda") and not torch.cuda.is_available() else asked
            model, tokenizer = load_model(pretrained, dtype=dtype, device=place)
        budget = read_budget(compression_ratio=compression_ratio, entries=entries, bytes=bytes)
        repeat_prompt = RepeatPrompt.of(tokenizer)
        self.caches = Caches(model, policy, budget, repeat_prompt, short_contexts)
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=int(batch_size), **options)
        self._name = pretrained if isinstance(pretrained, str) else type(pretrained).__name__
        self._rolling_tokens, self._seed = rolling_tokens, seed

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches of requests."""
        return str(self._name).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results: the model's hash, and what was evicted."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "model_sha": model_sha256(self.model),
            "kvkeep": self.caches.describe(),
        }

    # -- scoring ---------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[Scored], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation behind its context, and whether it is what greedy decoding says."""
        before = replace(self.caches.counts)
        groups: dict[tuple[int, ...], list[int]] = {}
        texts = [
            _fitted(context or [self.prefix_token_id], continuation, self.max_length)
            for _, context, continuation in requests
        ]
        for index, (ids, _) in enumerate(texts):
            groups.setdefault(tuple(ids), []).append(index)
        found: dict[int, tuple[float, bool]] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests")
        for context, members in groups.items():
            cache = self.caches.read(context[:-1])
            for index in members:
                continuation = texts[index][1]
                fed = [context[-1], *continuation[:-1]]
                predicted = self.caches.forward(None if cache is None else cache.fork(), fed, len(continuation))
                told = torch.tensor(continuation, device=predicted.device)
                likelihood = float(predicted.gather(1, told[:, None]).double().sum())
                found[index] = likelihood, bool((predicted.argmax(-1) == told).all())
                if (asked := requests[index][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", asked, found[index])
                bar.update()
        bar.close()
        self.caches.check(before)
        return [found[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, every token predicted once; see above for what it is predicted from."""
        before, found = replace(self.caches.counts), []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood_rolling requests"):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found.append(sum(self._roll(*make_disjoint_window(window)) for window in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        self.caches.check(before)
        return found

    def _roll(self, context: Sequence[int], continuation: Sequence[int]) -> float:
        """Log-likelihood of a continuation, in pieces."""
        cache = self.caches.new()
        if not self.caches.is_online:
            cache.cut_on_request()
        ids, told = [*context, *continuation][:-1], [*context, *continuation][1:]
        total = 0.0
        for start in range(0, len(ids), self._rolling_tokens):
            piece = ids[start : start + self._rolling_tokens]
            if not self.caches.is_online:
                cache.cut_next()
            predicted = self.caches.forward(cache, piece, len(piece))
            self.caches.count(cache)
            wanted = [at for at in range(len(piece)) if start + at >= len(context) - 1]
            target = torch.tensor([told[start + at] for at in wanted], device=predicted.device)
            total += float(predicted[wanted].gather(1, target[:, None]).double().sum())
        return total

    # -- generation ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to a stop sequence."""
        before = replace(self.caches.counts)
        found: dict[int, str] = {}
        repeated: Counter[str] = Counter()
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests")
        for options, members in self._batches(requests):
            contexts = [requests[index].args[0] for index in members]
            number = repeated[contexts[0]]  # the same request may come again, to be drawn anew
            repeated.update(contexts)
            sampling = _sampling(options)
            choose = greedy if sampling is None else sampling.chooser(self._seed, contexts[0], number)
            for index, text in zip(members, self._generate(contexts, options, choose), strict=True):
                found[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
            bar.update(len(members))
        bar.close()
        self.caches.check(before)
        return [found[index] for index in range(len(requests))]

    def _batches(self, requests: list[Any]) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Requests that generate together: of the same options, and of those whose rows may decode together."""
        alone = self.caches.is_online or bool(self.caches.new().sliding_layers)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        for members in groups.values():
            options = normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks)
            size = 1 if alone or options.get("do_sample") else self.batch_size
            for first in range(0, len(members), size):
                yield dict(options), members[first : first + size]

    def _generate(
        self, contexts: Sequence[str], options: dict[str, Any], choose: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[str]:
        until = handle_stop_sequences(options.get("until"), eos=self.tok_decode(self.eot_token_id, False))
        most = int(options["max_gen_toks"])
        if most >= self.max_length:
            raise UnsupportedError(
                expected=f"an answer of fewer than the model's {self.max_length} tokens",
                received=f"max_gen_toks={most}",
                remedy="ask for fewer tokens",
            )
        texts = [self.tok_encode(text, left_truncate_len=self.max_length - most) for text in contexts]
        if len(texts) > 1 and min(map(len, texts)) < 2:  # nothing to read before the last token: no rows to stack
            return [answer for text in contexts for answer in self._generate([text], options, choose)]
        texts = [ids or [self.prefix_token_id] for ids in texts]
        caches = [self.caches.read(ids[:-1]) or self.caches.new() for ids in texts]
        # A stop sequence may stand across the last tokens: no token is shorter than a byte.
        reach = 8 + max(len(word.encode()) for word in until)
        new = decode_batch(
            self.model,
            caches[0] if len(caches) == 1 else KeepCache.stack(caches),
            [ids[-1:] for ids in texts],
            max_new_tokens=most,
            stop_tokens=[self.eot_token_id],
            stop=lambda row, tokens: any(word in self.tok_decode(tokens[-reach:]) for word in until if word),
            choose=choose,
        )
        return [self._text(tokens, until) for tokens in new]

    def _text(self, tokens: list[int], until: list[str]) -> str:
        """An answer without its stop sequence, and without a chain of thought that the harness was told to drop."""
        mark = self.think_end_token
        if isinstance(mark, int) and mark in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(mark) :]
        text = self.tok_decode(tokens)
        if isinstance(mark, int):
            text = text.lstrip()
        words = mark if isinstance(mark, str) else None
        return str(postprocess_generated_text(text, stop=until, think_end_token=words))


def _fitted(context: Sequence[int], continuation: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """The end of a context that is too long, as the harness's own model takes it.

    Raises:
        UnsupportedError: a continuation that alone is longer than the model's positions, or an empty one.
    """
    if not 0 < len(continuation) <= most:
        raise UnsupportedError(
            expected=f"a continuation of 1 to {most} tokens, the positions of the model",
            received=f"{len(continuation)}",
            remedy="set max_length, or use a model of longer contexts",
        )
    room = most + 1 - len(continuation)
    return list(context)[-room:], list(continuation)


def _sampling(options: dict[str, Any]) -> Sampling | None:
    """How tokens are drawn; None for greedy decoding.

    Raises:
        UnsupportedError: options of generate that are neither about drawing nor about the end.
    """
    unknown = set(options) - {"do_sample", "until", "max_gen_toks", *_SAMPLING}
    if unknown:
        raise UnsupportedError(
            expected=f"do_sample, {', '.join(_SAMPLING)}, until and max_gen_toks as options of generation",
            received=", ".join(sorted(unknown)),
            remedy="leave them out",
        )
    if not options.get("do_sample"):
        return None
    return Sampling(**{name: options[name] for name in _SAMPLING if options.get(name)})
